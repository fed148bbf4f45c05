"""Models are freed as soon as nothing uses them, by reference counting. With --cache-none, ComfyUI relies on it."""

import weakref

import pytest
import torch
from fake_cuda import pack
from loaded_models import empty_model_list, misplaced


def load_model(path):
    import comfy.model_management as management

    model = pack("nodes.host.loading.load_model").load_model(path)
    clone = model.clone()
    management.load_models_gpu([clone], 10**6)
    x, sigma = torch.zeros(1, 32, 4, 4), torch.ones(1)
    with torch.no_grad():
        clone.model.apply_model(
            x, sigma, c_crossattn=torch.zeros(1, 300, clone.model.diffusion_model.config.caption_channels)
        )
    return model, model


def load_clip(path):
    clip = pack("nodes.host.loading.clip").load_clip(path)
    pack("nodes.host.loading.clip").encode(clip, "a red circle", True)
    clip.clone().encode_from_tokens_scheduled(clip.tokenize("a red circle"))
    return clip, clip.patcher


def load_vae(path):
    vae = pack("nodes.host.loading.vae").load_vae(path)
    latents = vae.encode(torch.zeros(1, 64, 64, 3))
    vae.encode_tiled(torch.zeros(1, 64, 64, 3))
    vae.decode(latents)
    vae.decode_tiled(latents)
    vae.get_sd()
    return vae, vae.patcher


@pytest.mark.parametrize("load", [load_model, load_clip, load_vae])
@pytest.mark.usefixtures("no_collector")
def test_reference_counting_frees_a_model(host, checkpoint, load):
    import comfy.model_management as management

    before = len(management.current_loaded_models)
    model, patcher = load(checkpoint)
    assert len(management.current_loaded_models) == before + 1 and not misplaced()
    references = [weakref.ref(thing) for thing in (model, patcher, patcher.model)]
    references += [weakref.ref(tensor) for tensor in patcher.model.parameters()]
    del model, patcher
    assert not [reference for reference in references if reference() is not None]
    assert len(management.current_loaded_models) == before


@pytest.mark.usefixtures("no_collector")
def test_a_model_that_dies_beside_another_list_is_not_listed_afterwards(host, checkpoint):
    model, patcher = load_model(checkpoint)
    with empty_model_list():
        del model, patcher
    assert not misplaced()
