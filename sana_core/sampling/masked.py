"""Sampling from an image's latents, all of them or where a mask says so, as ComfyUI does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .samplers import Denoiser


class InitImage(NamedTuple):
    """What sampling starts from: latents [1, 32, h, w] in the model's scale, and a mask of that shape, 1 where they are
    sampled again and 0 where they stay; without it, they are sampled again everywhere."""

    latents: torch.Tensor
    mask: torch.Tensor | None


def start_from_image(
    init: InitImage, model: Denoiser, noise: torch.Tensor, sigma: float
) -> tuple[Denoiser, torch.Tensor]:
    """Return `model` as it keeps what the mask keeps, and what it starts from at `sigma` with that `noise`.

    The operations of KSamplerX0Inpaint in ComfyUI's comfy/samplers.py in their order, for the same bits.
    """
    latents = init.latents.to(noise)

    def noised(sigma: float) -> torch.Tensor:
        return sigma * noise + (1.0 - sigma) * latents

    if init.mask is None:
        return model, noised(sigma)
    mask = init.mask.to(noise)
    kept = 1.0 - mask

    def masked(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return model(x * mask + noised(sigma) * kept, sigma) * mask + latents * kept

    return masked, noised(sigma)
