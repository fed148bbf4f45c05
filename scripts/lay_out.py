"""Make workflows/*.json of scripts/templates.py: `python scripts/lay_out.py`. Chromium gives the nodes their sizes.

Each group of nodes is a column, and what a node needs is the larger of its sizes in both renderers, with room for the
lines that appear under it when it runs. tests/browser/test_templates.py measures that nothing overlaps.
"""

from __future__ import annotations

import json
import math
import re
import sys
import uuid
from pathlib import Path
from typing import Any

from canvas import open_canvas, rectangles, settle, use_renderer
from host import ROOT, start_server
from playwright.sync_api import Page
from templates import SHOWING, Template, templates

sys.path.append(str(ROOT))
from sana_core.downloads import DOWNLOADS  # noqa: E402

WORKFLOWS = ROOT / "workflows"
# pixels of the canvas
WIDTH, WIDE, GAP, COLUMN, TOP = 320, 400, 40, 80, 120
# room for previews, in the width of their column, and for the lines under a node
HEIGHTS = {
    "SaveImage": 420,
    "PreviewImage": 340,
    "SanaNodesPlan": 460,
    "LoadImage": 360,
    "LossGraphNode": 360,
    "PreviewAny": 140,
}
WIDE_NODES = {
    "SanaNodesTextEncode",
    "SanaNodesPromptList",
    "TextGenerate",
    "SaveImage",
    "PreviewImage",
    "SanaNodesPlan",
    "SanaNodesTrain",
}
TEXT, PREVIEW, LINES = 170, 260, 90
SAMPLERS = {"SanaNodesSampler", "SanaNodesSprint", "SanaNodesBatchSampler", "SamplerCustomAdvanced", "SanaNodesTrain"}
COLOURS = {"Model": "#3f789e", "Files": "#3f789e", "Prompt": "#8A8", "Result": "#b58b2a"}
KEPT = ("id", "type", "pos", "size", "flags", "order", "mode", "inputs", "outputs", "title", "properties")
NOTE = """([title, text, size]) => {
    const note = LiteGraph.createNode("MarkdownNote");
    note.title = title;
    note.size = size;
    app.graph.add(note);
    // a widget's value is kept under the node's id, which it has now; before, that of another template may be there
    note.widgets[0].value = text;
    return note.id;
}"""
PREPARE = """([sizes, bypassed]) => {
    for (const node of app.graph.nodes) {
        const widget = node.widgets?.find(each => each.name === "control_after_generate");
        if (widget) widget.value = "fixed";
        const [width, height] = sizes[node.id] ?? node.size;
        if (sizes[node.id]) node.setSize([width, Math.max(height, node.computeSize()[1])]);
        if (bypassed.includes(Number(node.id))) node.mode = 4;
    }
}"""
GROW = """([id, more]) => {
    const node = app.graph.getNodeById(id);
    node.setSize([node.size[0], node.size[1] + more]);
}"""
PLACE = """places => {
    for (const node of app.graph.nodes) node.pos = places[node.id];
    app.graph.setDirtyCanvas(true, true);
}"""


def api_graph(template: Template) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the template in ComfyUI's API format, and the number of each node."""
    ids = {name: number for number, name in enumerate(template.nodes, 1)}

    def value(given: Any) -> Any:
        return [str(ids[given[0]]), given[1]] if isinstance(given, tuple) else given

    graph: dict[str, Any] = {}
    for name, node in template.nodes.items():
        inputs = {field: value(given) for field, given in node.inputs.items()}
        graph[str(ids[name])] = {"class_type": node.kind, "inputs": inputs}
        if node.title:
            graph[str(ids[name])]["_meta"] = {"title": node.title}
    return graph, ids


def files_of(template: Template) -> list[str]:
    """Return the names of the released files that the template's loaders name."""
    values = [value for node in template.nodes.values() for value in node.inputs.values() if isinstance(value, str)]
    return [value for value in values if value in DOWNLOADS]


def files_note(names: list[str]) -> str:
    """Return a table of the files: size, folder in models, link."""
    lines = ["| file | size | folder in models |", "|---|---|---|"]
    for name in names:
        found = DOWNLOADS[name]
        size = "" if found.gigabytes is None else f"{found.gigabytes} GB"
        lines.append(f"| [{name}]({found.url}) | {size} | {found.folder} |")
    return "\n".join([*lines, "", "Save each under the name in this table."])


def notes(template: Template) -> list[tuple[str, str]]:
    """Return title and text of the notes that stand before the template's nodes."""
    first = [("Read me", template.note)]
    files = files_of(template)
    return [*first, ("The files", files_note(files))] if files else first


def note_height(text: str, width: int = WIDE) -> int:
    """Return the pixels that a note takes, by the letters in a line."""
    shown = re.sub(r"\]\([^)]*\)", "", text)
    lines = sum(math.ceil(max(1, len(line)) * 8.2 / (width - 30)) for line in shown.splitlines())
    return 60 + 24 * lines


