"""Write workflows/*.json and subgraphs/*.json in the format in which the canvas saves a graph.

The canvas fits a graph to 0.75 of the window when it opens it. The classic renderer writes no text below a scale of
8/14. A workflow is therefore at most 1730 x 1105 px with its titles, which a window of 1400 x 900 shows at 0.6.
tests/browser/test_template_canvas.py checks in both renderers that nothing overlaps and no text is cut after a run.
"""

from __future__ import annotations

import math
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from setup import ROOT

sys.path.append(str(ROOT))
from sana_core.checkpoints.generation import DOWNLOADS  # noqa: E402

Json = dict[str, Any]
NOTE, DYNAMIC = "MarkdownNote", "COMFY_DYNAMICCOMBO_V3"
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", DYNAMIC}
# Modes of a node: a run leaves a muted node out, and passes the inputs of a bypassed node through.
MUTED, BYPASSED = 2, 4
# What the canvas does with a seed after a run: "fixed" or "randomize". A key of Node.inputs.
CONTROL = "control after generate"
# Pixels. The position of a node is the corner below its title.
TITLE, BETWEEN, COLUMN, FRAME, GROUP_TITLE = 30, 20, 40, 15, 40
WIDTH, SOCKET, WIDGET, LOW_WIDGET, TEXT, EDGE = 270, 22, 32, 24, 60, 32
# As in ComfyUI's own templates. Text on a note of another colour has too little contrast in Nodes 2.0.
COLOUR, NOTE_COLOURS = "#3f789e", {"color": "#222", "bgcolor": "#000"}
# The canvas fits an opened template into this part of a window of 1400 x 900 px.
FITTED = 1050, 675
# What covers the canvas there, in pixels of the window from the middle of the template: the left and lower edges of
# messages about missing files, and the left and upper edges of the minimap.
MESSAGE, MINIMAP = (328, -233), (443, 193)
# Height below the widgets of a subgraph's node, with and without a preview.
PREVIEW_ROOM, NO_PREVIEW_ROOM = 215, 40
# Sockets of a subgraph that come first, in the order of a loader's outputs.
PORTS = ("model", "clip", "vae")
PREVIEW = "$$canvas-image-preview"
SAMPLERS = ("SanaNodesSampler", "SanaNodesSprint", "SanaNodesBatchSampler")
# These nodes show an image that is as wide as the node.
IMAGES = ("SaveImage", "PreviewImage", "LossGraphNode", "LoadImage")
# These nodes write lines below their widgets when they run.
REPORTING = (
    "SanaNodesLoader",
    "SanaNodesModelLoader",
    "SanaNodesControlNetLoader",
    "SanaNodesLoraLoader",
    "SanaNodesModelSwitch",
    "SanaNodesTextEncode",
    "SanaNodesEmptyLatent",
    "SanaNodesDecode",
    "SanaNodesDataset",
    "SanaNodesDoctor",
)
# Height below the widgets that a preview or lines of text need.
ROOM = {
    **dict.fromkeys(SAMPLERS, 240),
    **dict.fromkeys(REPORTING, 45),
    "SanaNodesPromptList": 210,
    "SanaNodesTrain": 180,
    "SanaNodesPlan": 260,
}


class Node(NamedTuple):
    """A node of a graph."""

    # The class of the node, or the subgraph that it shows.
    kind: str | Subgraph
    # {input: value}. A tuple (name of a node, number of its output) is a link.
    inputs: dict[str, Any]
    title: str | None = None
    width: int = WIDTH
    # Pixels below the widgets. None: the value of ROOM.
    room: int | None = None
    mode: int = 0


class Graph(NamedTuple):
    nodes: dict[str, Node]
    # Columns from left to right, with groups of nodes from top to bottom: "note / Files: file vae | Prompt: prompt".
    columns: str


class Subgraph(NamedTuple):
    """A graph that is shown as one node. A link to a name that is not in the graph becomes a socket of that name."""

    name: str
    graph: Graph
    # {name: "node.input node.input"}. The widget shows the value of the last input.
    widgets: dict[str, str]
    # {name: (name of a node, number of its output)}
    outputs: dict[str, tuple[str, int]]
    description: str = ""
    # Whether the node shows the preview of the last sampler inside it. Only Nodes 2.0 does.
    preview: bool = True


class Field(NamedTuple):
    """An input of a class of nodes."""

    type: str
    options: Json
    widget: bool

    def default(self) -> Any:
        if self.type == DYNAMIC:
            return self.options["options"][0]["key"]
        return self.options["options"][0] if self.type == "COMBO" else self.options.get("default")


