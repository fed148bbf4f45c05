"""What a user reads on the canvas after a run: the lines of the nodes stay, and warnings and errors are messages."""

import json

import pytest
import torch
from canvas import QUICK, failure_of, open_canvas, queue, use_renderer
from host import base_directory, start_server
from safetensors.torch import load_file, save_file
from setup import ROOT

BASE = "test-lines"
OPEN = "([graph, name]) => app.loadGraphData(graph, true, true, name, {openSource: 'template'})"
SET = """([type, name, value]) => {
    for (const node of app.graph.nodes.filter(node => node.type === type)) {
        node.widgets.find(widget => widget.name === name).value = value;
    }
}"""
# One line of each kind of node in the graph.
LINES = ["SANA 8.6M, 512 px", "139 of 140 layers fit, not", "were cut: SANA reads 300", "512 x 512", "strips of"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    loras = base_directory(BASE) / "models" / "loras"
    loras.mkdir(exist_ok=True)
    tensors = load_file(ROOT / "demo" / "sana-posters-cyanotype.safetensors")
    layer = sorted(tensors)[0].partition(".lora_")[0]
    save_file(
        {name: torch.ones(2, 2) if name.startswith(layer) else tensor for name, tensor in tensors.items()},
        loras / "half.safetensors",
    )
    with start_server(BASE, tmp_path_factory.mktemp("output")) as server, open_canvas(server.address) as page:
        yield page


def open_graph(page, vue, **values):
    """Open the template with a LoRA, and set the widget of each "node.widget" in `values`."""
    use_renderer(page, vue)
    page.evaluate(OPEN, [json.loads((ROOT / "workflows" / "SANA LoRA.json").read_text(encoding="utf-8")), "lines"])
    page.evaluate(QUICK, 1)
    for name, value in values.items():
        page.evaluate(SET, [*name.split("."), value])


def saves(page):
    return page.evaluate("() => app.graph.nodes.filter(node => node.type === 'SaveImage').map(node => node.id)")


@pytest.mark.parametrize("vue", [False, True], ids=["classic", "nodes 2.0"])
def test_lines_stay_after_a_run_and_cached_nodes_have_them(page, vue):
    text = f"a red house {vue} " * 200
    # A cached node sends no message, so each renderer gets another strength.
    lora = {"SanaNodesLoraLoader.lora_name": "half.safetensors", "SanaNodesLoraLoader.strength_model": 0.9 + 0.1 * vue}
    open_graph(page, vue, **lora, **{"SanaNodesTextEncode.text": text})
    for run in ("first", "cached"):
        queue(page)
        assert not failure_of(page, saves(page))
        page.wait_for_timeout(2000)
        for line in LINES:
            (node, *_) = page.locator("[data-node-id], .dom-widget", has_text=line).all() or [None]
            assert node is not None and node.is_visible(), (run, line)
    for warning in LINES[1:3]:
        page.get_by_role("alert").filter(has_text=warning).first.wait_for()
    saved = page.evaluate("() => JSON.stringify(app.graph.serialize())")
    assert not [line for line in LINES if line in saved]
    assert not page.errors


@pytest.mark.parametrize("vue", [False, True], ids=["classic", "nodes 2.0"])
def test_an_error_is_a_message_that_says_what_to_do(page, vue):
    page.errors.clear()
    width = 544 if vue else 512
    open_graph(page, vue, **{"SanaNodesEmptyLatent.width": width})
    queue(page)
    text = f"height: got 0 beside {width}; set both sides, or both to 0 for the model's size"
    page.get_by_role("alert").filter(has_text=text).first.wait_for()
