"""What a training run draws to look at is what ComfyUI draws with what it saves, with any loader."""

import shutil

import numpy as np
import pytest
import torch
from checkpoints import CHECKPOINTS
from PIL import Image

from demo.pictures import combinations, draw_scene, prompt, random_scene
from sana_core.training.runs import find_states
from sana_core.training.settings import Loss, Method, Phase, Settings, Validation, check_settings
from sana_core.training.train import train

PROMPTS = ("a red circle on a blue background", "a green star on a white background")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    import random

    folder = tmp_path_factory.mktemp("pictures")
    rng, (combos, _) = random.Random(3), combinations()
    for index in range(4):
        scene = random_scene(rng, combos[index * 9])
        Image.fromarray(draw_scene(scene)).save(folder / f"{index}.png")
        silhouette = draw_scene(scene._replace(colour="white", background="black"))
        Image.fromarray(silhouette).save(folder / f"{index}-control.png")
        (folder / f"{index}.txt").write_text(prompt(*combos[index * 9]))
    return folder


# the shift of sana-scenes is its own
@pytest.mark.parametrize(
    "name, kind", [("sana-tiny", "lora"), ("sana-tiny", "dora"), ("sana-tiny", "lokr"), ("sana-scenes", "lora")]
)
def test_the_picture_of_the_run_is_that_of_the_canvas(host, base_graph, checkpoint, pictures, tmp_path, name, kind):
    settings = check_settings(
        Settings(
            model=str(CHECKPOINTS[name]),
            out=str(tmp_path / "out"),
            name=f"{name}-{kind}",
            dtype="float32",
            phase=(Phase((str(pictures),), 128, batch=4, steps=6, learning_rate=3e-2),),
            method=Method(kind, rank=4, alpha=3.0, targets="both"),
            validation=Validation(every=6, prompts=PROMPTS, steps=6),
        )
    )
    file = train(settings)
    loras = host.models / "loras"
    loras.mkdir(exist_ok=True)
    (loras / file.name).write_bytes(file.read_bytes())
    assert (find_states(tmp_path / "out")[-1][1] / file.name).read_bytes() == file.read_bytes()
    for number, text in enumerate(PROMPTS):
        drawn = {}
        for loader in ("SanaNodesLoraLoader", "LoraLoaderModelOnly"):
            graph = base_graph(seed=number, steps=6, text=text)
            graph["load"][1]["model"] = name if name == "sana-tiny" else f"{name} (bundled)"
            graph["lora"] = (loader, {"model": ["load", 0], "lora_name": file.name, "strength_model": 1.0})
            graph["sample"][1]["model"] = ["lora", 0]
            drawn[loader] = host.run(graph)["image"][0]
        assert torch.equal(*drawn.values())
        canvas = (127.5 * (2 * drawn["SanaNodesLoraLoader"])).round().numpy().astype(np.uint8)
        seen = np.asarray(Image.open(tmp_path / "out" / "pictures" / f"step-0000006-{number:02d}.png"))
        before = np.asarray(Image.open(tmp_path / "out" / "pictures" / f"step-0000000-{number:02d}.png"))
        assert np.abs(seen.astype(int) - before).mean() > 0.3
        assert (seen == canvas).all(), np.abs(seen.astype(int) - canvas).max()


@pytest.mark.parametrize("reference", ["diffusers", "nvidia"])
def test_the_picture_under_control_is_that_of_the_canvas(host, base_graph, checkpoint, pictures, tmp_path, reference):
    controls = [pictures / f"{number}-control.png" for number in range(len(PROMPTS))]
    settings = check_settings(
        Settings(
            model=str(checkpoint),
            out=str(tmp_path / "out"),
            dtype="float32",
            reference=reference,
            phase=(Phase((str(pictures),), 128, batch=4, steps=6, learning_rate=1e-2),),
            method=Method("controlnet", blocks=3),
            validation=Validation(every=6, prompts=PROMPTS, steps=6, control=tuple(map(str, controls))),
        )
    )
    folder = host.models / "controlnet" / f"followed-{reference}"
    shutil.copytree(train(settings), folder)
    try:
        for number, text in enumerate(PROMPTS):
            (host.models.parent / "input").mkdir(exist_ok=True)
            shutil.copy(controls[number], host.models.parent / "input")
            graph = base_graph(seed=number, steps=6, text=text)
            graph["load"][1]["reference"] = reference
            name = f"{folder.name}/diffusion_pytorch_model.safetensors"
            graph["control"] = ("SanaNodesControlNetLoader", {"control_net_name": name, "reference": "auto"})
            graph["shape"] = ("LoadImage", {"image": controls[number].name})
            inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "control_net": ["control", 0]}
            inputs |= {"image": ["shape", 0], "vae": ["load", 2]}
            inputs |= {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0}
            graph["apply"] = ("ControlNetApplyAdvanced", inputs)
            graph["sample"][1].update(positive=["apply", 0], negative=["apply", 1])
            drawn = host.run(graph)["image"][0]
            canvas = (127.5 * (2 * drawn)).round().numpy().astype(np.uint8)
            seen, before = (
                np.asarray(Image.open(tmp_path / "out" / "pictures" / f"step-{step:07d}-{number:02d}.png"))
                for step in (6, 0)
            )
            assert np.abs(seen.astype(int) - before).mean() > 0.3
            assert (seen == canvas).all(), np.abs(seen.astype(int) - canvas).max()
    finally:
        shutil.rmtree(folder)


def test_the_picture_of_a_sprint_run_is_that_of_the_canvas(host, base_graph, variants, checkpoint, pictures, tmp_path):
    settings = check_settings(
        Settings(
            model=str(variants / "sprint"),
            out=str(tmp_path / "out"),
            name="trained-sprint",
            dtype="float32",
            phase=(Phase((str(pictures),), 128, batch=4, steps=6, learning_rate=3e-2),),
            method=Method("lora", rank=4, targets="both"),
            loss=Loss("consistency", str(checkpoint), tangent_warmup=3),
            validation=Validation(every=6, prompts=PROMPTS),
        )
    )
    file = train(settings)
    loras = host.models / "loras"
    loras.mkdir(exist_ok=True)
    (loras / file.name).write_bytes(file.read_bytes())
    for number, text in enumerate(PROMPTS):
        graph = base_graph(text=text)
        graph["load"][1]["model"] = "sprint"
        graph["lora"] = ("SanaNodesLoraLoader", {"model": ["load", 0], "lora_name": file.name, "strength_model": 1.0})
        links = {"model": ["lora", 0], "positive": ["positive", 0], "latent_image": ["empty", 0]}
        graph["sample"] = ("SanaNodesSprint", {**links, "seed": number, "steps": 2, "guidance": 4.5})
        canvas = (127.5 * (2 * host.run(graph)["image"][0])).round().numpy().astype(np.uint8)
        seen, before = (
            np.asarray(Image.open(tmp_path / "out" / "pictures" / f"step-{step:07d}-{number:02d}.png"))
            for step in (6, 0)
        )
        assert np.abs(seen.astype(int) - before).mean() > 0.3
        assert (seen == canvas).all(), np.abs(seen.astype(int) - canvas).max()
