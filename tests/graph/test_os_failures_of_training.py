"""Files that other programs have open while the canvas trains, as on Windows."""

import shutil
from pathlib import Path

import pytest
import torch
from fake_cuda import pack
from in_process import NodeError
from pictures import write_pictures

from sana_core.training.states import find_states

pytestmark = pytest.mark.usefixtures("one_thread")


class SharingViolation(PermissionError):
    winerror = 5

    def __init__(self):
        super().__init__(13, "Access is denied")


@pytest.fixture(scope="module")
def runs(host):
    """The folder that SANA Train writes into. There are two images in "pair", a folder in ComfyUI's input folder."""
    root = host.models.parent / "input" / "pair"
    write_pictures(root, 2)
    yield host.output / "sana_training"
    shutil.rmtree(root)
    for name in ("sana_training", "loras"):
        shutil.rmtree(host.output / name, ignore_errors=True)


@pytest.fixture
def hurried(host, monkeypatch):
    """Nobody waits long for a file."""
    monkeypatch.setattr(pack("sana_core.runtime.atomic_files"), "PATIENCE", 0.1)
    monkeypatch.setattr(pack("sana_core.training.states"), "SCAN_PATIENCE", 0.1)


@pytest.fixture
def refuse(monkeypatch):
    """A function that gets a predicate: renaming or replacing a path that it accepts fails as on Windows."""
    predicates = []
    for name in ("rename", "replace"):
        real = getattr(Path, name)

        def wrapped(path, target, real=real):
            if any(accepts(str(file)) for accepts in predicates for file in (path, target)):
                raise SharingViolation
            return real(path, target)

        monkeypatch.setattr(Path, name, wrapped)

    def refuse(accepts=None):
        predicates[:] = [] if accepts is None else [accepts]

    return refuse


@pytest.fixture
def graph(base_graph, train_node, runs):
    def graph(name, steps, **options):
        nodes = base_graph(seed=0, steps=1)
        nodes["data"] = ("SanaNodesDataset", {"folder": "pair", "resolution": 128})
        inputs = {"name": name, "rank": 4, "learning_rate": 3e-3, "batch_size": 2, "validate_every": 0}
        links = {"model": ["load", 0], "dataset": ["data", 0]}
        train_node(nodes, **links, **{**inputs, "steps": steps, "keep": 1, **options})
        nodes["sample"][1]["model"] = ["train", 2]
        for index, output in enumerate(("lora", "loss", "model")):
            nodes[f"catch {output}"] = ("Catch", {"value": ["train", index], "name": output})
        return nodes

    return graph


def is_mapped(path):
    """Whether this process maps the file, or a file in the folder."""
    return path.startswith("/") and path in Path("/proc/self/maps").read_text()


@pytest.mark.usefixtures("hurried")
def test_a_training_resumes_while_comfyui_has_its_lora(host, graph, runs, refuse, monkeypatch):
    import comfy.model_patcher

    class Dynamic(comfy.model_patcher.ModelPatcher):
        """With dynamic VRAM, the class is not ModelPatcher, and the pack lets ComfyUI map files."""

    monkeypatch.setattr(comfy.model_patcher, "CoreModelPatcher", Dynamic)
    expected = host.run(graph("in one go", 4))
    first = host.run(graph("mapped", 2))
    refuse(is_mapped)
    longer = host.run(graph("mapped", 4))
    assert first["model"].patches and longer["loss"] == expected["loss"]
    assert all(torch.equal(longer["lora"][name], expected["lora"][name]) for name in expected["lora"])
    assert [step for step, _ in find_states(runs / "mapped")] == [4]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    "place", ["steps/step-0000004", "{name}.safetensors", pytest.param("run.json", marks=pytest.mark.slow)]
)
def test_a_file_that_stays_open_costs_no_step(host, graph, runs, refuse, place):
    expected = host.run(graph("whole", 4))
    name = place.replace("/", " ").replace("{name}", "open")
    path = f"/{name}/{place.format(name=name)}"
    refuse(lambda file: file.endswith(path))
    with pytest.raises(NodeError) as caught:
        host.run(graph(name, 4))
    assert "\n" not in str(caught.value) and "Access is denied" in str(caught.value)
    refuse()
    resumed = host.run(graph(name, 4))
    assert resumed["loss"] == expected["loss"]
    assert all(torch.equal(resumed["lora"][key], expected["lora"][key]) for key in expected["lora"])
    assert [step for step, _ in find_states(runs / name)] == [4] and not (runs / name / ".sana-batch").exists()
