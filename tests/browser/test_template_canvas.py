"""Every template on the canvas of a new user: nothing overlaps, no text is cut, and the template runs."""

import io
import json

import pytest
import torch
from canvas import QUICK, TITLE, failure_of, open_canvas, queue, rectangles, set_setting, settle, use_renderer
from host import get, start_server
from lay_out import blueprint_json, template_json
from parts import blueprints
from PIL import Image
from setup import ROOT
from templates import DOWNLOADED, SHOWING, showing, templates

from sana_core.batch.pipeline import SamplingSettings
from sana_core.batch.png import encode_png
from sana_core.checkpoints.generation import DOWNLOADS
from sana_core.checkpoints.headers import SUFFIXES

TEMPLATES = sorted(ROOT.glob("workflows/*.json"))
BLUEPRINTS = sorted(ROOT.glob("subgraphs/*.json"))
RENDERERS = {False: "nodes 1", True: "nodes 2.0"}
# the scale that a window of 1400 x 900 must give, and the pixels that rounding adds to a text
SCALE, SLACK = 0.6, 2
OPEN = "async ([graph, name]) => app.loadGraphData(graph, true, true, name, {openSource: 'template'})"
# The texts that the classic renderer draws. It shortens texts that do not fit.
DRAWN = """() => {
    const texts = [], {ctx} = app.canvas, fill = ctx.fillText;
    ctx.fillText = function (text, ...rest) { texts.push(String(text)); return fill.call(this, text, ...rest) };
    app.canvas.draw(true, true);
    delete ctx.fillText;
    return texts;
}"""
# Texts of elements outside of the visible part of an element around them.
CUT = """slack => {
    const cut = [];
    const show = node => `${app.canvas.graph.getNodeById(node.dataset?.nodeId)?.title ?? "note"}: `;
    for (const node of document.querySelectorAll("[data-node-id], .comfy-markdown")) {
        const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
        for (let text = walker.nextNode(); text; text = walker.nextNode()) {
            if (!text.data.trim() || !text.parentElement.checkVisibility({opacityProperty: true})) continue;
            const range = document.createRange();
            range.selectNodeContents(text);
            const own = range.getBoundingClientRect();
            for (let box = text.parentElement; box !== node.parentElement; box = box.parentElement) {
                const style = getComputedStyle(box), shown = box.getBoundingClientRect();
                if (style.overflowX === "visible" && style.overflowY === "visible" || shown.width <= 1) continue;
                const out = Math.max(shown.left - own.left, own.right - shown.right, own.bottom - shown.bottom);
                if (own.width && out > slack) cut.push(show(node) + text.data);
            }
        }
        for (const field of node.querySelectorAll("input, textarea")) {
            // the source of a note, which is not shown, and a report, which is scrolled
            if (field.closest(".comfy-markdown") || field.readOnly) continue;
            const {scrollWidth, clientWidth, scrollHeight, clientHeight} = field;
            const out = scrollWidth > clientWidth + slack || scrollHeight > clientHeight + slack;
            if (field.value && clientWidth && out)
                cut.push(show(node) + field.value);
        }
    }
    return cut;
}"""
# Titles of nodes with results that are under the canvas' messages or its minimap in a window of 1400 x 900.
COVERED = """kinds => {
    const {scale, offset} = app.canvas.ds, areas = [[1028, 0, 215], [1144, 645, 900]];
    const {x, y} = app.canvas.canvas.getBoundingClientRect();
    return app.canvas.graph.nodes.filter(node => kinds.includes(node.type)).filter(node => {
        const right = x + (node.pos[0] + node.size[0] + offset[0]) * scale;
        const [above, below] = [-TITLE, node.size[1]].map(edge => y + (node.pos[1] + edge + offset[1]) * scale);
        return areas.some(([edge, from, to]) => right > edge && above < to && below > from);
    }).map(node => node.title);
}""".replace("TITLE", str(TITLE))
ENTER = """id => {
    const node = app.graph.getNodeById(id);
    app.canvas.openSubgraph(node.subgraph, node);
}"""
LEAVE = "() => app.canvas.setGraph(app.rootGraph ?? app.graph)"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with start_server("test-templates", tmp_path_factory.mktemp("output")) as running:
        yield running


@pytest.fixture(scope="module")
def page(server):
    with open_canvas(server.address, 1400, 900) as page:
        set_setting(page, "Comfy.RightSidePanel.IsOpen", False)
        # One random seed in nine has 16 digits, which Nodes 2.0 cuts in the field of any sampler, KSampler too.
        page.evaluate("() => { const random = Math.random; Math.random = () => 0.88 * random(); }")
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


def open_template(page, path, vue):
    workflow = json.loads(path.read_text(encoding="utf-8"))
    use_renderer(page, vue)
    page.evaluate(OPEN, [workflow, path.stem])
    page.wait_for_timeout(300)  # the view is fitted to it
    settle(page)
    page.keyboard.press("Escape")  # the list of files that are not there
    return workflow


def check_nodes(page, vue, when):
    """Nothing overlaps, and no word is cut, of the nodes that the canvas shows."""
    use_renderer(page, vue)
    titles = dict(page.evaluate("() => app.canvas.graph.nodes.map(node => [String(node.id), node.title])"))
    where = f"{RENDERERS[vue]}, {when}"
    pairs = [(titles[a], titles[b]) for a, b in overlaps(rectangles(page))]
    assert not pairs, f"{where}: {pairs}"
    cut = page.evaluate(CUT, SLACK)
    drawn = [] if vue else page.evaluate(DRAWN)
    cut += [drawn[number - 1 : number + 2] for number, text in enumerate(drawn) if text.endswith(("…", "..."))]
    assert not cut, f"{where}: {cut}"
    assert vue or set(titles.values()) <= set(drawn), where


