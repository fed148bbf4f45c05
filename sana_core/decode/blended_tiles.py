"""An alternative decode in blended tiles. It is not exact, because the attention of a tile ends at its edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..runtime.cancellation import Poll, Polled

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_dc import Decoder


def tile_starts(length: int, tile: int, overlap: int) -> list[int]:
    """Return the starts of tiles of the same size that cover `length` evenly and overlap by at least `overlap`."""
    if tile >= length:
        return [0]
    count = 1 + -(-(length - tile) // (tile - overlap))
    return [round(index * (length - tile) / (count - 1)) for index in range(count)]


def ramps(length: int, tile: int, starts: list[int]) -> torch.Tensor:
    """Return the weight [tiles, length] of each tile at each position: linear where tiles overlap, with a sum of 1."""
    position, begin = torch.arange(length).double() + 0.5, torch.tensor(starts).double()[:, None]
    weights = torch.minimum(position - begin, begin + tile - position).clamp(min=0)
    return (weights / weights.sum(0)).float()


def decode_tiles(
    decoder: Decoder, latents: torch.Tensor, tile: int, overlap: int, scale: int, poll: Poll
) -> Iterator[torch.Tensor]:
    """Yield the pixels [B, 3, n, scale * w] of `latents` [B, 32, h, w], top to bottom.

    `tile` and `overlap` are numbers of latent rows and columns. `scale`: pixels per latent.
    """
    height, width = latents.shape[2:]
    rows, columns = tile_starts(height, tile, overlap), tile_starts(width, tile, overlap)
    size = (min(tile, height), min(tile, width))
    down, across = (
        ramps(scale * length, scale * side, [scale * start for start in starts]).to(latents.device)
        for length, side, starts in ((height, size[0], rows), (width, size[1], columns))
    )
    band = torch.zeros(len(latents), 3, scale * size[0], scale * width, device=latents.device)
    for index, top in enumerate(rows):
        for column, left in enumerate(columns):
            with Polled(poll):
                pixels = decoder(latents[:, :, top : top + size[0], left : left + size[1]])
            y, x = slice(scale * top, scale * (top + size[0])), slice(scale * left, scale * (left + size[1]))
            band[:, :, :, x] += pixels * down[index, y, None] * across[column, x]
        finished = scale * ((rows[index + 1] if index + 1 < len(rows) else height) - top)
        yield band[:, :, :finished].to(latents.dtype)
        # Move the unfinished rows, which the next tiles overlap, to the top.
        band = torch.cat([band[:, :, finished:], torch.zeros_like(band[:, :, :finished])], dim=2)
