"""Every shipped workflow fits the nodes, and draws what its thumbnail shows if its model is the bundled one."""

import json

import pytest
from expanded import to_graph
from setup import ROOT
from templates import DOWNLOADED

WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
BUNDLED = "sana-posters (bundled)"
SHOWN = {"SaveImage", "PreviewImage", "ImageCompare", "PreviewAny", "LossGraphNode"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_fits_the_nodes_and_draws(host, path):
    workflow = json.loads(path.read_text(encoding="utf-8"))
    graph = to_graph(workflow, lambda kind: host.nodes.NODE_CLASS_MAPPINGS[kind].INPUT_TYPES())
    for kind, inputs in graph.values():
        if kind == "SanaNodesModelSwitch":
            inputs["use"] = BUNDLED
        if isinstance(inputs.get("steps"), int):
            inputs["steps"] = min(inputs["steps"], 4)
    if path.stem in DOWNLOADED or not any(kind == "SaveImage" for kind, _ in graph.values()):
        return
    (save,) = (key for key, (kind, _) in graph.items() if kind == "SaveImage")
    image = graph[save][1]["images"]
    drawing = {key: node for key, node in graph.items() if node[0] not in SHOWN}
    picture = host.run({**drawing, "catch": ("Catch", {"value": image, "name": "image"})})["image"]
    assert picture.isfinite().all() and picture.std() > 0.1
