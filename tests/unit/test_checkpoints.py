"""Folders that load, and folders that say what is wrong with them."""

import json
import shutil

import pytest
import torch
from diffusers import AutoencoderDC, SanaTransformer2DModel
from transformers import Gemma2Model

import sana_core
from sana_core.checkpoints import stored_dtype

LOADERS = {
    "transformer": (sana_core.load_transformer, SanaTransformer2DModel),
    "vae": (sana_core.load_autoencoder, AutoencoderDC),
    "text_encoder": (lambda *a, **k: sana_core.load_text_encoder(*a, **k).model, Gemma2Model),
}


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "model")


@pytest.mark.parametrize("name", LOADERS)
def test_loads_what_the_library_loads(checkpoint, name):
    load, library_class = LOADERS[name]
    ours, theirs = load(checkpoint), library_class.from_pretrained(checkpoint / name).float()
    assert type(ours) is library_class and not ours.training
    assert not any(p.requires_grad for p in ours.parameters())
    for (key, a), (other, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert key == other and a.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("name", LOADERS)
def test_loads_in_the_dtype_that_the_file_has(checkpoint, name):
    dtype = stored_dtype(checkpoint, name)
    assert dtype == torch.bfloat16
    assert {p.dtype for p in LOADERS[name][0](checkpoint, dtype=dtype).parameters()} == {dtype}


def test_a_single_component_folder_loads(checkpoint):
    assert sana_core.load_transformer(checkpoint / "transformer").config.num_layers == 5


@pytest.mark.parametrize("name", LOADERS)
def test_broken_folders_are_named(copy, name):
    load = LOADERS[name][0]
    with pytest.raises(FileNotFoundError, match="model: got 'nowhere', which is no folder; download"):
        load(copy.parent / "nowhere")

    config = copy / name / "config.json"
    content = config.read_text()
    config.write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    with pytest.raises(ValueError, match=f"model: model/{name} holds FluxTransformer2DModel, expected "):
        load(copy)
    config.write_text("{")
    with pytest.raises(ValueError, match=f"model: model/{name}/config.json is not JSON"):
        load(copy)
    config.unlink()
    with pytest.raises(FileNotFoundError, match=f"model: no config.json in model/{name}; download"):
        load(copy)
    config.write_text(content)
    for file in (copy / name).glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(FileNotFoundError, match=f"model: no .safetensors file in model/{name}; download"):
        load(copy)


def test_a_missing_tokenizer_is_named(copy):
    shutil.rmtree(copy / "tokenizer")
    with pytest.raises(FileNotFoundError, match="model: no tokenizer.json in model/tokenizer; download"):
        sana_core.load_text_encoder(copy)


def test_an_empty_folder_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="model: no config.json in empty/transformer; download"):
        sana_core.load_transformer(tmp_path / "empty")