def lay_out(page: Page, name: str, template: Template) -> dict[str, Any]:
    """Return the workflow of `template` as the canvas saves it, its nodes in columns."""
    graph, ids = api_graph(template)
    page.evaluate("async ([graph, name]) => { await app.loadApiJson(graph, name) }", [graph, f"{name}.json"])
    columns: dict[str, list[int]] = {}
    for title, text in notes(template):
        number = int(page.evaluate(NOTE, [title, text, [WIDE, note_height(text)]]))
        columns.setdefault("", []).append(number)
    sizes, kinds = {}, {}
    for key, node in template.nodes.items():
        columns.setdefault(node.group, []).append(ids[key])
        kinds[ids[key]] = node.kind
        width = WIDE if node.kind in WIDE_NODES else WIDTH
        sizes[str(ids[key])] = [width, height_of(node.kind)]
    bypassed = [ids[key] for key, node in template.nodes.items() if node.bypassed]
    page.evaluate(PREPARE, [sizes, bypassed])
    grow_samplers(page, kinds)
    places = place(page, columns)
    page.evaluate(PLACE, places)
    settle(page)
    workflow = clean(page.evaluate("() => app.graph.serialize()"), name)
    workflow["groups"] = groups(columns, rectangles(page))
    shown = [[ids[node], widget] for node, widget in template.app]
    outputs = [ids[key] for key, node in template.nodes.items() if node.kind in SHOWING]
    workflow["extra"] = {"ds": {"scale": 0.7, "offset": [60, 60]}, "linearData": {"inputs": shown, "outputs": outputs}}
    return workflow


def height_of(kind: str) -> int:
    return TEXT if kind in ("SanaNodesTextEncode", "SanaNodesPromptList") else HEIGHTS.get(kind, 0)


def grow_samplers(page: Page, kinds: dict[int, str]) -> None:
    """Give nodes that draw a preview while they run the room for it."""
    for number in [number for number, kind in kinds.items() if kind in SAMPLERS]:
        page.evaluate(GROW, [number, PREVIEW])


def place(page: Page, columns: dict[str, list[int]]) -> dict[int, list[int]]:
    """Return the position of each node: every column as wide, and every row as high, as both renderers need."""
    needed: dict[int, tuple[float, float]] = {}
    for vue in (False, True):
        use_renderer(page, vue)
        for number, (_, _, width, height) in rectangles(page).items():
            before = needed.get(int(number), (0.0, 0.0))
            needed[int(number)] = max(before[0], width), max(before[1], height)
    use_renderer(page, False)
    places, x = {}, 0
    for name, numbers in columns.items():
        y = TOP
        for number in numbers:
            places[number] = [x, round(y)]
            room = 0 if not name else LINES
            y = math.ceil((y + needed[number][1] + GAP + room) / 10) * 10
        x += math.ceil(max(needed[number][0] for number in numbers) / 10) * 10 + COLUMN
    return places


def groups(columns: dict[str, list[int]], found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a box with a title around the nodes of each group; a number ends the name of its second column."""
    boxes: dict[str, list[list[float]]] = {}
    for name, numbers in columns.items():
        if name:
            boxes.setdefault(name.rstrip(" 2"), []).extend(found[str(number)] for number in numbers)
    out = []
    for number, (name, rows) in enumerate(boxes.items(), 1):
        left, top = min(x for x, *_ in rows) - 20, min(y for _, y, *_ in rows) - 60
        right, bottom = max(x + width for x, _, width, _ in rows) + 20, max(y + height for _, y, _, height in rows)
        box = [round(left), round(top), round(right - left), round(bottom - top + LINES + 20)]
        colour = COLOURS.get(name, "#a1309b")
        out.append({"id": number, "title": name, "bounding": box, "color": colour, "font_size": 24, "flags": {}})
    return out


def clean(saved: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what the canvas has saved without what only it needs, and with the links of the files."""
    nodes = [clean_node(node) for node in sorted(saved["nodes"], key=lambda node: int(node["id"]))]
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, name)),
        "revision": 0,
        "last_node_id": max(node["id"] for node in nodes),
        "last_link_id": max((link[0] for link in saved["links"]), default=0),
        "nodes": nodes,
        "links": [[int(link[0]), int(link[1]), link[2], int(link[3]), *link[4:6]] for link in saved["links"]],
        "config": {},
        "version": 0.4,
    }


def clean_node(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node as the canvas has saved it, without what only it needs, and with the links of its files."""
    own = {key: node[key] for key in KEPT if key in node and node[key] is not None}
    own["id"] = int(node["id"])
    own["pos"], own["size"] = [round(each) for each in node["pos"]], [round(each) for each in node["size"]]
    own["inputs"] = [slot(each, ("name", "type", "widget", "link", "shape")) for each in node.get("inputs", [])]
    own["outputs"] = [slot(each, ("name", "type", "slot_index", "links")) for each in node.get("outputs", [])]
    own["properties"] = {"Node name for S&R": node["type"]}
    values = node.get("widgets_values") or []
    models = [
        {"name": value, "url": DOWNLOADS[value].url, "directory": DOWNLOADS[value].folder}
        for value in values
        if value in DOWNLOADS and value.endswith(".safetensors")
    ]
    if models:
        own["properties"]["models"] = models
    return {**own, "widgets_values": values}


def slot(given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: given[name] for name in names if given.get(name) is not None or name == "link"} if given else {}


def main() -> None:
    with start_server("lay-out") as server, open_canvas(server.address) as page:
        wanted = sys.argv[1:] or templates()
        for name in wanted:
            workflow = lay_out(page, name, templates()[name])
            path = Path(WORKFLOWS / f"{name}.json")
            path.write_text(json.dumps(workflow, indent=1) + "\n", encoding="utf-8")
            sys.stdout.write(f"{path.name}: {len(workflow['nodes'])} nodes\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
