"""Sizes, channels, and the noise of a seed."""

import pytest
import torch
from noise import noise_like

from sana_core.model.latents import check_channels, latent_shape
from sana_core.runtime.checks import check_number


def test_a_size_becomes_a_shape():
    assert latent_shape(1024, 512, 3) == (3, 32, 16, 32)


@pytest.mark.parametrize(
    "width, nearest", [(1000, 992), (0, 32), (-64, 32), (31, 32), (100000, 16384), (1010, 1024), (16416, 16384)]
)
def test_a_wrong_size_names_the_field_and_the_nearest_right_one(width, nearest):
    with pytest.raises(ValueError, match=f"^width: got {width}, .*; use {nearest}$"):
        latent_shape(width, 512, 1)
    with pytest.raises(ValueError, match=f"^height: got {width}, .*; use {nearest}$"):
        latent_shape(512, width, 1)


@pytest.mark.parametrize("value", [0, 101, float("nan"), float("inf"), -float("inf")])
def test_a_number_out_of_range_is_named(value):
    with pytest.raises(ValueError, match="^guidance: got .*, expected a number from 1 to 100$"):
        check_number("guidance", value, 1, 100)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 32, 8), (1, 32, 1, 8, 8)])
def test_a_latent_of_another_model_is_named(shape):
    with pytest.raises(ValueError, match=r"^samples: got a latent of shape \[1, .*expected \[batch, 32"):
        check_channels("samples", torch.Size(shape))


def test_noise_k_of_a_batch_is_the_noise_of_seed_plus_k():
    latents = torch.empty(3, 32, 4, 5)
    noise = noise_like(latents, 10)
    for k in range(3):
        assert torch.equal(noise[k : k + 1], noise_like(latents[:1], 10 + k))
    assert torch.equal(noise_like(latents[:2], 10, [2, 0]), noise[[2, 0]])
    assert not torch.equal(noise[0], noise[1])


def test_the_largest_seed_works_and_wraps():
    noise = noise_like(torch.empty(2, 32, 1, 1), 2**64 - 1)
    assert torch.equal(noise[1], noise_like(torch.empty(1, 32, 1, 1), 0)[0])
