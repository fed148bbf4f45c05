"""Broken folders of SANA-Video: a video of one frame comes out, or one line names the broken file."""

import json
import os
import shutil

import pytest
import torch
import video_models
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import changed_bytes, changed_json, with_file
from safetensors.torch import load_file, save

from sana_core.video.generate import generate_video

# Most examples generate a video. `make test-all` and `make fuzz` try as many as of the other files.
IS_SHORT = os.environ.get("FUZZ_PROFILE", "test") == "test"
some_examples = settings(max_examples=settings().max_examples // (3 if IS_SHORT else 1))
SIDE = 64
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool]
WEIGHTS = "diffusion_pytorch_model.safetensors"
CONFIGS = ["vae/config.json", "transformer/config.json", "scheduler/scheduler_config.json"]
# Each line names the broken file or its folder, or the NaN that it leads to.
NAMES = ["vae/", "transformer/", "scheduler_config.json", "latents: ", "pixels: "]


@pytest.fixture(scope="module", params=video_models.MODELS)
def folder(request, tmp_path_factory):
    """A small SANA-Video, of which each example breaks one file, and mends it."""
    return video_models.save_folder(request.param, tmp_path_factory.mktemp("videos") / "model")


def use(folder):
    first = torch.zeros(3, SIDE, SIDE)
    video = generate_video("a red circle", folder, 0, 1, (SIDE, SIDE), first, steps=1)
    assert video.shape == (3, 1, SIDE, SIDE)


def test_the_small_model_works(folder):
    use(folder)


@pytest.mark.parametrize("name", CONFIGS)
@some_examples
@given(data=st.data())
def test_configurations(survives, folder, name, data):
    file = folder / name
    content = data.draw(changed_json(json.loads(file.read_bytes())) | changed_bytes(file.read_bytes()))
    with_file(file, content, survives, lambda: use(folder), *NAMES)


@st.composite
def changed_tensors(draw, tensors):
    """The bytes of `tensors` with up to two of them dropped, renamed, reshaped, of another dtype or not finite."""
    tensors = dict(tensors)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(tensors)))
        match draw(st.sampled_from(("drop", "rename", "shape", "flat", "dtype", "value", "add"))):
            case "drop":
                del tensors[name]
            case "rename":
                tensors[draw(st.sampled_from(["x", f"{name}.x", "encoder.x", "latents_mean"]))] = tensors.pop(name)
            case "shape":
                shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 16, 17, 128]), max_size=5))
                tensors[name] = torch.zeros(shape[: 3 if 128 in shape else 5])
            case "flat":
                tensors[name] = tensors[name].flatten()
            case "dtype":
                tensors[name] = tensors[name].to(draw(st.sampled_from(DTYPES)))
            case "value":
                value = draw(st.sampled_from([float("nan"), float("inf"), 1e30, 0.0]))
                tensors[name] = torch.full(tensors[name].shape, value)
            case _:
                tensors[f"{name}2"] = tensors[name].clone()
    return save(tensors)


@pytest.mark.parametrize("part", ["vae", "transformer"])
@some_examples
@given(data=st.data())
def test_tensors(survives, folder, part, data):
    file = folder / part / WEIGHTS
    content = data.draw(changed_tensors(load_file(file)))
    with_file(file, content, survives, lambda: use(folder), *NAMES)


@pytest.mark.parametrize("part", ["vae", "transformer", "text_encoder"])
def test_parts_of_other_models(survives, folder, small, tmp_path, part):
    """Parts of the other video model, of a model of images, and a text encoder of another width."""
    for source in (*(video_models.save_folder(name, tmp_path / name) for name in video_models.MODELS), small):
        copy = shutil.copytree(folder, tmp_path / "copy", symlinks=True)
        (copy / part).unlink() if (copy / part).is_symlink() else shutil.rmtree(copy / part)
        shutil.copytree(source / part, copy / part)
        survives(lambda copy=copy: use(copy), *NAMES, "text_encoder/", "copy", "vae: ")
        shutil.rmtree(copy)
