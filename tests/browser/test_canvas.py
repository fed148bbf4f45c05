"""The canvas in Chromium, as a person uses it."""

import io
import json
import re

import numpy as np
import pytest
from canvas import open_canvas
from host import get, start_server
from PIL import Image
from setup import CACHE, ROOT

from demo.judge import load, score
from demo.world import Group, Scene

ARTIFACTS = ROOT / "tests" / "artifacts"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # the canvas greets a new user with the template browser; an earlier run is no new user
    settings = CACHE / "base" / "test-browser" / "user" / "default" / "comfy.settings.json"
    settings.unlink(missing_ok=True)
    with start_server("test-browser", tmp_path_factory.mktemp("output")) as running:
        yield running


@pytest.fixture(scope="module")
def page(server):
    ARTIFACTS.mkdir(exist_ok=True)
    with open_canvas(server.address, new_user=True) as page:
        yield page


def buttons_of_readme(start):
    """The words in italics of the paragraph of README.md that starts so."""
    (paragraph,) = re.findall(rf"^{re.escape(start)}.*?(?=\n\n)", (ROOT / "README.md").read_text(), re.M | re.S)
    return re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", paragraph)


def test_the_steps_of_the_readme_generate_an_image_of_the_demo_model(server, page):
    templates, folder, name, run, save_image = buttons_of_readme("Open *Templates*")
    # This server has the pack in the folder of make serve.
    assert folder == "sana-nodes" and "sana" in buttons_of_readme("The first run downloads")
    page.get_by_test_id("template-workflows-content").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name=templates, exact=True).click()
    page.get_by_role("button", name="sana", exact=True).click()
    page.get_by_test_id(f"template-workflow-{name}").wait_for()
    page.screenshot(path=ARTIFACTS / "templates.png")
    page.get_by_test_id(f"template-workflow-{name}").click()
    page.wait_for_function("window.app.graph.nodes.some(node => node.type === 'SaveImage')")

    # The canvas sends the same graph as the scripts and the other tests, except for the size, which follows the model.
    sent = json.loads(page.evaluate("async () => JSON.stringify((await window.app.graphToPrompt()).output)"))
    demo = json.loads((ROOT / "demo" / "graph.json").read_text())
    results = {(node["class_type"], node["inputs"].get("text")): node["inputs"] for node in sent.values()}
    assert len(results) == len(demo)
    for node in demo.values():
        inputs_sent = results[node["class_type"], node["inputs"].get("text")]
        for name, value in node["inputs"].items():
            if isinstance(value, list):
                source, output = inputs_sent[name]
                assert (sent[source]["class_type"], output) == (demo[value[0]]["class_type"], value[1])
            elif name in ("width", "height"):
                # The template shows the size of the demo model, and the graph has 0 for the model's size.
                assert (inputs_sent[name], value) == (512, 0)
            elif name != "filename_prefix":
                assert inputs_sent[name] == value

    page.get_by_test_id("queue-button").get_by_text(run, exact=True).click()
    page.wait_for_function("Object.values(window.app.nodeOutputs).some(output => output.images?.length)")
    page.wait_for_function(
        "title => window.app.graph.nodes.find(node => node.title === title).imgs?.[0]?.complete", arg=save_image
    )
    page.get_by_test_id("template-workflows-content").wait_for(state="hidden")
    page.wait_for_timeout(1000)
    page.screenshot(path=ARTIFACTS / "canvas.png")

    (image,) = page.evaluate("Object.values(window.app.nodeOutputs).flatMap(output => output.images ?? [])")
    assert image["type"] == "output"
    picture = Image.open(io.BytesIO(get(server, "/view", **image))).convert("RGB")
    expected = Scene("dusk", "sea", "clear", "watercolour", (Group("lighthouse", "red"),), 0)
    results = score(load(), np.array(picture)[None], [expected])
    assert results["all"] == 1, results


def test_the_button_of_the_readme_opens_the_help_page_of_a_node(page):
    (node_info,) = buttons_of_readme("Each node has a help page")
    page.evaluate("app.canvas.selectNode(app.graph.nodes.find(node => node.type === 'SanaNodesSampler'))")
    page.get_by_role("button", name=node_info, exact=True).click()
    about = (ROOT / "web" / "docs" / "SanaNodesSampler.md").read_text().splitlines()[2]
    page.get_by_text(about).first.wait_for()


FAR = """async graph => {
    await app.loadGraphData(graph, true, true, "far");
    const widget = (type, name) =>
        app.graph.nodes.find(node => node.type === type).widgets.find(widget => widget.name === name);
    widget("SanaNodesEmptyLatent", "width").value = widget("SanaNodesEmptyLatent", "height").value = 1024;
    widget("SanaNodesSampler", "steps").value = 1;
    await app.queuePrompt(0);
}"""


def test_a_size_that_the_model_was_not_trained_for_is_said_on_the_canvas(page):
    page.evaluate(FAR, json.loads((ROOT / "workflows" / "SANA 1 first image.json").read_text(encoding="utf-8")))
    page.get_by_text("1024 x 1024 is far from this model's training size; use 512 x 512").first.wait_for()
