"""What SANA Load LoRA counts as fitting is what ComfyUI really applies, whatever kind the adapter is of."""

import logging
import re

import pytest
import torch
from in_process import NodeError
from test_lora import CONV, LINEAR, ours, with_lora

pytestmark = pytest.mark.usefixtures("one_load")

NAME = f"diffusion_model.{LINEAR}"  # Its weight is [160, 160].
CONV_NAME = f"diffusion_model.{CONV}"  # Its weight is [800, 160, 1, 1].


def made(name, **shapes):
    """Tensors of a LoRA's layer. A double underscore in a keyword becomes a dot."""
    generator = torch.Generator().manual_seed(1)
    return {
        f"{name}.{leaf.replace('__', '.')}": torch.randn(shape, generator=generator) * 0.1
        for leaf, shape in shapes.items()
    }


def pair(down, up):
    return made(NAME, lora_A__weight=down, lora_B__weight=up)


def blocks(alpha, *shape, name=NAME):
    return {**made(name, oft_blocks=shape), f"{name}.alpha": torch.tensor(alpha)}


HADA = {"hada_w1_b": (4, 160), "hada_w2_a": (160, 4), "hada_w2_b": (4, 160)}
# The weights of other kinds are compared in test_written_files.py.
FITTING = {
    "lora": pair((4, 160), (160, 4)),
    "lora of a convolution": made(CONV_NAME, lora_A__weight=(4, 160, 1, 1), lora_B__weight=(800, 4, 1, 1)),
    "lora under diffusers' old names": made(NAME + "_lora", down__weight=(4, 160), up__weight=(160, 4)),
    "dora": {**pair((4, 160), (160, 4)), **made(NAME, dora_scale=(160, 1))},
    "lokr of four": made(NAME, lokr_w1_a=(8, 2), lokr_w1_b=(2, 16), lokr_w2_a=(20, 2), lokr_w2_b=(2, 10)),
    "its own shape": {**pair((4, 160), (160, 4)), f"{NAME}.reshape_weight": torch.tensor([160, 160])},
}
MISFITS = {
    "rank": pair((4, 160), (160, 8)),
    "width": pair((4, 2240), (2240, 4)),
    "half": {f"{NAME}.lora_B.weight": torch.ones(160, 4)},
    "alpha": {**pair((4, 160), (160, 4)), f"{NAME}.alpha": torch.ones(2)},
    "dora": {**pair((4, 160), (160, 4)), **made(NAME, dora_scale=(7, 1))},
    "dora without dimensions": {**pair((4, 160), (160, 4)), **made(NAME, dora_scale=())},
    "lokr": made(NAME, lokr_w1=(8, 16), lokr_w2=(20, 11)),
    "lokr's rank": made(NAME, lokr_w1_a=(8, 2), lokr_w1_b=(3, 16), lokr_w2=(20, 10)),
    "lokr's half": made(NAME, lokr_w1_a=(8, 2), lokr_w2=(20, 10)),
    "loha": made(NAME, hada_w1_a=(150, 4), **HADA),
    "loha's rank": made(NAME, hada_w1_a=(160, 5), **HADA),
    "loha's half": made(NAME, hada_w1_a=(160, 4)),
    "glora": made(NAME, a1__weight=(150, 4), a2__weight=(4, 160), b1__weight=(160, 4), b2__weight=(4, 160)),
    "oft": blocks(0.0, 10, 15, 15),
    "boft without blocks": blocks(1e-3, 0, 10, 16, 16),
    "boft without alpha": made(NAME, oft_blocks=(2, 10, 16, 16)),
    "difference": made(NAME, diff=(160, 161)),
    "difference of a convolution": made(CONV_NAME, diff=(160, 800)),
    "weight": made(NAME, set_weight=(161, 160)),
    "larger": {**pair((4, 160), (160, 4)), f"{NAME}.reshape_weight": torch.tensor([160, 320])},
}


def really_applied(layer, tensors):
    """Whether ComfyUI's arithmetic, with numbers, changes a weight and leaves it its shape."""
    import comfy.lora

    weight = torch.randn((160, 160) if layer == NAME else (800, 160, 1, 1))
    before = weight.clone()
    try:
        (patch,) = comfy.lora.load_lora(tensors, {layer: "x.weight"}, log_missing=False).values()
        after = comfy.lora.calculate_weight([(1.0, patch, 1.0, None, None)], weight, "x.weight")
    except Exception:
        return False
    return after.shape == before.shape and not torch.equal(after, before)


def layer_of(tensors):
    return CONV_NAME if next(iter(tensors)).startswith(CONV_NAME) else NAME


@pytest.mark.parametrize("kind", FITTING)
def test_what_comfyui_applies_counts_and_changes_the_picture(host, base_graph, install, kind):
    tensors = FITTING[kind]
    assert really_applied(layer_of(tensors), tensors)
    graph = base_graph(steps=2)
    plain = host.run(graph)["latent"]["samples"]
    got = host.run(with_lora(graph, lora=ours(install("loras", "fits.safetensors", tensors))))
    assert not torch.equal(got["latent"]["samples"], plain)


@pytest.mark.parametrize("kind", MISFITS)
def test_what_comfyui_cannot_apply_is_refused_with_both_shapes(host, base_graph, install, kind):
    tensors = MISFITS[kind]
    assert not really_applied(layer_of(tensors), tensors)
    with pytest.raises(NodeError, match="^loras/not.safetensors: none of its 1 layers fit this model") as caught:
        host.run(with_lora(base_graph(), lora=ours(install("loras", "not.safetensors", tensors))))
    message = str(caught.value)
    assert re.search(r"expected \[160, 160\]|expected \[800, 160, 1, 1\]|, but no \w+", message)
    assert "\n" not in message and len(message) < 300


def test_of_a_mixed_file_the_fitting_layers_are_applied_and_the_others_named(host, base_graph, install, caplog):
    fitting, misfit = FITTING["lora of a convolution"], MISFITS["rank"]
    graph = base_graph(steps=2)
    with caplog.at_level(logging.WARNING):
        got = host.run(with_lora(graph, lora=ours(install("loras", "mixed.safetensors", {**fitting, **misfit}))))
    said = f"loras/mixed.safetensors: 1 of 2 layers fit, not {NAME} "
    said += "(got lora_A [4, 160], lora_B [160, 8], expected [160, 160])"
    assert said in caplog.text
    alone = host.run(with_lora(graph, lora=ours(install("loras", "alone.safetensors", fitting))))
    assert torch.equal(got["latent"]["samples"], alone["latent"]["samples"])
