"""The undivided decode and encode of DC-AE."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..latents import check_channels

if TYPE_CHECKING:
    from diffusers import AutoencoderDC


def decode_latents(autoencoder: AutoencoderDC, latents: torch.Tensor) -> torch.Tensor:
    """Return pictures [B, 3, 32 h, 32 w], about [-1, 1], of `latents` [B, 32, h, w] in the autoencoder's own scale.

    Raises ValueError for a latent of other channels.
    """
    check_channels("samples", latents.shape)
    return autoencoder.decoder(latents)


def encode_images(autoencoder: AutoencoderDC, images: torch.Tensor) -> torch.Tensor:
    """Return latents [B, 32, H / 32, W / 32] in the autoencoder's own scale of `images` [B, 3, H, W] in [-1, 1]."""
    return autoencoder.encoder(images)
