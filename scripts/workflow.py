"""Workflows as the canvas saves them, made of nodes in columns: the form of workflows/*.json and subgraphs/*.json.

The canvas fits what it opens to 0.75 of the window, and its classic renderer draws no text below a scale of 8/14. So a
workflow is one row of columns, at most 1730 x 1105 px with the titles, which a window of 1400 x 900 shows at 0.6. A
node has the room that it needs in both renderers after it has run; tests/browser/test_template_canvas.py measures that.
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
from sana_core.checkpoints.downloads import DOWNLOADS  # noqa: E402

Json = dict[str, Any]
# (title of the group or nothing, names of the nodes from above), from left to right
Columns = tuple[tuple[str, str], ...]
NOTE, DYNAMIC = "MarkdownNote", "COMFY_DYNAMICCOMBO_V3"
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", DYNAMIC}
# pixels of the canvas; the position of a node is below its title
TITLE, BETWEEN, COLUMN, FRAME, GROUP_TITLE = 30, 20, 40, 15, 40
WIDTH, SOCKET, WIDGET, LOW_WIDGET, TEXT, EDGE = 270, 22, 32, 24, 80, 32
COLOURS = {"Files": "#3f789e", "Model": "#3f789e", "Prompt": "#88aa88"} | dict.fromkeys(
    ("Result", "Before and after", "Compare"), "#b58b2a"
)
COLOUR, NOTE_COLOURS = "#a1309b", {"color": "#432", "bgcolor": "#653"}
# of a node that is a subgraph: width, and the room for the preview while it runs
HOST, ENTER = (WIDTH, 215), 40
# sockets that come first, in the order of a loader
PORTS = ("model", "clip", "vae")
PREVIEW = "$$canvas-image-preview"
SAMPLERS = ("SanaNodesSampler", "SanaNodesSprint", "SanaNodesBatchSampler", "SamplerCustomAdvanced")
# nodes that show an image as wide as they are
IMAGES = ("SaveImage", "PreviewImage", "ImageCompare", "LossGraphNode")
# of nodes that say in lines below their widgets what they have found
SAYING = (
    "SanaNodesLoader",
    "SanaNodesModelLoader",
    "SanaNodesModelSwitch",
    "SanaNodesTextEncode",
    "SanaNodesEmptyLatent",
    "SanaNodesDecode",
    "SanaNodesDataset",
    "SanaNodesDoctor",
)
# width, and the room for the image or the lines that a node shows below its widgets after it has run
ROOM = {
    **dict.fromkeys(SAMPLERS, (WIDTH, 240)),
    **dict.fromkeys(SAYING, (WIDTH, 60)),
    "SanaNodesLoader": (310, 60),
    **dict.fromkeys(("SanaNodesControlNetLoader", "SanaNodesLoraLoader"), (380, 60)),
    "SanaNodesPromptList": (WIDTH, 170),
    "SanaNodesTrain": (300, 180),
    "SanaNodesPlan": (440, 260),
    "PreviewAny": (WIDTH, 100),
}


class Node(NamedTuple):
    """A node: its class or the subgraph that it is, and its inputs, where (name of a node, output) is a link."""

    kind: str | Subgraph
    inputs: dict[str, Any]
    title: str | None = None
    width: int | None = None
    # pixels below the widgets
    room: int | None = None


class Graph(NamedTuple):
    """Nodes by their names, and the columns that they stand in."""

    nodes: dict[str, Node]
    columns: Columns


class Subgraph(NamedTuple):
    """A graph in one node. What its nodes link to and is none of them is a socket of that name.

    `widgets` are {name: "node.input node.input"}, with the value of the last one; `outputs` are {name: (node, output)}.
    """

    name: str
    graph: Graph
    widgets: dict[str, str]
    outputs: dict[str, tuple[str, int]]
    description: str = ""


class Field(NamedTuple):
    """An input of a class of nodes: the type of its socket, its options, and whether it has a widget."""

    type: str
    options: Json
    widget: bool

    def default(self) -> Any:
        if self.type == DYNAMIC:
            return self.options["options"][0]["key"]
        return self.options["options"][0] if self.type == "COMBO" else self.options.get("default")


class File(NamedTuple):
    """What the nodes of a file share: the server's /object_info, ids of nodes and links, and their subgraphs."""

    name: str
    info: Json
    ids: Iterator[int]
    links: Iterator[int]
    subgraphs: list[Json]


