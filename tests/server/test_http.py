"""As a script uses it: POST /prompt, events on the websocket, pictures from /view."""

import io
import json
import re
from urllib.parse import quote

import numpy as np
import pytest
from expanded import expand, to_graph
from host import GraphError, get, images_of, run_graph
from PIL import Image
from setup import ROOT
from shape_judge import judge

TEXT = 3  # the kind of event, in its first four bytes


def picture(server, events):
    (image,) = images_of(events)
    data = get(server, "/view", **image)
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize(
    "prompt, wanted",
    [
        ("a red circle on a blue background", ("red", "circle", "blue")),
        ("a blue square on a white background", ("blue", "square", "white")),
    ],
)
def test_the_demo_draws_what_the_prompt_says_with_progress_and_previews(server, demo, prompt, wanted):
    demo["2"]["inputs"]["text"] = prompt
    events = list(run_graph(server, demo))
    assert judge(picture(server, events)) == wanted

    progress = [
        e["data"] for e in events if isinstance(e, dict) and e["type"] == "progress" and e["data"]["node"] == "5"
    ]
    assert [step["value"] for step in progress] == list(range(1, 21))
    assert {step["max"] for step in progress} == {20}
    previews = [event for event in events if isinstance(event, bytes) and event[3] != TEXT]
    assert len(previews) == 20
    # 4 bytes of event, 4 of format, then the file
    last = Image.open(io.BytesIO(previews[-1][8:]))
    # The preview is as large as the image, because the canvas writes this size below it.
    assert (last.format, last.size) == ("JPEG", (128, 128))


def lines_of(events):
    """The lines under each node, {node: lines}."""
    executed = [event["data"] for event in events if isinstance(event, dict) and event["type"] == "executed"]
    return {data["node"]: data["output"]["sana"] for data in executed if "sana" in (data["output"] or {})}


def test_nodes_have_lines_that_cached_nodes_keep(server, demo):
    demo["1"]["inputs"]["resolution"] = "512"
    lines = lines_of(run_graph(server, demo))
    assert lines["1"][0] == "SANA 2.3M, 512 px (chosen), diffusers layout, bfloat16"
    assert "of 300 tokens" in lines["2"][0] and "of 300 tokens" in lines["3"][0]
    assert lines["4"] == ["128 x 128"]
    assert "MB predicted" in lines["6"][0] and lines["6"][-1].startswith("strips of ")
    assert lines_of(run_graph(server, demo)) == lines


def test_the_picture_carries_its_graph(server, demo):
    (image,) = images_of(list(run_graph(server, demo)))
    png = Image.open(io.BytesIO(get(server, "/view", **image)))
    assert json.loads(png.text["prompt"])["5"]["class_type"] == "SanaNodesSampler"


def test_every_node_is_described(server):
    info = json.loads(get(server, "/object_info"))
    ours = {key: node for key, node in info.items() if key.startswith("Sana")}
    assert ours.keys() == json.loads((ROOT / "tests" / "graphs" / "interface.json").read_text()).keys()
    for key, node in ours.items():
        assert node["display_name"].startswith("SANA ") and node["category"].split("/")[0] == "SANA"
        assert node["description"] and node["search_aliases"]
        for name, (_, options) in {**node["input"].get("required", {}), **node["input"].get("optional", {})}.items():
            assert options.get("tooltip"), f"{key}.{name}"
        help_page = get(server, f"/extensions/sana/docs/{key}.md").decode()
        assert help_page.startswith(f"# {node['display_name']}\n")


def test_the_script_of_the_canvas_is_served_once_whatever_the_folder_is_called(server):
    # The folder of these servers is called "sana", not like the project "sana-nodes".
    scripts = [path for path in json.loads(get(server, "/extensions")) if path.endswith("/replaced_nodes.js")]
    assert scripts == ["/extensions/sana/replaced_nodes.js"]
    assert get(server, scripts[0]) == (ROOT / "web" / "replaced_nodes.js").read_bytes()


def test_the_demo_is_a_template_with_a_thumbnail(server):
    templates = json.loads(get(server, "/workflow_templates"))
    assert sorted(templates["sana"]) == sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    workflow = json.loads(get(server, "/api/workflow_templates/sana/SANA%201%20first%20image.json"))
    assert {node["type"] for _, node, _ in expand(workflow)} >= {
        "SanaNodesLoader",
        "SanaNodesSampler",
        "SanaNodesDecode",
    }
    thumbnail = Image.open(io.BytesIO(get(server, "/api/workflow_templates/sana/SANA%201%20first%20image.jpg")))
    assert thumbnail.format == "JPEG"


def test_the_4k_template_names_missing_files_and_runs_with_the_demo_model(server):
    workflow = json.loads(get(server, f"/api/workflow_templates/sana/{quote('SANA 4K and 8K')}.json"))
    info = json.loads(get(server, "/object_info"))
    nodes = to_graph(workflow, lambda kind: info[kind]["input"])
    graph = {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}
    for node in graph.values():
        if node["class_type"] == "SanaNodesSampler":
            node["inputs"]["steps"] = 2
    (switch,) = (node["inputs"] for node in graph.values() if node["class_type"] == "SanaNodesModelSwitch")
    with pytest.raises(
        GraphError, match=r"no file '.+' in models/\w+; get it \([\d.]+ GB\) from https://\S+, save it there"
    ):
        list(run_graph(server, graph))
    switch["use"] = "sana-posters (bundled)"
    images = images_of(list(run_graph(server, graph)))
    saved = {image["filename"][:9]: image for image in images if image["type"] == "output"}
    sizes = {name: Image.open(io.BytesIO(get(server, "/view", **image))).size for name, image in saved.items()}
    # The demo model generates 512 px. The second pass, which is muted on the canvas, doubles that.
    assert sizes == {"sana-4096": (512, 512), "sana-8192": (1024, 1024)}


def test_the_log_is_clean(server):
    log = server.log.read_text()
    assert "IMPORT FAILED" not in log and "Failed to initialize database" not in log
    assert re.search(r"Import times for custom nodes:\n.*seconds: .*custom_nodes/sana", log)
