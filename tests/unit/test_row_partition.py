"""A map in bands of rows is read and written like one map."""

import pytest
import torch
from decoders import noise

from sana_core.decode import row_partition
from sana_core.decode.row_partition import RowPartition, empty_partition

HEIGHTS = [3, 1, 5, 2]
SPANS = [(low, high) for low in range(11) for high in range(low + 1, 12)]


def in_bands(whole):
    return RowPartition([part.clone() for part in whole.split(HEIGHTS, dim=2)])


def test_any_rows_of_the_bands_are_those_of_the_map():
    undivided = noise(2, 7, 11, 4)
    bands = in_bands(undivided)
    assert (bands.height, bands.width, bands.edges) == (11, 4, [0, 3, 4, 9, 11])
    for low, high in SPANS:
        assert torch.equal(bands.rows(low, high), undivided[:, :, low:high])
        moved = bands.moved(low, high, torch.device("cpu"))
        assert moved.height == high - low and torch.equal(moved.rows(0, moved.height), undivided[:, :, low:high])


def test_what_is_written_over_the_edges_of_bands_is_in_the_map():
    values = noise(2, 7, 11, 4, seed=1)
    for low, high in SPANS:
        for left, right in ((0, 4), (1, 3)):
            undivided = noise(2, 7, 11, 4)
            bands = in_bands(undivided)
            undivided[:, :, low:high, left:right] = values[:, :, : high - low, : right - left]
            bands.write(low, left, values[:, :, : high - low, : right - left])
            assert torch.equal(bands.rows(0, 11), undivided)


@pytest.mark.parametrize("limit", [64, 100, 640, 1000, 2**31])
def test_no_band_is_too_large_even_with_its_neighbours_rows(monkeypatch, limit):
    monkeypatch.setattr(row_partition, "LARGEST_TENSOR", limit)
    partition = empty_partition(torch.empty(2, 1, 1, 1), 4, 11, 3)
    assert (partition.height, partition.width) == (11, 3)
    assert {tuple(part.shape[:2]) for part in partition.parts} == {(2, 4)}
    if limit > 2 * 4 * 11 * 3:
        assert len(partition.parts) == 1
    else:
        row = 2 * 4 * 3
        assert max(part.numel() for part in partition.parts) <= max(limit / 2, row)
        # There are no more bands than necessary.
        assert len(partition.parts) <= -(-11 // max(1, limit // 2 // row))
