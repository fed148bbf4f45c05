"""Previews of a training run equal ComfyUI's images with the saved files, for every loader."""

import shutil

import numpy as np
import pytest
import torch
from checkpoints import CHECKPOINTS
from loading import controlled
from pictures import write_pictures
from PIL import Image

from sana_core.training.settings import Loss, Method, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.states import find_states
from sana_core.training.trainer import train

STEPS = 6
PROMPTS = ("a red circle on a blue background", "a green star on a white background")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, 4, controls=True)
    # ComfyUI decodes a grey PNG with ffmpeg, whose greys are others.
    for file in folder.glob("*-control.png"):
        Image.open(file).convert("RGB").save(file)
    return folder


@pytest.fixture
def run(pictures, tmp_path):
    """A function of settings that trains for STEPS on the pictures, and draws PROMPTS before and after."""

    def start(model, rate, validation=(), **options):
        phase = (Phase((str(pictures),), 128, batch=4, steps=STEPS, learning_rate=rate),)
        looks = Validation(every=STEPS, prompts=PROMPTS, **dict(validation))
        out = str(tmp_path / "out")
        return train(
            check_settings(TrainingSettings(str(model), out, phase, dtype="float32", validation=looks, **options))
        )

    return start


@pytest.fixture
def check(host, tmp_path):
    """A function of a prompt's number and a graph: the run's last picture is the graph's, and is not its first."""

    def compare(number, graph):
        drawn = host.run(graph)["image"][0]
        canvas = (127.5 * (2 * drawn)).round().numpy().astype(np.uint8)
        before, seen = (
            np.asarray(Image.open(tmp_path / "out" / "pictures" / f"step-{step:07d}-{number:02d}.png"))
            for step in (0, STEPS)
        )
        assert np.abs(seen.astype(int) - before).mean() > 0.3
        assert (seen == canvas).all(), np.abs(seen.astype(int) - canvas).max()
        return drawn

    return compare


def put_lora(host, file):
    (host.models / "loras").mkdir(exist_ok=True)
    shutil.copyfile(file, host.models / "loras" / file.name)
    return {"model": ["load", 0], "lora_name": file.name, "strength_model": 1.0}


# the shift of sana-posters is its own
@pytest.mark.parametrize(
    "name, kind",
    [
        ("sana-tiny", "lora"),
        ("sana-tiny", "dora"),
        pytest.param("sana-tiny", "lokr", marks=pytest.mark.slow),
        pytest.param("sana-posters", "lora", marks=pytest.mark.slow),
    ],
)
def test_the_picture_of_the_run_is_that_of_the_canvas(host, base_graph, run, check, tmp_path, name, kind):
    method = Method(kind, rank=4, alpha=3.0, targets="both")
    file = run(CHECKPOINTS[name], 3e-2, {"steps": STEPS}, name=f"{name}-{kind}", method=method)
    assert (find_states(tmp_path / "out")[-1][1] / file.name).read_bytes() == file.read_bytes()
    lora = put_lora(host, file)
    for number, text in enumerate(PROMPTS):
        graph = base_graph(seed=number, steps=STEPS, text=text)
        graph["load"][1]["model"] = name if name == "sana-tiny" else f"{name} (bundled)"
        graph["sample"][1]["model"] = ["lora", 0]
        ours, core = (
            check(number, {**graph, "lora": (loader, lora)})
            for loader in ("SanaNodesLoraLoader", "LoraLoaderModelOnly")
        )
        assert torch.equal(ours, core)


@pytest.mark.parametrize("reference", [pytest.param("diffusers", marks=pytest.mark.slow), "nvidia"])
def test_the_picture_under_control_is_that_of_the_canvas(host, base_graph, run, check, checkpoint, pictures, reference):
    controls = [pictures / f"1-{number}-control.png" for number in range(len(PROMPTS))]
    validation = {"steps": STEPS, "control": tuple(map(str, controls))}
    trained = run(checkpoint, 1e-2, validation, reference=reference, method=Method("controlnet", blocks=3))
    folder = shutil.copytree(trained, host.models / "controlnet" / f"followed-{reference}")
    try:
        for number, text in enumerate(PROMPTS):
            (host.models.parent / "input").mkdir(exist_ok=True)
            shutil.copy(controls[number], host.models.parent / "input")
            graph = base_graph(seed=number, steps=STEPS, text=text)
            graph["load"][1]["reference"] = reference
            controlled(graph, f"{folder.name}/diffusion_pytorch_model.safetensors", None, "auto")
            graph["edges"] = ("LoadImage", {"image": controls[number].name})
            check(number, graph)
    finally:
        shutil.rmtree(folder)


def test_the_picture_of_a_sprint_run_is_that_of_the_canvas(host, base_graph, variants, run, check, checkpoint):
    loss = Loss("consistency", tangent_warmup=3)
    method = Method("lora", rank=4, targets="both")
    lora = put_lora(host, run(variants / "sprint", 3e-2, name="trained-sprint", method=method, loss=loss))
    for number, text in enumerate(PROMPTS):
        graph = base_graph(text=text)
        graph["load"][1]["model"] = "sprint"
        graph["lora"] = ("SanaNodesLoraLoader", lora)
        links = {"model": ["lora", 0], "positive": ["positive", 0], "latent_image": ["empty", 0]}
        graph["sample"] = ("SanaNodesSprint", {**links, "seed": number, "steps": 2, "guidance": 4.5})
        check(number, graph)
