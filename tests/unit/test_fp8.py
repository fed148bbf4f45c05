"""Products in fp8: exact for the operands as they are rounded, as far from plain ones as the roundings put them."""

import pytest
import torch
from decoders import noise
from pretend_card import pretend_cards
from setup import ROOT
from shape_judge import judge
from tiny import random_prompt, tiny_transformer

from sana_core import generate, load_transformer
from sana_core.errors import InputError
from sana_core.kernels import trial
from sana_core.model.forward import prepare, velocity
from sana_core.model.fp8 import Fp8Linear, quantise_products, scaled_rows
from sana_core.model.layers import join_projections
from sana_core.runtime.image_files import levels

TINY, POSTERS = ROOT / "tests" / "models" / "sana-tiny", ROOT / "demo" / "sana-posters"
PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
# Relative error of a product of two e4m3 operands. Numbers spread evenly over one binade are rounded by
# 2^-4 / sqrt(3) of an odd sixteenth. Two operands have 2^0.5 times that error.
EXPECTED = 0.0373


@torch.no_grad()
def multiplies():
    try:
        Fp8Linear(torch.nn.Linear(16, 16).bfloat16())(torch.zeros(1, 16).bfloat16())
    except NotImplementedError:
        return False
    return True


pytestmark = pytest.mark.skipif(not multiplies(), reason="this torch multiplies in fp8 on GPUs alone, by rows")


@pytest.fixture
def card(monkeypatch):
    """The first of two GPUs that compute on the CPU, in plain torch."""
    monkeypatch.setattr(trial, "TRIALS", {})
    trial.refused_kernels.cache_clear()
    with pretend_cards(2), torch.no_grad():
        yield "cuda:0"
    trial.refused_kernels.cache_clear()


def distance(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("checkpoint", [TINY, POSTERS], ids=lambda path: path.name)
@pytest.mark.parametrize("name", ["attn1.to_q", "ff.conv_inverted", "ff.conv_point"])
@torch.no_grad()
def test_a_product_is_exact_for_its_rounded_operands(checkpoint, name):
    layer = load_transformer(checkpoint).transformer_blocks[1].get_submodule(name).bfloat16()
    weight, bias = layer.weight.flatten(1), 0 if layer.bias is None else layer.bias.double()
    # rows as far apart in size as hidden states are, one of them nothing
    states = noise(3, 40, weight.shape[1]).bfloat16() * torch.logspace(-6, 6, 40)[:, None].bfloat16()
    states[1, 7] = 0
    got = Fp8Linear(layer)(states)
    (codes, scale), (weight_codes, own_scale) = scaled_rows(states.flatten(0, 1)), scaled_rows(weight)
    exact = (codes.double() * scale) @ (weight_codes.double() * own_scale).T + bias
    assert got.isfinite().all() and distance(got.flatten(0, 1), exact) < 2**-8
    # an image alone
    assert torch.equal(Fp8Linear(layer)(states[1:2])[0], got[1])
    # The bias would hide the error of small rows.
    layer.bias = None
    for row, expected in zip(Fp8Linear(layer)(states)[0], states[0].double() @ weight.double().T, strict=True):
        assert distance(row, expected) < 2 * EXPECTED


@torch.no_grad()
def test_random_operands_are_as_far_off_as_two_roundings_to_three_bits():
    layer = torch.nn.Linear(2240, 1120, bias=False).bfloat16()
    torch.nn.init.normal_(layer.weight, std=0.02)
    states = noise(1, 256, 2240).bfloat16()
    result = distance(Fp8Linear(layer)(states), states.double() @ layer.weight.double().T)
    assert result == pytest.approx(EXPECTED, rel=0.05)


@torch.no_grad()
def test_a_compiled_product_is_one_graph_and_the_same():
    layer, states = Fp8Linear(torch.nn.Linear(64, 32).bfloat16()), noise(2, 8, 64).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(states), layer(states))
    torch._dynamo.reset()


@pytest.mark.parametrize("variant", ["sana", "sana-1.5"])
def test_all_products_of_the_blocks_are_in_fp8_and_one_makes_query_key_and_value(variant, card):
    embeds, mask = (item.to(card) for item in random_prompt(2))
    x, time = noise(2, 32, 4, 6).to(card), torch.full((2,), 500.0, device=card)
    results = []
    for fp8 in (False, True):
        transformer = tiny_transformer(variant).to(card, torch.bfloat16)
        join_projections(transformer)
        if fp8:
            quantise_products(transformer)
        constants = prepare(transformer, embeds.bfloat16(), mask, 4, 6)
        results.append(velocity(transformer, x.bfloat16(), time, constants).cpu().float())
    layers = {name.split(".", 2)[2] for name, layer in transformer.named_modules() if isinstance(layer, Fp8Linear)}
    attention = {f"attn2.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")} | {"attn1.to_qkv", "attn1.to_out.0"}
    assert layers == attention | {"ff.conv_inverted", "ff.conv_point"}
    assert not hasattr(transformer.transformer_blocks[0].attn1, "to_q")
    assert 1e-4 < distance(results[1], results[0].double()) < 0.1


@pytest.mark.parametrize("options", [{}, {"pag_scale": 2.0}, {"split": True}], ids=str)
def test_pictures_show_the_same(card, options):
    devices = [card, "cuda:1"] if "split" in options else [card]
    got = generate(PROMPTS, TINY, devices=devices, width=128, height=128, dtype="bfloat16", fp8=True, **options)
    for prompt, picture in zip(PROMPTS, got, strict=True):
        verdict = judge(levels(picture))
        assert f"a {verdict.colour} {verdict.shape} on a {verdict.background} background" == prompt


def test_devices_and_dtypes_without_it_are_refused(card, monkeypatch):
    size = {"width": 64, "height": 64, "fp8": True}
    for current in ({"devices": ["cpu"]}, {"devices": [card, "cpu"]}, {"devices": [card, "cpu"], "split": True}):
        with pytest.raises(InputError, match="fp8: got cpu, which cannot multiply in fp8"):
            generate(["a"], TINY, **size, **current)
    with pytest.raises(InputError, match="fp8: got it with dtype float32, expected bfloat16"):
        generate(["a"], TINY, devices=[card], **size)

    def refuse(*arguments, **options):
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0\nmore")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(InputError, match=r"fp8: got cuda:0, .*\(RuntimeError: torch._scaled_mm is only .* 9.0\)"):
        generate(["a"], TINY, devices=[card], dtype="bfloat16", **size)
