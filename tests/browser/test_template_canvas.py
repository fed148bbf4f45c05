"""Every template on the canvas, in both renderers: nothing overlaps or is missing, and what can run draws."""

import json

import pytest
import torch
from canvas import QUICK, failure_of, open_canvas, queue, rectangles, set_setting, settle, use_renderer
from host import start_server
from setup import ROOT
from templates import DOWNLOADED, SHOWING

from sana_core import downloads as released
from sana_core.batch.draw import Settings
from sana_core.batch.png import encode_png

TEMPLATES = sorted(ROOT.glob("workflows/*.json"))
MISSING = {*released.DOWNLOADS, "your_lora.safetensors", "example.png"}

# whether every output has its picture, or a node has failed


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with (
        start_server("test-templates", tmp_path_factory.mktemp("output")) as server,
        open_canvas(server.address, 1000, 600) as page,
    ):
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and page.errors.append(message.text))
        page.errors = []
        yield page


def overlaps(found):
    """The pairs of nodes whose rectangles [x, y, width, height] share more than a pixel."""
    boxes = sorted(found.items())
    return [
        (a, b)
        for number, (a, (ax, ay, aw, ah)) in enumerate(boxes)
        for b, (bx, by, bw, bh) in boxes[number + 1 :]
        if ax < bx + bw - 1 and bx < ax + aw - 1 and ay < by + bh - 1 and by < ay + ah - 1
    ]


def check_layout(page, vue, when):
    use_renderer(page, vue)
    titles = dict(page.evaluate("() => app.graph.nodes.map(node => [String(node.id), node.title])"))
    pairs = [(titles[a], titles[b]) for a, b in overlaps(rectangles(page))]
    assert not pairs, f"{'nodes 2.0' if vue else 'nodes 1'}, {when}: {pairs}"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_opens_without_overlap_and_draws(page, path):
    page.errors.clear()
    workflow = json.loads(path.read_text(encoding="utf-8"))
    page.evaluate(
        "async ([graph, name]) => { await app.loadGraphData(graph, true, true, name) }", [workflow, path.stem]
    )
    settle(page)
    page.keyboard.press("Escape")  # the list of files that are not there
    # red is what names a file that is not here, and nothing else
    red = page.evaluate("() => app.graph.nodes.filter(node => node.has_errors).map(node => node.widgets?.[0]?.value)")
    assert set(red) <= MISSING, red
    check_layout(page, False, "opened")
    check_layout(page, True, "opened")
    if path.stem not in DOWNLOADED:
        page.evaluate(QUICK, 2)
        queue(page)
        outputs = [node["id"] for node in workflow["nodes"] if node["type"] in SHOWING]
        assert not failure_of(page, outputs)
        page.wait_for_timeout(500)
        check_layout(page, True, "run")
        check_layout(page, False, "run")
    # the canvas asks the links of missing files for their sizes, which this server does not let it do
    errors = [error for error in page.errors if "sana" in error.lower() and "Content Security Policy" not in error]
    assert not errors


TRANSLATED = """title => LiteGraph.registered_node_types.SanaNodesLoader.title === title"""
DROP = """async bytes => {
    await app.handleFile(new File([new Uint8Array(bytes)], "00000_7.png", {type: "image/png"}));
    return app.graph.nodes.map(node => [node.type, (node.widgets ?? []).map(widget => widget.value)]);
}"""


def test_a_dropped_png_of_the_batch_command_brings_its_nodes_back(page):
    settings = Settings(160, 128, steps=11, guidance=3.0, sampler="flow_euler", negative_prompt="a blue circle")
    png = encode_png(torch.zeros(3, 128, 160), "a red star", 7, settings._asdict(), "models/sana-tiny")
    found = dict(page.evaluate(DROP, list(png)))
    assert found["SanaNodesLoader"][0] == "sana-tiny (bundled)"
    assert found["SanaNodesEmptyLatent"] == [160, 128, 1]
    assert found["SanaNodesSampler"][:5] == [7, "fixed", 11, 3, "flow_euler"]
    assert {"SanaNodesDecode", "SaveImage"} <= set(found)
    queue(page)
    again = page.evaluate("() => app.graph.nodes.find(node => node.type === 'SanaNodesSampler').widgets[0].value")
    assert again == 7


def test_nodes_and_their_inputs_are_in_chinese_once_it_is_chosen(page):
    # titles of templates and labels of switches are not: this frontend translates neither for packs
    names = json.loads((ROOT / "locales/zh/nodeDefs.json").read_text(encoding="utf-8"))
    workflow = json.loads((ROOT / "workflows/SANA first picture.json").read_text(encoding="utf-8"))
    set_setting(page, "Comfy.Locale", "zh")
    chinese = page.context.browser.new_page(viewport={"width": 1000, "height": 600})
    try:
        chinese.goto(page.url)
        chinese.wait_for_function("window.app?.graph && window.app?.extensionManager")
        chinese.wait_for_function(TRANSLATED, arg=names["SanaNodesLoader"]["display_name"], timeout=30_000)
        chinese.evaluate("async graph => { await app.loadGraphData(graph, true, true, 'chinese') }", workflow)
        use_renderer(chinese, True)
        for node in workflow["nodes"]:
            if node["type"] in names:
                shown = chinese.locator(f"[data-node-id='{node['id']}']")
                for field in node["inputs"]:
                    if "widget" not in field:
                        name = names[node["type"]]["inputs"][field["name"]]["name"]
                        shown.get_by_text(name, exact=True).first.wait_for(state="attached", timeout=30_000)
        use_renderer(chinese, False)
    finally:
        chinese.close()
        set_setting(page, "Comfy.Locale", "en")