class File(NamedTuple):
    """State that all graphs of one file share. Ids are unique in the whole file, also across subgraphs."""

    name: str
    # the server's /object_info
    info: Json
    node_ids: Iterator[int]
    link_ids: Iterator[int]
    group_ids: Iterator[int]
    subgraphs: list[Json]


def start_file(name: str, info: Json) -> File:
    return File(name, info, count(1), count(1), count(1), [])


def fixed_id(*parts: str) -> str:
    """Return a UUID that depends on `parts` only, so that files do not change without a reason."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "/".join(parts)))


def fields_of(info: Json, kind: str, values: Mapping[str, Any]) -> dict[str, Field]:
    """Return the inputs of a class of nodes in the order of the canvas: sockets first, then widgets."""
    inputs = info[kind]["input"]
    fields = read_fields({**inputs.get("required", {}), **inputs.get("optional", {})}, values)
    return dict(sorted(fields.items(), key=lambda item: item[1].widget))


def read_fields(inputs: Json, values: Mapping[str, Any]) -> dict[str, Field]:
    """Return the fields of `inputs`, a part of /object_info. The choice in a dynamic combo adds its own inputs.

    A dynamic combo without a value in `values` has its first choice, as on the canvas.
    """
    fields = {}
    for name, (type_, *more) in inputs.items():
        options = more[0] if more else {}
        if isinstance(type_, list):
            type_, options = "COMBO", {**options, "options": type_}
        if options.get("socketless"):
            continue
        if type_ == DYNAMIC:
            choices = {choice["key"]: choice["inputs"] for choice in options["options"]}
            value = values.get(name, next(iter(choices)))
            fields[name] = Field(type_, {**options, "default": value}, True)
            inner = {**choices[value].get("required", {}), **choices[value].get("optional", {})}
            fields |= read_fields({f"{name}.{key}": field for key, field in inner.items()}, values)
        else:
            fields[name] = Field(type_, options, type_ in WIDGETS and not options.get("forceInput"))
    return fields


def field_of(info: Json, node: Node, name: str) -> tuple[Field, Any]:
    """Return an input of a node and its value. A subgraph shows the input of a node inside it."""
    if isinstance(node.kind, Subgraph):
        inner, field = ends_of(node.kind)[name][-1]
        return field_of(info, node.kind.graph.nodes[inner], field)
    field = fields_of(info, node.kind, node.inputs)[name]
    return field, node.inputs.get(name, field.default())


def write_graph(file: File, graph: Graph) -> tuple[Json, dict[str, Json]]:
    """Return nodes, links and groups of a graph, and its nodes by name."""
    ids = {name: next(file.node_ids) for name in graph.nodes}
    written = {name: write_node(file, node, ids[name]) for name, node in graph.nodes.items()}
    links: list[Json] = []
    for name, node in graph.nodes.items():
        for field, value in node.inputs.items():
            if isinstance(value, tuple) and value[0] in written:
                source, output = written[value[0]], value[1]
                link = add_link(file, links, (source["id"], output), written[name], field)
                source["outputs"][output]["links"].append(link)
    groups = place(file, written, graph.columns)
    return {"nodes": list(written.values()), "links": links, "groups": groups}, written


def add_link(file: File, links: list[Json], origin: tuple[int, int], target: Json, field: str) -> int:
    """Link the input `field` of `target` to `origin`, (id of a node, output), and return the id of the link."""
    slot = [entry["name"] for entry in target["inputs"]].index(field)
    entry = target["inputs"][slot]
    entry["link"] = next(file.link_ids)
    ends = {"origin_id": origin[0], "origin_slot": origin[1], "target_id": target["id"], "target_slot": slot}
    links.append({"id": entry["link"], **ends, "type": entry["type"]})
    return entry["link"]


def write_node(file: File, node: Node, id_: int) -> Json:
    if isinstance(node.kind, Subgraph):
        return write_subgraph_node(file, node.kind, node, id_)
    if node.kind == NOTE:
        text = node.inputs["text"]
        note = frame(node, id_, NOTE, {}, [], note_height(text, node.width))
        return {**note, **NOTE_COLOURS, "properties": {}, "widgets_values": [text]}
    fields = fields_of(file.info, node.kind, node.inputs)
    schema = file.info[node.kind]
    values = []
    for name, field in fields.items():
        if field.widget:
            value = node.inputs.get(name)
            values.append(field.default() if value is None or isinstance(value, tuple) else value)
            if field.options.get("control_after_generate"):
                values.append(node.inputs.get(CONTROL, "fixed"))
    room = node.width + 20 if node.kind in IMAGES else ROOM.get(node.kind, 0)
    outputs = list(zip(schema["output_name"], schema["output"], strict=True))
    # The canvas offers to download these files.
    models = [
        {"name": value, "url": DOWNLOADS[value].url, "directory": DOWNLOADS[value].folder}
        for value in values
        if isinstance(value, str) and value in DOWNLOADS and value.endswith(".safetensors")
    ]
    properties = {"Node name for S&R": node.kind} | ({"models": models} if models else {})
    written = frame(node, id_, node.kind, fields, outputs, room)
    return {**written, "properties": properties, "widgets_values": values}


def note_height(text: str, width: int) -> int:
    """Return the height of a note. A link shows only its name, an empty line is a small gap, and a tree is low."""
    lines = [re.sub(r"\]\([^)]*\)", "", line) for line in text.splitlines()]
    return (
        sum(
            8 if not line else 14 if line[0] in "`\u251c\u2502" else 19 * math.ceil(6.5 * len(line) / (width - 40))
            for line in lines
        )
        + 30
    )


def frame(
    node: Node, id_: int, kind: str, fields: Mapping[str, Field], outputs: list[tuple[str, str]], room: int
) -> Json:
    """Return a node without its values, high enough for its widgets and for `room` below them."""
    widgets = [field for field in fields.values() if field.widget]
    lines = [field for field in widgets if not field.options.get("multiline")]
    # The classic renderer has lower rows, and shows the inputs for experts, which are behind a button in Nodes 2.0.
    classic = LOW_WIDGET * (len(lines) + sum("control_after_generate" in field.options for field in lines))
    usual = [field for field in lines if not field.options.get("advanced")]
    modern = WIDGET * (len(usual) + (len(usual) < len(lines)))
    height = EDGE + SOCKET * max(len(fields) - len(widgets), len(outputs))
    height += TEXT * (len(widgets) - len(lines)) + max(classic, modern)
    return {
        "id": id_,
        "type": kind,
        "pos": [0, 0],
        "size": [node.width, height + (room if node.room is None else node.room)],
        "flags": {},
        "order": 0,
        "mode": node.mode,
        "inputs": [
            {"name": name, "type": field.type, **({"widget": {"name": name}} if field.widget else {}), "link": None}
            for name, field in fields.items()
        ],
        "outputs": [{"name": name, "type": type_, "links": []} for name, type_ in outputs],
        **({"title": node.title} if node.title else {}),
    }


def write_subgraph_node(file: File, subgraph: Subgraph, node: Node, id_: int) -> Json:
    """Return the node that shows `subgraph`, and add the subgraph to the file."""
    graph, written = write_graph(file, subgraph.graph)
    subgraph_id = fixed_id(file.name, subgraph.name)
    fields, values, inputs, outputs = {}, [], [], []
    for position, (name, ends) in enumerate(ends_of(subgraph).items()):
        links = [add_link(file, graph["links"], (-10, position), written[inner], field) for inner, field in ends]
        fields[name], value = field_of(file.info, node, name)
        inputs.append({"id": fixed_id(subgraph_id, name), "name": name, "type": fields[name].type, "linkIds": links})
        if fields[name].widget:
            values.append(value)
    for position, (name, (inner, output)) in enumerate(subgraph.outputs.items()):
        link = next(file.link_ids)
        source = written[inner]["outputs"][output]
        source["links"].append(link)
        ends = {"origin_id": written[inner]["id"], "origin_slot": output, "target_id": -20, "target_slot": position}
        graph["links"].append({"id": link, **ends, "type": source["type"]})
        socket = {"id": fixed_id(subgraph_id, name, "out"), "name": name, "type": source["type"], "linkIds": [link]}
        outputs.append(socket)
    samplers = [inner["id"] for inner in written.values() if subgraph.preview and inner["type"] in SAMPLERS]
    previews = [{"name": PREVIEW, "sourceNodeId": str(inner), "sourcePreviewName": PREVIEW} for inner in samplers[-1:]]
    right = max(inner["pos"][0] + inner["size"][0] for inner in written.values())
    last_ids = {
        "lastGroupId": next(file.group_ids),
        "lastNodeId": next(file.node_ids),
        "lastLinkId": next(file.link_ids),
    }
    definition = {
        "id": subgraph_id,
        "version": 1,
        "state": {**last_ids, "lastRerouteId": 0},
        "revision": 0,
        "config": {},
        "name": subgraph.name,
        "description": subgraph.description,
        "category": "SANA",
        "inputNode": {"id": -10, "bounding": [-180, 0, 128, 40 + 20 * len(inputs)]},
        "outputNode": {"id": -20, "bounding": [right + 50, 0, 128, 40 + 20 * len(outputs)]},
        "inputs": inputs,
        "outputs": outputs,
        "widgets": [],
        **graph,
        "extra": {},
    }
    file.subgraphs.append(definition)
    sockets = [(socket["name"], socket["type"]) for socket in outputs]
    room = PREVIEW_ROOM if previews else NO_PREVIEW_ROOM
    shown = frame(node._replace(title=node.title or subgraph.name), id_, subgraph_id, fields, sockets, room)
    return {**shown, "properties": {"previewExposures": previews}, "widgets_values": values}


def ends_of(subgraph: Subgraph) -> dict[str, list[tuple[str, str]]]:
    """Return {input of the subgraph's node: [(name of a node inside it, input)]}."""
    nodes = subgraph.graph.nodes
    sockets: dict[str, list[tuple[str, str]]] = {}
    for name, node in nodes.items():
        for field, value in node.inputs.items():
            if isinstance(value, tuple) and value[0] not in nodes:
                sockets.setdefault(value[0], []).append((name, field))
    ordered = {name: sockets[name] for name in (*PORTS, *sockets) if name in sockets}
    widgets = {}
    for name, ends in subgraph.widgets.items():
        pairs = [end.partition(".") for end in ends.split()]
        widgets[name] = [(inner, field) for inner, _, field in pairs]
    return ordered | widgets


def place(file: File, written: dict[str, Json], columns: str) -> list[Json]:
    """Set the positions of the nodes, and return a group around the nodes of each title, also in adjacent columns.

    The last group of a column ends where the longest column ends.
    """
    groups: list[Json] = []
    last_groups = []
    bottom = left = 0
    stacks = [[group.rpartition(":") for group in column.split("/")] for column in columns.split("|")]
    nodes = [[written[name] for _, _, names in stack for name in names.split()] for stack in stacks]
    widths = [max(node["size"][0] for node in column) for column in nodes]
    heights = [
        sum(TITLE + node["size"][1] + BETWEEN for node in column) + (len(stack) - 1) * (GROUP_TITLE + FRAME) - BETWEEN
        for column, stack in zip(nodes, stacks, strict=True)
    ]
    middle_x, middle_y = (sum(widths) + COLUMN * (len(stacks) - 1)) / 2, max(heights) / 2
    scale = min(FITTED[0] / middle_x, FITTED[1] / middle_y) / 2
    for stack, width, height in zip(stacks, widths, heights, strict=True):
        right = (left + width - middle_x) * scale
        y = 0
        # Below the messages. Above the minimap too, in the middle between both, if the column reaches that far right.
        if "note" in written and right > MESSAGE[0] and (stack is stacks[-1] or not stack[0][0]):
            y = max(0, round(middle_y + MESSAGE[1] / scale))
            free = (MINIMAP[1] - MESSAGE[1]) / scale if right > MINIMAP[0] else height
            y += max(0, round((free - height) / 2))
        for number, (title, _, names) in enumerate(stack):
            y += number * (GROUP_TITLE + FRAME)
            top = y
            for name in names.split():
                node = written[name]
                node["pos"], node["size"][0] = [left, y + TITLE], width
                y += TITLE + node["size"][1] + BETWEEN
            y -= BETWEEN
            if title:
                box = [left - FRAME, top - GROUP_TITLE, width + 2 * FRAME, y - top + GROUP_TITLE + FRAME]
                if groups and groups[-1]["title"] == title.strip():
                    groups[-1]["bounding"][2] = box[0] + box[2] - groups[-1]["bounding"][0]
                    continue
                group = {"title": title.strip(), "bounding": box, "color": COLOUR, "font_size": 24, "flags": {}}
                groups.append({"id": next(file.group_ids), **group})
        last_groups += groups[-1:] if title else []
        bottom = max(bottom, y)
        left += width + COLUMN
    for group in last_groups:
        group["bounding"][3] = bottom + FRAME - group["bounding"][1]
    return groups


def write_file(file: File, graph: Graph) -> tuple[Json, dict[str, Json]]:
    """Return the content of the file of `graph`, and the nodes of `graph` by name."""
    root, written = write_graph(file, graph)
    content = {
        "id": fixed_id(file.name),
        "revision": 0,
        "last_node_id": next(file.node_ids) - 1,
        "last_link_id": next(file.link_ids) - 1,
        **root,
        "links": [list(link.values()) for link in root["links"]],
        "config": {},
        "extra": {},
        "version": 0.4,
    }
    return content | ({"definitions": {"subgraphs": file.subgraphs}} if file.subgraphs else {}), written
