"""Sampling that starts from the latents of an image, with or without a mask, as in ComfyUI."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .samplers import Denoiser


class InitImage(NamedTuple):
    """The image that sampling starts from."""

    # [1, 32, h, w], in the model's scale.
    latents: torch.Tensor
    # Same shape: 1 where the latents are sampled again, 0 where they are preserved. None: sample everything again.
    mask: torch.Tensor | None


def start_from_image(
    init: InitImage, model: Denoiser, noise: torch.Tensor, sigma: float
) -> tuple[Denoiser, torch.Tensor]:
    """Wrap `model` to preserve the latents outside the mask. Returns it, and the noisy latents at `sigma`.

    It is bit-identical to KSamplerX0Inpaint in ComfyUI's comfy/samplers.py: the same operations in the same order.
    """
    latents = init.latents.to(noise)

    def noised(sigma: float) -> torch.Tensor:
        return sigma * noise + (1.0 - sigma) * latents

    if init.mask is None:
        return model, noised(sigma)
    mask = init.mask.to(noise)
    preserved = 1.0 - mask

    def masked(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return model(x * mask + noised(sigma) * preserved, sigma) * mask + latents * preserved

    return masked, noised(sigma)
