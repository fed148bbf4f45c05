"""The shape of the latents of SANA-Video, whose models have different ones."""

from __future__ import annotations

from ..errors import InputError
from ..model.known_models import LARGEST_FRAMES, VideoModel
from ..model.latents import check_side
from ..runtime.checks import check_whole


def video_shape(width: int, height: int, frames: int, model: VideoModel) -> tuple[int, int, int, int]:
    """Return the latent shape [C, T, h, w] of a video for the SANA-Video `model`.

    Raises InputError for sides that are not of whole patches, that the VAE cannot decode or that are above 16384
    pixels, and for frames, up to 1025, that do not fill the last latent frame.
    """
    for field, pixels in (("width", width), ("height", height)):
        check_side(field, pixels, model.downscale * model.patch, model.smallest)
    check_whole("frames", frames, 1, LARGEST_FRAMES)
    latents = round((frames - 1) / model.stride)
    nearest = latents * model.stride + 1
    if frames != nearest:
        raise InputError(f"frames: got {frames}, expected a multiple of {model.stride} and one more; use {nearest}")
    return model.channels, latents + 1, int(height) // model.downscale, int(width) // model.downscale


def check_first(model: VideoModel) -> None:
    """Raise InputError if videos of `model` cannot begin with an image."""
    if model.fixed:
        raise InputError(
            f"first_image: got one for {model.name}, which generates videos from text alone, expected none; remove it, "
            f"or use {model.name.removesuffix('-4step')}"
        )
