"""Adapters: the files open in diffusers with the same outputs, and merging them is undone to the bit."""

import json

import pytest
import torch
from adapted import learn_something
from diffusers import SanaPipeline
from safetensors import safe_open
from trained import same, velocity

import sana_core
from sana_core.checkpoints.lora import merge_loras
from sana_core.training.settings import Method
from sana_core.training.trained_model import adapter_layers, adapter_tensors, add_adapter, merged, write_adapter

KINDS = ("lora", "dora", "lokr")


def adapted(checkpoint, kind, alpha=None, targets="both", dtype=torch.float32):
    """A transformer with an adapter that has learnt something."""
    transformer = sana_core.load_transformer(checkpoint, dtype=dtype)
    method = Method(kind, rank=4, alpha=alpha, targets=targets)
    add_adapter(transformer, method, seed=7)
    return learn_something(transformer), method


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_has_no_effect_at_first(checkpoint, kind):
    transformer = sana_core.load_transformer(checkpoint)
    before = velocity(transformer)
    add_adapter(transformer, Method(kind, rank=4, targets="both"), seed=1)
    torch.testing.assert_close(velocity(transformer), before, atol=1e-5, rtol=0)
    trained = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name or ".lokr_" in name for name in trained)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_alone_decides_on_how_it_begins(checkpoint, kind):
    def begin(seed, other):
        torch.manual_seed(other)
        transformer = sana_core.load_transformer(checkpoint)
        add_adapter(transformer, Method(kind, rank=4), seed)
        return adapter_tensors(transformer, torch.float32)

    first, second, third = begin(5, 1), begin(5, 2), begin(6, 1)
    assert same(first, second) and not same(first, third)


@pytest.mark.parametrize("targets, layers", [("attention", 5 * 8), ("feed_forward", 5 * 2), ("both", 5 * 10)])
def test_targets(checkpoint, targets, layers):
    transformer, _ = adapted(checkpoint, "lora", targets=targets)
    assert len(adapter_layers(transformer)) == layers


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("lora", torch.bfloat16)])
def test_merging_computes_the_same_and_is_undone(checkpoint, kind, dtype):
    transformer, _ = adapted(checkpoint, kind, alpha=3.0, dtype=dtype)
    before = {name: value.clone() for name, value in transformer.state_dict().items()}
    apart = velocity(transformer)
    with merged(transformer, adapter_tensors(transformer, torch.float32)):
        together = velocity(transformer)
    # bf16 rounds the weights once more
    bound = 1e-5 if dtype == torch.float32 else 0.02
    assert float((together - apart).float().norm()) < bound * float(apart.float().norm())
    assert torch.equal(velocity(transformer), apart)
    assert all(torch.equal(value, before[name]) for name, value in transformer.state_dict().items())


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.bfloat16) for kind in KINDS), ("dora", torch.float32)])
def test_merged_weights_are_those_that_are_drawn_with_the_file(checkpoint, tmp_path, kind, dtype):
    file = tmp_path / "it.safetensors"
    transformer, method = adapted(checkpoint, kind, alpha=3.0, dtype=dtype)
    tensors = adapter_tensors(transformer, dtype)
    write_adapter(file, transformer, tensors, method, {})
    drawn = sana_core.load_transformer(checkpoint, dtype=dtype)
    merge_loras(drawn, [(str(file), 1.0)])
    with merged(transformer, tensors):
        for layer, adapter in adapter_layers(transformer).items():
            assert torch.equal(adapter.get_base_layer().weight, drawn.get_submodule(layer).weight), layer


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_diffusers_opens_the_file_and_computes_the_same(checkpoint, tmp_path, kind):
    transformer, method = adapted(checkpoint, kind, alpha=3.0)
    expected = velocity(transformer)
    file = tmp_path / "it.safetensors"
    write_adapter(file, transformer, adapter_tensors(transformer, torch.float32), method, {"trigger": "sks"})
    pipeline = SanaPipeline.from_pretrained(checkpoint, transformer=sana_core.load_transformer(checkpoint))
    pipeline.load_lora_weights(str(file))
    torch.testing.assert_close(velocity(pipeline.transformer), expected, atol=1e-4, rtol=0)
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    assert metadata["trigger"] == "sks"
    # The weights contain the scale, because some programs ignore this metadata.
    settings = json.loads(metadata["lora_adapter_metadata"])
    assert settings["transformer.lora_alpha"] == settings["transformer.r"] == 4
