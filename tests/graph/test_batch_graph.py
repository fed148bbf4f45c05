"""A PNG of the `batch` command contains the graph that generates its image again in ComfyUI."""

import io
import json

import numpy as np
import pytest
import torch
from adapted import save_adapter
from PIL import Image

import sana_core
from sana_core import inspect_checkpoint
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


def graph_in(png):
    return json.loads(Image.open(io.BytesIO(png)).text["prompt"])


def difference_on_canvas(host, checkpoint, settings):
    """The largest difference, in 256 levels, between a PNG and the image that its graph generates."""
    prompt, options = "a red circle on a blue background", {**settings._asdict(), "seed": 7}
    del options["compiled"]
    image = sana_core.generate([prompt], checkpoint, **options)[0]
    described = describe_settings(resolve_settings(settings, checkpoint), inspect_checkpoint(checkpoint))
    png = encode_png(image, prompt, 7, json.loads(json.dumps(described)), str(checkpoint))
    assert read_entry(png)["prompt"] == prompt
    graph = {key: (node["class_type"], node["inputs"]) for key, node in graph_in(png).items()}
    ((save, (_, inputs)),) = [item for item in graph.items() if item[1][0] == "SaveImage"]
    graph[save] = ("Catch", {"value": inputs["images"], "name": "image"})
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), np.float32)
    return (255 * host.run(graph)["image"][0] - torch.from_numpy(pixels)).abs().max()


@pytest.mark.parametrize("case", CASES)
def test_the_graph_generates_the_image_of_its_png(host, checkpoint, case, loras, one_thread):
    more = CASES[case] if CASES[case] is not None else {"loras": loras}
    settings = SamplingSettings(128, 160, steps=3, guidance=4.0, **more)
    # The file has 256 levels.
    assert difference_on_canvas(host, checkpoint, settings) < 0.6


def test_where_comfyui_computes_in_the_batchs_dtype_the_image_is_the_same(host, checkpoint, monkeypatch, one_thread):
    import comfy.model_management

    settings = SamplingSettings(128, 160, steps=3, guidance=4.0, dtype="bfloat16")
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda *args, **options: True)
    assert difference_on_canvas(host, checkpoint, settings) < 0.6
    # The dtype changes the image.
    assert difference_on_canvas(host, checkpoint, settings._replace(dtype="float32")) > 0.6


# Another value than the default for each setting.
OTHER_VALUES = {
    "width": 160,
    "height": 160,
    "steps": 5,
    "guidance": 3.0,
    "negative_prompt": "a blue circle",
    "sampler": "flow_euler",
    "pag_scale": 1.5,
    "pag_blocks": "1",
    "guidance_interval": (0.1, 0.9),
    "dtype": "bfloat16",
    "compiled": True,
    "reference": "nvidia",
    "loras": None,
}


@pytest.mark.parametrize("field", SamplingSettings._fields)
def test_the_graph_contains_or_names_every_setting(host, checkpoint, loras, field):
    assert field in OTHER_VALUES, f"{field}: put it into the graph of sana_core/batch/png.py, and a value here"
    # The blocks need a scale.
    needed = {"pag_scale": 1.0, "pag_blocks": "2"} if field == "pag_blocks" else {}
    settings = SamplingSettings(128, 128, steps=3, **needed)
    changed = settings._replace(**{field: loras if field == "loras" else OTHER_VALUES[field]})
    described = [
        describe_settings(resolve_settings(choice, checkpoint), inspect_checkpoint(checkpoint))
        for choice in (settings, changed)
    ]
    graphs = [graph_in(encode_png(torch.zeros(3, 8, 8), "", 7, choice, str(checkpoint))) for choice in described]
    if field == "compiled":
        # It changes the speed only.
        assert described[0] == described[1]
    else:
        assert graphs[0] != graphs[1]


def test_the_loaders_title_names_what_the_graph_cannot_set(host, checkpoint):
    settings = SamplingSettings(128, 128, steps=3, dtype="bfloat16")
    described = describe_settings(resolve_settings(settings, checkpoint), inspect_checkpoint(checkpoint))
    graph = graph_in(encode_png(torch.zeros(3, 8, 8), "", 7, described, str(checkpoint)))
    assert "computed in bfloat16;" in graph["1"]["_meta"]["title"]
