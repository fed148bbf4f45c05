"""NVIDIA's workflow for ExtraModels' fork on the canvas, and what docs/migration.md says to press."""

import json

import pytest
from canvas import open_canvas, rectangles, settle, use_renderer
from host import get, start_server
from old_canvas import NODES, workflow

VALUES = """() => Object.fromEntries(app.graph.nodes.map(node => [
    node.id, [node.type, Object.fromEntries((node.widgets ?? []).map(widget => [widget.name, widget.value]))]]))"""
# outputs know where they go, not inputs alone
LINKS = "() => app.graph.nodes.flatMap(node => node.outputs.flatMap(output => output.links ?? [])).sort()"
BOXES = "() => [...document.querySelectorAll('textarea')].filter(box => box.offsetParent).map(box => box.value)"
REOPEN = "async () => { await app.loadGraphData(app.graph.serialize(), true, true, 'again') }"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with start_server("test-old-canvas", tmp_path_factory.mktemp("output")) as server:
        yield server


def check(page, replacements):
    found = page.evaluate(VALUES)
    for number, (kind, _, _, values, *_) in NODES.items():
        ours, shown = found[str(number)]
        if kind not in replacements:
            assert ours == kind
            continue
        (replacement,) = replacements[kind]
        widgets = replacement["old_widget_ids"]
        assert ours == replacement["new_node_id"]
        for each in replacement["input_mapping"]:
            if each.get("old_id") in widgets:
                assert shown[each["new_id"]] == values[widgets.index(each["old_id"])]
            elif "set_value" in each:
                assert shown[each["new_id"]] == each["set_value"]
    links = [link for *_, outputs in NODES.values() for _, _, found in outputs for link in found]
    assert page.evaluate(LINKS) == sorted(links)
    assert page.evaluate(BOXES) == ["a dog and a cat", ""]
    boxes = [(x, y, x + width, y + height) for x, y, width, height in rectangles(page).values()]
    for number, a in enumerate(boxes):
        assert not [b for b in boxes[:number] if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]]


@pytest.mark.parametrize("vue", [False, True], ids=["classic", "nodes 2.0"])
def test_replace_all_keeps_values_links_and_text_boxes_and_covers_no_node(server, vue):
    replacements = json.loads(get(server, "/node_replacements"))
    with open_canvas(server.address, 1400, 900) as page:
        use_renderer(page, vue)
        page.evaluate("async graph => { await app.loadGraphData(graph, true, true, 'old') }", workflow())
        page.get_by_text("View details").click()
        page.get_by_text("Replace All").click()
        page.wait_for_function("() => app.graph.nodes.every(node => !node.has_errors)")
        page.wait_for_timeout(1000)
        check(page, replacements)
        page.evaluate(REOPEN)
        settle(page)
        check(page, replacements)
