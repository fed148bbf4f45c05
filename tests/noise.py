"""The noise that pictures start from."""

import torch

from sana_core.model.latents import noise_stream


def noise_like(latents: torch.Tensor, seed: int, indices: list[int] | None = None) -> torch.Tensor:
    """Return the noise that pictures start from: the first of `noise_stream`."""
    return next(noise_stream(latents, seed, indices))