def check_opened(page, path):
    for vue in RENDERERS:
        workflow = open_template(page, path, vue)
        assert page.evaluate("() => app.canvas.ds.scale") >= SCALE
        assert vue or not page.evaluate("() => app.canvas.low_quality")
        check_nodes(page, vue, "opened")
    return workflow


# half a minute each, on which tests/graph spends a quarter of that
LONG = ("SANA train a LoRA", "SANA check this computer")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in LONG else ()) for path in TEMPLATES],
)
def test_a_template_is_readable_and_runs(page, path):
    page.errors.clear()
    workflow = check_opened(page, path)
    assert not page.evaluate(COVERED, SHOWING)
    # Only loaders of missing files are red. The canvas does not check names of folders.
    red = page.evaluate("() => app.graph.nodes.filter(node => node.has_errors).map(node => String(node.id))")
    files = {name for name in DOWNLOADS if name.endswith(SUFFIXES)}
    loaders = [node for node in workflow["nodes"] if files & set(map(str, node["widgets_values"]))]
    assert sorted(red) == sorted(str(node["id"]) for node in loaders)
    if path.stem not in DOWNLOADED:
        page.evaluate(QUICK, 2)
        queue(page)
        assert not failure_of(page, showing(workflow))
        page.wait_for_timeout(500)
        check_nodes(page, True, "run")
        check_nodes(page, False, "run")
    assert not page.errors


def test_a_second_run_of_the_first_image_generates_another_image(server, page):
    workflow = open_template(page, ROOT / "workflows" / "SANA 1 first image.json", True)
    page.evaluate(QUICK, 2)
    images = []
    for _ in range(2):
        queue(page)
        assert not failure_of(page, showing(workflow))
        file = page.evaluate("id => app.nodeOutputs[id].images[0]", *showing(workflow))
        images.append(Image.open(io.BytesIO(get(server, "/view", **file))).convert("RGB"))
    # The size that the template shows is the size of the image.
    (latent,) = (node for node in workflow["nodes"] if node["type"] == "SanaNodesEmptyLatent")
    assert images[0].size == images[1].size == tuple(latent["widgets_values"][:2]) == (512, 512)
    assert images[0].tobytes() != images[1].tobytes()


WITH_SUBGRAPHS = [path for path in (*TEMPLATES, *BLUEPRINTS) if "definitions" in json.loads(path.read_text())]


@pytest.mark.parametrize("path", WITH_SUBGRAPHS, ids=lambda path: path.stem)
def test_the_nodes_of_a_subgraph_do_not_overlap(page, path):
    page.errors.clear()
    workflow = open_template(page, path, False)
    for node in [node for node in workflow["nodes"] if "-" in node["type"]]:
        page.evaluate(ENTER, node["id"])
        page.wait_for_timeout(500)
        check_nodes(page, False, node["title"])
        page.evaluate(LEAVE)
    assert not page.errors


@pytest.mark.slow
@pytest.mark.parametrize("panel", [False, True], ids=["panel closed", "panel open"])
@pytest.mark.parametrize("size", [(1400, 900), (1920, 1080)], ids=["1400", "1920"])
def test_templates_read_in_other_windows_and_beside_a_panel(page, size, panel):
    width, height = size
    page.set_viewport_size({"width": width, "height": height})
    set_setting(page, "Comfy.RightSidePanel.IsOpen", panel)
    try:
        for path in TEMPLATES:
            check_opened(page, path)
    finally:
        page.set_viewport_size({"width": 1400, "height": 900})
        set_setting(page, "Comfy.RightSidePanel.IsOpen", False)


def test_the_files_are_what_the_templates_make(server):
    info = json.loads(get(server, "/object_info"))
    written = {name: template_json(name, template, info) for name, template in templates().items()}
    written |= {blueprint.name: blueprint_json(blueprint, info) for blueprint in blueprints()}
    assert written == {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (*TEMPLATES, *BLUEPRINTS)}


TRANSLATED = """title => LiteGraph.registered_node_types.SanaNodesLoader.title === title"""
DROP = """async bytes => {
    await app.handleFile(new File([new Uint8Array(bytes)], "00000_7.png", {type: "image/png"}));
    return app.graph.nodes.map(node => [node.type, (node.widgets ?? []).map(widget => widget.value)]);
}"""


def test_a_dropped_png_of_the_batch_command_brings_its_nodes_back(page):
    settings = SamplingSettings(160, 128, steps=11, guidance=3.0, sampler="flow_euler", negative_prompt="a blue circle")
    png = encode_png(torch.zeros(3, 128, 160), "a red star", 7, settings._asdict(), "models/sana-posters")
    results = dict(page.evaluate(DROP, list(png)))
    assert results["SanaNodesLoader"][0] == "sana-posters (bundled)"
    assert results["SanaNodesEmptyLatent"] == [160, 128, 1]
    assert results["SanaNodesSampler"][:5] == [7, "fixed", 11, 3, "flow_euler"]
    assert {"SanaNodesDecode", "SaveImage"} <= set(results)
    queue(page)
    again = page.evaluate("() => app.graph.nodes.find(node => node.type === 'SanaNodesSampler').widgets[0].value")
    assert again == 7


def test_nodes_and_their_inputs_are_in_chinese_once_it_is_chosen(page):
    # titles of templates and labels of switches are not: this frontend translates neither for packs
    names = json.loads((ROOT / "locales/zh/nodeDefs.json").read_text(encoding="utf-8"))
    workflow = json.loads((ROOT / "workflows/SANA 1 first image.json").read_text(encoding="utf-8"))
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
