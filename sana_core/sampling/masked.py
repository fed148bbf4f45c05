"""Sampling from an image's latents, all of them or where a mask says so, as ComfyUI does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .samplers import Denoiser


class Under(NamedTuple):
    """What an image is drawn over: latents [1, 32, h, w] in the model's scale, and a mask of that shape, 1 where they
    are drawn again and 0 where they stay; without it, they are drawn again everywhere.
    """

    latents: torch.Tensor
    mask: torch.Tensor | None


def draw_over(under: Under, model: Denoiser, noise: torch.Tensor, sigma: torch.Tensor) -> tuple[Denoiser, torch.Tensor]:
    """Return `model` as it draws over those latents, and what it starts from at `sigma` with that `noise`.

    The operations of KSamplerX0Inpaint in ComfyUI's comfy/samplers.py in their order, for the same bits.
    """
    latents = under.latents.to(noise)

    def noised(sigma: torch.Tensor) -> torch.Tensor:
        return sigma * noise + (1.0 - sigma) * latents

    if under.mask is None:
        return model, noised(sigma)
    mask = under.mask.to(noise)
    kept = 1.0 - mask

    def masked(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return model(x * mask + noised(sigma) * kept, sigma) * mask + latents * kept

    return masked, noised(sigma)