def start_file(name: str, info: Json) -> File:
    return File(name, info, count(1), count(1), [])


def fixed_id(*parts: str) -> str:
    """Return an id that is the same each time."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "/".join(parts)))


def fields_of(info: Json, kind: str, values: Mapping[str, Any]) -> dict[str, Field]:
    """Return the inputs of a class of nodes as the canvas orders them: sockets, then widgets."""
    given = info[kind]["input"]
    found = read_fields({**given.get("required", {}), **given.get("optional", {})}, values)
    return dict(sorted(found.items(), key=lambda each: each[1].widget))


def read_fields(given: Json, values: Mapping[str, Any]) -> dict[str, Field]:
    """Return the inputs that /object_info tells of, and behind a dynamic combo those that its choice brings."""
    out = {}
    for name, (type_, *rest) in given.items():
        options = rest[0] if rest else {}
        if isinstance(type_, list):
            type_, options = "COMBO", {**options, "options": type_}
        if options.get("socketless"):
            continue
        out[name] = Field(type_, options, type_ in WIDGETS and not options.get("forceInput"))
        if type_ == DYNAMIC:
            choice = values.get(name, out[name].default())
            own = next(each["inputs"] for each in options["options"] if each["key"] == choice)
            more = {**own["required"], **own.get("optional", {})}
            out |= read_fields({f"{name}.{key}": value for key, value in more.items()}, values)
    return out


def field_of(info: Json, node: Node, name: str) -> tuple[Field, Any]:
    """Return an input of a node, and its value: those of a subgraph are of the nodes in it."""
    if isinstance(node.kind, Subgraph):
        inner, field = ends_of(node.kind)[name][-1]
        return field_of(info, node.kind.graph.nodes[inner], field)
    found = fields_of(info, node.kind, node.inputs)[name]
    return found, node.inputs.get(name, found.default())


def write_graph(file: File, graph: Graph) -> tuple[Json, dict[str, Json]]:
    """Return nodes, links and groups of a graph, and the nodes by their names."""
    ids = {name: next(file.ids) for name in graph.nodes}
    written = {name: write_node(file, node, ids[name]) for name, node in graph.nodes.items()}
    links: list[Json] = []
    for name, node in graph.nodes.items():
        for field, value in node.inputs.items():
            if isinstance(value, tuple) and value[0] in written:
                source, output = written[value[0]], value[1]
                made = add_link(file, links, (source["id"], output), written[name], field)
                source["outputs"][output]["links"].append(made)
    groups = place(written, graph.columns)
    return {"nodes": list(written.values()), "links": links, "groups": groups}, written


def add_link(file: File, links: list[Json], origin: tuple[int, int], target: Json, field: str) -> int:
    """Link the input `field` of `target` to `origin`, (id of a node, output); return the link's id."""
    slot = [each["name"] for each in target["inputs"]].index(field)
    entry = target["inputs"][slot]
    entry["link"] = next(file.links)
    ends = {"origin_id": origin[0], "origin_slot": origin[1], "target_id": target["id"], "target_slot": slot}
    links.append({"id": entry["link"], **ends, "type": entry["type"]})
    return entry["link"]


