"""NVIDIA's workflow for ExtraModels' fork on the canvas, and the buttons that docs/migration.md names."""

import io
import json

import numpy as np
import pytest
from canvas import count_frames, open_canvas, rectangles, set_setting, settle, use_renderer
from host import get, start_server
from old_canvas import NODES, workflow
from PIL import Image

VALUES = """() => Object.fromEntries(app.graph.nodes.map(node => [
    node.id, [node.type, Object.fromEntries((node.widgets ?? []).map(widget => [widget.name, widget.value]))]]))"""
# The nodes that each connected output leads to. Node ids are numbers in older frontends.
LINKS = """() => Object.fromEntries(app.graph.nodes.map(node => [
    node.id,
    node.outputs.map((_, slot) => (node.getOutputNodes(slot) ?? []).map(other => Number(other.id)).sort())
        .filter(targets => targets.length)]))"""
BOXES = "() => [...document.querySelectorAll('textarea')].filter(box => box.offsetParent).map(box => box.value)"
# Page.add_style_tag would raise if the server refuses any download of the canvas meanwhile.
HIDE = "elements => document.head.appendChild(document.createElement('style')).append(`${elements} { display: none }`)"
REOPEN = "async () => { await app.loadGraphData(app.graph.serialize(), true, true, 'again') }"
# The part of the screen that has nodes.
REGION = """() => {
    const {ds, canvas} = app.canvas, {left, top} = canvas.getBoundingClientRect();
    const boxes = app.graph.nodes.map(node => node.boundingRect);
    const [x, y] = [0, 1].map(axis => Math.min(...boxes.map(box => box[axis])));
    const [right, bottom] = [0, 1].map(axis => Math.max(...boxes.map(box => box[axis] + box[axis + 2])));
    return {
        x: left + (x + ds.offset[0]) * ds.scale, y: top + (y + ds.offset[1]) * ds.scale,
        width: (right - x) * ds.scale, height: (bottom - y) * ds.scale,
    };
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with start_server("test-old-canvas", tmp_path_factory.mktemp("output")) as server:
        yield server


def check(page, replacements):
    result = page.evaluate(VALUES)
    for number, (kind, _, _, values, *_) in NODES.items():
        ours, shown = result[str(number)]
        if kind not in replacements:
            assert ours == kind
            continue
        (replacement,) = replacements[kind]
        widgets = replacement["old_widget_ids"]
        assert ours == replacement["new_node_id"]
        for item in replacement["input_mapping"]:
            if item.get("old_id") in widgets:
                assert shown[item["new_id"]] == values[widgets.index(item["old_id"])]
            elif "set_value" in item:
                assert shown[item["new_id"]] == item["set_value"]
    targets = {link: number for number, (*_, inputs, _) in NODES.items() for _, _, link in inputs}
    assert page.evaluate(LINKS) == {
        str(number): [sorted(targets[link] for link in links) for _, _, links in outputs]
        for number, (*_, outputs) in NODES.items()
    }
    assert page.evaluate(BOXES) == ["a dog and a cat", ""]
    boxes = [(x, y, x + width, y + height) for x, y, width, height in rectangles(page).values()]
    for number, a in enumerate(boxes):
        assert not [b for b in boxes[:number] if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]]


def picture(page):
    """Return the pixels [H, W, 3] of the nodes and of the canvas between them."""
    settle(page)
    region = page.evaluate(REGION)
    return np.array(Image.open(io.BytesIO(page.screenshot(clip=region))).convert("RGB"), dtype=int)


@pytest.mark.parametrize("vue", [False, True], ids=["classic", "nodes 2.0"])
def test_replace_all_keeps_values_links_and_text_boxes_and_draws_every_node(server, vue):
    replacements = json.loads(get(server, "/node_replacements"))
    with open_canvas(server.address, 1400, 900) as page:
        use_renderer(page, vue)
        set_setting(page, "Comfy.Minimap.Visible", False)
        # A message, such as that the frontend is older than this ComfyUI wants, would cover buttons and nodes.
        page.evaluate(HIDE, ".p-toast, [data-testid=toast-viewport]")
        page.evaluate("async graph => { await app.loadGraphData(graph, true, true, 'old') }", workflow())
        page.get_by_text("View details").click()
        page.get_by_text("Replace All").click()
        page.wait_for_function("() => app.graph.nodes.every(node => !node.has_errors)")
        set_setting(page, "Comfy.RightSidePanel.IsOpen", False)
        page.mouse.move(700, 850)
        page.wait_for_timeout(1000)
        check(page, replacements)
        assert count_frames(page) > 0
        replaced = picture(page)
        page.evaluate(REOPEN)
        page.wait_for_timeout(1000)
        check(page, replacements)
        # A workflow that was just opened is drawn right. Nodes 2.0 shows the widgets of linked inputs only before that.
        differing = (abs(replaced - picture(page)).max(axis=-1) > 8).mean()
        assert differing < 0.03, differing
        assert not page.errors
