"""A PNG of the `batch` command carries the graph that draws its picture again in ComfyUI."""

import io
import json

import numpy as np
import pytest
import torch
from adapted import save_adapter
from PIL import Image

import sana_core
from sana_core.batch.pipeline import SamplingSettings, resolve_settings
from sana_core.batch.png import describe_settings, encode_png, read_entry

OTHERS = {"negative_prompt": "a blue circle", "pag_scale": 1.5, "pag_blocks": "2", "guidance_interval": (0.1, 0.9)}


@pytest.fixture
def loras(host, checkpoint):
    """Two LoRAs in ComfyUI's folder, with their strengths."""
    files = [host.models / "loras" / name for name in ("first.safetensors", "second.safetensors")]
    files[0].parent.mkdir(exist_ok=True)
    for seed, file in enumerate(files):
        save_adapter(checkpoint, file, seed=seed)
    yield tuple(zip(map(str, files), (1.0, -0.5), strict=True))
    for file in files:
        file.unlink()


CASES = {"plain": {}, "with PAG, an interval and a negative prompt": OTHERS, "with LoRAs": None}


@pytest.mark.parametrize("case", CASES)
def test_the_graph_of_a_picture_draws_it_again(host, checkpoint, case, loras, one_thread):
    more = CASES[case] if CASES[case] is not None else {"loras": loras}
    prompt, settings = "a red circle on a blue background", SamplingSettings(128, 160, steps=3, guidance=4.0, **more)
    options = {**settings._asdict(), "seed": 7}
    picture = sana_core.generate([prompt], checkpoint, **{key: options[key] for key in options if key != "compiled"})[0]
    described = describe_settings(resolve_settings(settings, checkpoint), checkpoint)
    png = encode_png(picture, prompt, 7, json.loads(json.dumps(described)), str(checkpoint))
    assert read_entry(png)["prompt"] == prompt

    nodes = json.loads(Image.open(io.BytesIO(png)).text["prompt"])
    graph = {key: (node["class_type"], node["inputs"]) for key, node in nodes.items()}
    ((save, (_, inputs)),) = [item for item in graph.items() if item[1][0] == "SaveImage"]
    graph[save] = ("Catch", {"value": inputs["images"], "name": "image"})
    again = host.run(graph)["image"][0]
    drawn = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), np.float32) / 255
    # the file has 256 levels
    assert (again - torch.from_numpy(drawn)).abs().max() < 0.6 / 255