def write_node(file: File, node: Node, id_: int) -> Json:
    if isinstance(node.kind, Subgraph):
        return write_host(file, node.kind, node, id_)
    if node.kind == NOTE:
        text, width = node.inputs["text"], node.width or WIDTH
        note = frame(id_, NOTE, "Read me", {}, [], (width, note_height(text, width)))
        return {**note, **NOTE_COLOURS, "properties": {}, "widgets_values": [text]}
    fields = fields_of(file.info, node.kind, node.inputs)
    about = file.info[node.kind]
    outputs = list(zip(about["output_name"], about["output"], strict=True))
    values = []
    for name, field in fields.items():
        if field.widget:
            given = node.inputs.get(name)
            values.append(field.default() if given is None or isinstance(given, tuple) else given)
            values += ["fixed"] if field.options.get("control_after_generate") else []
    usual, usual_room = ROOM.get(node.kind, (WIDTH, 0))
    width, room = node.width or usual, node.room or usual_room
    room = width + 20 if node.kind in IMAGES else room
    properties: Json = {"Node name for S&R": node.kind}
    files = [
        value for value in values if isinstance(value, str) and value in DOWNLOADS and value.endswith(".safetensors")
    ]
    if files:
        properties["models"] = [
            {"name": name, "url": DOWNLOADS[name].url, "directory": DOWNLOADS[name].folder} for name in files
        ]
    out = frame(id_, node.kind, node.title, fields, outputs, (width, room))
    return {**out, "properties": properties, "widgets_values": values}


def note_height(text: str, width: int) -> int:
    """Return the room that the lines of a note need, and its paragraphs, of which a link shows its name alone."""
    shown = [re.sub(r"\]\([^)]*\)", "", line) for line in text.splitlines()]
    return sum(8 if not line else 19 * math.ceil(7 * len(line) / (width - 40)) for line in shown) + 30


def frame(
    id_: int,
    kind: str,
    title: str | None,
    fields: Mapping[str, Field],
    outputs: list[tuple[str, str]],
    size: tuple[int, int],
) -> Json:
    """Return a node without its values, as wide as `size` says, and so high that its widgets and that room fit."""
    sockets = sum(not field.widget for field in fields.values())
    height = EDGE + SOCKET * max(sockets, len(outputs)) + size[1]
    widgets = [field for field in fields.values() if field.widget]
    lines = [field for field in widgets if not field.options.get("multiline")]
    # the classic renderer shows all of them, lower, and Nodes 2.0 a button in the place of those for experts
    classic = LOW_WIDGET * (len(lines) + sum("control_after_generate" in field.options for field in lines))
    usual = [field for field in lines if not field.options.get("advanced")]
    height += TEXT * (len(widgets) - len(lines)) + max(classic, WIDGET * (len(usual) + (len(usual) < len(lines))))
    return {
        "id": id_,
        "type": kind,
        "pos": [0, 0],
        "size": [size[0], height],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": [
            {"name": name, "type": field.type, **({"widget": {"name": name}} if field.widget else {}), "link": None}
            for name, field in fields.items()
        ],
        "outputs": [{"name": name, "type": type_, "links": []} for name, type_ in outputs],
        **({"title": title} if title else {}),
    }


def write_host(file: File, subgraph: Subgraph, node: Node, id_: int) -> Json:
    """Return the node that is `subgraph`, its widgets with the values of the nodes in it, and keep the subgraph."""
    graph, written = write_graph(file, subgraph.graph)
    own = fixed_id(file.name, subgraph.name)
    fields, values, inputs, outputs = {}, [], [], []
    for position, (name, ends) in enumerate(ends_of(subgraph).items()):
        links = [add_link(file, graph["links"], (-10, position), written[inner], field) for inner, field in ends]
        fields[name], value = field_of(file.info, node, name)
        inputs.append({"id": fixed_id(own, name), "name": name, "type": fields[name].type, "linkIds": links})
        if fields[name].widget:
            values.append(value)
    for position, (name, (inner, output)) in enumerate(subgraph.outputs.items()):
        made = next(file.links)
        source = written[inner]["outputs"][output]
        source["links"].append(made)
        ends = {"origin_id": written[inner]["id"], "origin_slot": output, "target_id": -20, "target_slot": position}
        graph["links"].append({"id": made, **ends, "type": source["type"]})
        outputs.append({"id": fixed_id(own, name, "out"), "name": name, "type": source["type"], "linkIds": [made]})
    exposed = [
        {"name": PREVIEW, "sourceNodeId": str(each["id"]), "sourcePreviewName": PREVIEW}
        for each in written.values()
        if each["type"] in SAMPLERS
    ]
    file.subgraphs.append(definition(file, subgraph, graph, list(written.values()), inputs, outputs))
    ends = [(each["name"], each["type"]) for each in outputs]
    width, room = HOST
    out = frame(id_, own, node.title or subgraph.name, fields, ends, (node.width or width, room if exposed else ENTER))
    return {**out, "properties": {"previewExposures": exposed[-1:]}, "widgets_values": values}


