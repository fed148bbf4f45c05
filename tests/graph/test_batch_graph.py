"""A PNG of the `batch` command carries the graph that draws its picture again in ComfyUI."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import sana_core
from sana_core.batch.draw import Settings, resolve_settings
from sana_core.batch.fingerprint import describe_settings
from sana_core.batch.png import encode_png, read_entry

OTHERS = {"negative_prompt": "a blue circle", "pag_scale": 1.5, "pag_blocks": "2", "guidance_interval": (0.1, 0.9)}


@pytest.mark.parametrize("more", [{}, OTHERS], ids=["plain", "with PAG, an interval and a negative prompt"])
def test_the_graph_of_a_picture_draws_it_again(host, checkpoint, more, one_thread):
    prompt, settings = "a red circle on a blue background", Settings(128, 160, steps=3, guidance=4.0, **more)
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
