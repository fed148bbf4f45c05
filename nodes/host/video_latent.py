"""The LATENT of a video: its size, and the image that it begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import comfy.model_management
import comfy.utils
import torch

from ...sana_core.errors import InputError
from ...sana_core.model.latents import LARGEST_BATCH
from ...sana_core.runtime.checks import check_whole
from ...sana_core.video.latents import video_shape
from .guidance import require_sana
from .video_model import SanaVideoModel

if TYPE_CHECKING:
    import comfy.sd
    from comfy.model_patcher import ModelPatcher


def video_latent(
    model: ModelPatcher,
    size: tuple[int, int],
    frames: int,
    batch_size: int,
    vae: comfy.sd.VAE | None = None,
    first_image: torch.Tensor | None = None,
) -> dict:
    """Return a LATENT for `batch_size` videos of `size`, (width, height) in pixels, and so many `frames`.

    With `first_image`, an IMAGE, and `vae`, it holds that as its first frame, which its noise mask keeps. Raises
    InputError for a model that is not SANA-Video, for sizes that it does not have, and for an image without its VAE.
    """
    base = require_sana(model.model)
    if not isinstance(base, SanaVideoModel):
        raise InputError("model: got one of images, expected SANA-Video; use SANA Empty Latent for an image")
    check_whole("batch_size", batch_size, 1, LARGEST_BATCH)
    shape = video_shape(*size, frames, base.latent_format.latent_channels)
    device, dtype = comfy.model_management.intermediate_device(), comfy.model_management.intermediate_dtype()
    samples = torch.zeros((int(batch_size), *shape), device=device, dtype=dtype)
    if first_image is None:
        return {"samples": samples, "downscale_ratio_spacial": base.facts.downscale}
    given = encode_first(vae, first_image, size, shape[0]).to(samples)
    # what the samplers take for empty
    samples = base.latent_format.process_out(samples)
    samples[:, :, :1] = given
    mask = torch.ones((len(samples), 1, shape[1], 1, 1), device=device)
    mask[:, :, 0] = 0
    return {"samples": samples, "noise_mask": mask}


def encode_first(vae: comfy.sd.VAE | None, image: torch.Tensor, size: tuple[int, int], channels: int) -> torch.Tensor:
    """Return the latent [1, C, 1, h, w] of the first of `image` [B, H, W, 3], cut and scaled to `size`."""
    if vae is None:
        raise InputError("first_image: got one without a VAE, which encodes it; connect the VAE of SANA Loader")
    if vae.latent_channels != channels:
        raise InputError(
            f"vae: got one of {vae.latent_channels} channels, expected {channels}; use the VAE of the SANA-Video model"
        )
    pixels = comfy.utils.common_upscale(image[:1, :, :, :3].movedim(-1, 1), *size, "lanczos", "center")
    return vae.encode(pixels.movedim(1, -1))
