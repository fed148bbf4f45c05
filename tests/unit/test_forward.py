"""Our forward for sampling, compared with diffusers', which computes everything again in each step."""

import pytest
import torch
from tiny import VARIANTS, random_prompt, tiny_transformer

from sana_core.model.block import Perturbation, self_attention
from sana_core.model.forward import longest_prompt, position_embedding, prepare, velocity


def theirs(transformer, x, timestep, embeds, mask, guidance=None, control=None):
    return transformer(
        x, embeds, timestep, guidance, encoder_attention_mask=mask, controlnet_block_samples=control
    ).sample


def guidance_of(transformer, count):
    return torch.full((count,), 0.45) if transformer.config.guidance_embeds else None


@pytest.mark.parametrize("size", [(4, 4), (3, 7)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_the_library(variant, size):
    transformer = tiny_transformer(variant)
    embeds, mask = random_prompt(2)
    x, timestep = torch.randn(2, 32, *size), torch.tensor([900.0, 250.0])
    guidance = guidance_of(transformer, 2)
    ours = velocity(transformer, x, timestep, prepare(transformer, embeds, mask, *size), guidance)
    torch.testing.assert_close(ours, theirs(transformer, x, timestep, embeds, mask, guidance), atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_set_of_constants_is_right_for_every_step(variant):
    transformer = tiny_transformer(variant)
    embeds, mask = random_prompt(1, kept=6)
    constants = prepare(transformer, embeds, mask, 4, 4)
    for step in range(3):
        x, timestep = torch.randn(1, 32, 4, 4), torch.tensor([1000.0 / (step + 1)])
        guidance = guidance_of(transformer, 1)
        expected = theirs(transformer, x, timestep, embeds, mask, guidance)
        torch.testing.assert_close(velocity(transformer, x, timestep, constants, guidance), expected, atol=1e-5, rtol=0)


def test_tokens_that_the_mask_drops_are_left_out_and_change_nothing():
    transformer = tiny_transformer()
    embeds, mask = random_prompt(2, tokens=300)
    mask[0, 7:], mask[1, 3:] = 0, 0
    constants = prepare(transformer, embeds, mask, 4, 4)
    assert constants.keys[0].shape[2] == 7 and constants.bias.shape == (2, 1, 1, 7)
    assert prepare(transformer, embeds[:1], mask[:1], 4, 4).bias is None
    x, timestep = torch.randn(2, 32, 4, 4), torch.tensor([500.0, 500.0])
    expected = theirs(transformer, x, timestep, embeds, mask)
    torch.testing.assert_close(velocity(transformer, x, timestep, constants), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kept, length", [([1, 1, 0, 0], 2), ([1, 0, 1, 0], 3), ([0, 0, 0, 0], 1), ([1, 1, 1, 1], 4)])
def test_a_mask_may_have_any_shape(kept, length):
    transformer = tiny_transformer()
    embeds, _ = random_prompt(1, tokens=4)
    mask = torch.tensor([kept])
    assert longest_prompt(mask) == length
    x, timestep = torch.randn(1, 32, 4, 4), torch.tensor([500.0])
    ours = velocity(transformer, x, timestep, prepare(transformer, embeds, mask, 4, 4))
    if any(kept):
        torch.testing.assert_close(ours, theirs(transformer, x, timestep, embeds, mask), atol=1e-5, rtol=0)
    assert ours.isfinite().all()


def test_the_pictures_of_a_prompt_share_its_keys():
    transformer = tiny_transformer("sana-1.5")
    embeds, mask = random_prompt(2)
    mask[0, 5:] = 0
    constants = prepare(transformer, embeds, mask, 4, 5)
    x, timestep = torch.randn(6, 32, 4, 5), torch.full((6,), 300.0)
    expected = theirs(transformer, x, timestep, embeds.repeat_interleave(3, 0), mask.repeat_interleave(3, 0))
    torch.testing.assert_close(velocity(transformer, x, timestep, constants), expected, atol=1e-5, rtol=0)


def test_residuals_of_a_controlnet_are_added_where_the_library_adds_them():
    transformer = tiny_transformer(layers=4)
    embeds, mask = random_prompt(1)
    x, timestep = torch.randn(1, 32, 4, 4), torch.tensor([500.0])
    control = (None, *(torch.randn(1, 16, 32) for _ in range(2)))
    ours = velocity(transformer, x, timestep, prepare(transformer, embeds, mask, 4, 4), control=control)
    expected = theirs(transformer, x, timestep, embeds, mask, control=control[1:])
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_the_position_embedding_is_computed_once_for_any_size():
    transformer = tiny_transformer("sana-4k")
    zeros = torch.zeros(1, 32, 4, 6)
    bare = transformer.patch_embed.proj(zeros).flatten(2).transpose(1, 2)
    position = position_embedding(transformer, zeros, 4, 6)
    torch.testing.assert_close(bare + position, transformer.patch_embed(zeros))
    assert position_embedding(tiny_transformer(), zeros, 4, 6) is None


@pytest.mark.parametrize("variant", ["sana", "sana-1.5"])
def test_perturbed_attention_is_the_value_projected(variant):
    attention = tiny_transformer(variant).transformer_blocks[0].attn1
    states = torch.randn(3, 16, 32)
    out = self_attention(attention, states, torch.tensor([False, True, False])[:, None, None])
    torch.testing.assert_close(out[1], attention.to_out[0](attention.to_v(states[1])), atol=1e-6, rtol=0)
    torch.testing.assert_close(out[[0, 2]], attention(states[[0, 2]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("variant", ["sana", "sana-1.5"])
def test_only_the_chosen_blocks_and_pictures_are_perturbed(variant):
    transformer = tiny_transformer(variant)
    embeds, mask = random_prompt(1)
    constants = prepare(transformer, embeds, mask, 4, 4)
    x, timestep = torch.randn(1, 32, 4, 4).repeat(2, 1, 1, 1), torch.full((2,), 500.0)
    pictures = torch.tensor([False, True])[:, None, None]

    def run(*blocks):
        return velocity(transformer, x, timestep, constants, None, Perturbation(pictures, frozenset(blocks)))

    plain = velocity(transformer, x, timestep, constants)
    torch.testing.assert_close(run(), plain, atol=1e-6, rtol=0)
    torch.testing.assert_close(run(1)[:1], plain[:1], atol=1e-6, rtol=0)
    assert (run(1)[1] - plain[1]).abs().max() > 1e-3
    assert (run(1)[1] - run(2)[1]).abs().max() > 1e-3


def test_bf16_error_is_at_most_1_5_times_the_librarys():
    transformer = tiny_transformer("sana-1.5")
    embeds, mask = random_prompt(1)
    x, timestep = torch.randn(1, 32, 4, 4), torch.tensor([500.0])
    exact = theirs(transformer, x, timestep, embeds, mask)
    half = transformer.to(torch.bfloat16)
    ours = velocity(half, x.bfloat16(), timestep, prepare(half, embeds.bfloat16(), mask, 4, 4))
    library = theirs(half, x.bfloat16(), timestep, embeds.bfloat16(), mask)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).abs().mean() < 1.5 * (library - exact).abs().mean()


def test_float16_clips_the_attention_where_the_library_does():
    """Sums beyond 65504 are infinite in float16, and infinity less infinity in the next norm is NaN."""
    transformer = tiny_transformer().to(torch.float16)
    attention = transformer.transformer_blocks[0].attn1
    attention.to_out[0].weight.fill_(0)
    attention.to_out[0].bias.copy_(torch.tensor([float("inf"), -float("inf"), 65504.0, 1.0]).repeat(8))
    states = torch.randn(2, 16, 32).half()
    out = self_attention(attention, states)
    torch.testing.assert_close(out, attention(states), atol=0, rtol=0)
    assert out[0, 0, :4].tolist() == [65504.0, -65504.0, 65504.0, 1.0]
    wide = attention.to(torch.bfloat16)
    assert self_attention(wide, states.bfloat16()).isinf().any(), "other precisions hold larger numbers"
