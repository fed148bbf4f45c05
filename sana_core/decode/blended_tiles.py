"""The blended decode in overlapping tiles, for those who want it: not exact, since every tile has its own attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..runtime.cancellation import Poll, Polled

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_dc import Decoder


def tile_starts(length: int, tile: int, overlap: int) -> list[int]:
    """Return where tiles begin that cover `length` evenly: all of one size, overlapping by `overlap` or more."""
    if tile >= length:
        return [0]
    count = 1 + -(-(length - tile) // (tile - overlap))
    return [round(index * (length - tile) / (count - 1)) for index in range(count)]


def ramps(length: int, tile: int, starts: list[int]) -> torch.Tensor:
    """Return the weight [tiles, length] of each tile at each place: linear where tiles overlap, 1 in all."""
    place, begin = torch.arange(length).double() + 0.5, torch.tensor(starts).double()[:, None]
    weights = torch.minimum(place - begin, begin + tile - place).clamp(min=0)
    return (weights / weights.sum(0)).float()


def decode_tiles(
    decoder: Decoder, latents: torch.Tensor, tile: int, overlap: int, scale: int, poll: Poll
) -> Iterator[torch.Tensor]:
    """Yield the pixels [B, 3, n, scale * w] of `latents` [B, 32, h, w], top to bottom.

    `tile` and `overlap` count rows and columns of latents; `scale` is pixels for one of them.
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
        for place, left in enumerate(columns):
            with Polled(poll):
                pixels = decoder(latents[:, :, top : top + size[0], left : left + size[1]])
            y, x = slice(scale * top, scale * (top + size[0])), slice(scale * left, scale * (left + size[1]))
            band[:, :, :, x] += pixels * down[index, y, None] * across[place, x]
        done = scale * ((rows[index + 1] if index + 1 < len(rows) else height) - top)
        yield band[:, :, :done].to(latents.dtype)
        # what the next tiles add to moves up
        band = torch.cat([band[:, :, done:], torch.zeros_like(band[:, :, :done])], dim=2)
