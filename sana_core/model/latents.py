"""The shape of SANA's latents, and the noise of a seed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import InputError
from ..runtime.checks import check_whole

CHANNELS = 32
DOWNSCALE = 32
LARGEST = 16384
LARGEST_BATCH = 4096


def check_side(field: str, pixels: int, step: int = DOWNSCALE, smallest: int = DOWNSCALE) -> None:
    """Raise InputError unless `pixels` is a multiple of `step`, 32 for images, from `smallest` to 16384."""
    if not (smallest <= pixels <= LARGEST and pixels % step == 0):
        # In this order NaN becomes the smallest side.
        nearest = round(min(LARGEST, max(smallest, pixels)) / step) * step
        raise InputError(
            f"{field}: got {pixels!r:.40}, expected a multiple of {step} from {smallest} to {LARGEST}; use {nearest}"
        )


def latent_shape(width: int, height: int, count: int) -> tuple[int, int, int, int]:
    """Return the latent shape [count, 32, height / 32, width / 32].

    Raises InputError for sides that are not multiples of 32 from 32 to 16384, and for a count not from 1 to 4096.
    """
    check_side("width", width)
    check_side("height", height)
    check_whole("batch_size", count, 1, LARGEST_BATCH)
    return (int(count), CHANNELS, int(height) // DOWNSCALE, int(width) // DOWNSCALE)


def check_channels(field: str, shape: torch.Size) -> None:
    """Raise InputError unless `shape` is [B, 32, h, w], with B, h and w above 0."""
    if len(shape) != 4 or shape[1] != CHANNELS or 0 in shape:
        raise InputError(
            f"{field}: got a latent of shape {list(shape)}, expected [batch, {CHANNELS}, height / {DOWNSCALE}, "
            f"width / {DOWNSCALE}]; use SANA Empty Latent, or encode with SANA's VAE"
        )


def check_patches(field: str, shape: torch.Size | tuple[int, ...], patch: int) -> None:
    """Raise InputError unless h and w of latents [B, 32, h, w] are multiples of the transformer's `patch`."""
    height, width = shape[2:]
    if height % patch or width % patch:
        raise InputError(
            f"{field}: got {DOWNSCALE * width} x {DOWNSCALE * height}, expected multiples of {DOWNSCALE * patch} for a "
            f"model of patches of {patch} cells; change the size"
        )


def noise_stream(latents: torch.Tensor, seed: int, indices: list[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield float32 noise in the shape of `latents` on the CPU, without end.

    The noise of image k comes from seed + k (or seed + indices[k]), and does not depend on the batch size.
    """
    indices = list(range(len(latents))) if indices is None else indices
    generators = [torch.Generator().manual_seed((int(seed) + index) % 2**64) for index in indices]
    while True:
        yield torch.stack([torch.randn(latents.shape[1:], generator=generator) for generator in generators])
