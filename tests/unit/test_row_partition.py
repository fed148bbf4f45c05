"""No band of a map is too large for torch. test_decode.py reads and writes maps in bands."""

import pytest
import torch

from sana_core.decode import row_partition
from sana_core.decode.row_partition import empty_partition


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
