"""Every template fits the nodes, and generates its images with the demo model."""

import json
import shutil

import pytest
from expanded import to_graph
from setup import ROOT, comfyui_path
from templates import DOWNLOADED

# tests/browser runs the other ones on the canvas.
QUICK = ("SANA train a LoRA", "SANA check this computer")
WORKFLOWS = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow)
    for path in sorted((ROOT / "workflows").glob("*.json"))
]
BUNDLED = "sana-posters (bundled)"
SHOWN = {"SaveImage", "PreviewImage", "PreviewAny", "LossGraphNode"}


@pytest.fixture(scope="module")
def example(host):
    """The image that ComfyUI has in its input folder."""
    folder = host.models.parent / "input"
    folder.mkdir(exist_ok=True)
    yield shutil.copy(comfyui_path() / "input" / "example.png", folder)
    (folder / "example.png").unlink()


@pytest.mark.parametrize("path", WORKFLOWS)
def test_a_template_fits_the_nodes_and_generates_its_images(host, example, path):
    workflow = json.loads(path.read_text(encoding="utf-8"))
    graph = to_graph(workflow, lambda kind: host.nodes.NODE_CLASS_MAPPINGS[kind].INPUT_TYPES())
    for kind, inputs in graph.values():
        if kind == "SanaNodesModelSwitch":
            inputs["use"] = BUNDLED
        if isinstance(inputs.get("steps"), int):
            inputs["steps"] = min(inputs["steps"], 4)
    if path.stem in DOWNLOADED or not any(kind == "SaveImage" for kind, _ in graph.values()):
        return
    saved = {
        f"catch {key}": ("Catch", {"value": inputs["images"], "name": key})
        for key, (kind, inputs) in graph.items()
        if kind == "SaveImage"
    }
    generating = {key: node for key, node in graph.items() if node[0] not in SHOWN}
    images = host.run({**generating, **saved})
    assert len(images) == len(saved)
    assert all(image.isfinite().all() and image.std() > 0.1 for image in images.values())