def definition(
    file: File, subgraph: Subgraph, graph: Json, nodes: list[Json], inputs: list[Json], outputs: list[Json]
) -> Json:
    """Return `subgraph` as a file lists it: its `graph` of `nodes`, between its inputs and its outputs."""
    right = max(each["pos"][0] + each["size"][0] for each in nodes)
    last = {"lastGroupId": len(graph["groups"]), "lastNodeId": next(file.ids), "lastLinkId": next(file.links)}
    return {
        "id": fixed_id(file.name, subgraph.name),
        "version": 1,
        "state": {**last, "lastRerouteId": 0},
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


def ends_of(subgraph: Subgraph) -> dict[str, list[tuple[str, str]]]:
    """Return {input of the node that is `subgraph`: (name of a node in it, input)}."""
    nodes = subgraph.graph.nodes
    out: dict[str, list[tuple[str, str]]] = {}
    for name, node in nodes.items():
        for field, value in node.inputs.items():
            if isinstance(value, tuple) and value[0] not in nodes:
                out.setdefault(value[0], []).append((name, field))
    out = dict(sorted(out.items(), key=lambda each: [*PORTS, each[0]].index(each[0])))
    shown = {
        name: [(end.partition(".")[0], end.partition(".")[2]) for end in ends.split()]
        for name, ends in subgraph.widgets.items()
    }
    return out | shown


def place(written: dict[str, Json], columns: Columns) -> list[Json]:
    """Put the nodes into their columns; return a box around each column with a title."""
    found = [[written[name] for name in names.split()] for _, names in columns]
    heights = [sum(TITLE + node["size"][1] + BETWEEN for node in nodes) for nodes in found]
    x, groups = 0, []
    for (title, _), nodes in zip(columns, found, strict=True):
        y, width = TITLE, max(node["size"][0] for node in nodes)
        for node in nodes:
            node["pos"], node["size"][0] = [x, y], width
            y += node["size"][1] + BETWEEN + TITLE
        if title:
            box = [x - FRAME, -GROUP_TITLE, width + 2 * FRAME, max(heights) - BETWEEN + GROUP_TITLE + FRAME]
            colour = COLOURS.get(title, COLOUR)
            group = {"title": title, "bounding": box, "color": colour, "font_size": 24, "flags": {}}
            groups.append({"id": len(groups) + 1, **group})
        x += width + COLUMN
    return groups


def write_file(file: File, graph: Graph) -> tuple[Json, dict[str, Json]]:
    """Return the file of a graph and of the subgraphs in it, and the nodes by their names."""
    root, written = write_graph(file, graph)
    whole = {
        "id": fixed_id(file.name),
        "revision": 0,
        "last_node_id": next(file.ids) - 1,
        "last_link_id": next(file.links) - 1,
        **root,
        "links": [list(link.values()) for link in root["links"]],
        "config": {},
        "extra": {},
        "version": 0.4,
    }
    return whole | ({"definitions": {"subgraphs": file.subgraphs}} if file.subgraphs else {}), written
