"""The shape of the latents of SANA-Video, whose two models have different ones."""

from __future__ import annotations

from typing import Any

from .checks import check_whole
from .errors import InputError
from .latents import check_side
from .released import LARGEST_FRAMES, VIDEOS


def video_shape(width: int, height: int, frames: int, config: Any) -> tuple[int, int, int, int]:
    """Return the latent shape [C, T, h, w] of a video for the SANA-Video transformer with `config`.

    Raises InputError for sides that are not of whole patches, from 32 to 16384 pixels, and for frames, up to 1025, that
    do not fill the last latent frame.
    """
    model = VIDEOS[config.in_channels]
    for field, pixels in (("width", width), ("height", height)):
        check_side(field, pixels, model.downscale * config.patch_size[1])
    check_whole("frames", frames, 1, LARGEST_FRAMES)
    latents, rest = divmod(int(frames) - 1, model.stride)
    if rest:
        raise InputError(
            f"frames: got {frames}, expected a multiple of {model.stride} and one more; "
            f"use {latents * model.stride + 1}"
        )
    return config.in_channels, latents + 1, int(height) // model.downscale, int(width) // model.downscale
