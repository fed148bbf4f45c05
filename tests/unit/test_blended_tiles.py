"""The blended decode is the tiles' own decodes, faded into each other in a straight line where they overlap."""

import pytest
import torch
from decoders import noise

from sana_core import decode_latents
from sana_core.decode.run import Tiles

pytestmark = pytest.mark.usefixtures("one_thread")


def faded(first, second, overlap, dim):
    """Two pictures, the second one beginning `overlap` pixels before the first one ends."""
    share = (torch.arange(overlap) + 0.5) / overlap
    share = share[:, None] if dim == 2 else share
    ends, begins = first.narrow(dim, first.shape[dim] - overlap, overlap), second.narrow(dim, 0, overlap)
    between = (1 - share) * ends + share * begins
    before = first.narrow(dim, 0, first.shape[dim] - overlap)
    return torch.cat([before, between, second.narrow(dim, overlap, second.shape[dim] - overlap)], dim=dim)


@torch.no_grad()
def test_two_tiles_beside_and_below_each_other(bundled):
    for height, width, dim in ((3, 7, 3), (7, 3, 2)):
        latents = noise(2, 32, height, width)
        first, second = (bundled.decode(latents.narrow(dim, start, 4)).sample for start in (0, 3))
        got = decode_latents(bundled, latents, method="tiles", tiles=Tiles(128, 32))
        torch.testing.assert_close(got, faded(first, second, 32, dim), atol=1e-4, rtol=0)


@torch.no_grad()
def test_four_tiles_fade_into_each_other_both_ways(bundled):
    latents = noise(1, 32, 6, 6)
    tiles = [
        [bundled.decode(latents[:, :, top : top + 4, left : left + 4]).sample for left in (0, 2)] for top in (0, 2)
    ]
    rows = [faded(left, right, 64, 3) for left, right in tiles]
    got = decode_latents(bundled, latents, method="tiles", tiles=Tiles(128, 64))
    torch.testing.assert_close(got, faded(*rows, 64, 2), atol=1e-4, rtol=0)
