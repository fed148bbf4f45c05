"""A map in bands of rows: on several devices, or on one device if a single tensor would be too large for kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .streaming import empty
from .workspace import chunks

# Many kernels count elements in 32 bits. For larger tensors torch falls back to kernels that need many times the
# memory.
LARGEST_TENSOR = 2**31


class RowPartition:
    """A map [B, C, height, width], cut into one or more `parts` [B, C, n, width].

    `full_height`: height of the image's map, if this one has only some of its rows.
    """

    def __init__(self, parts: list[torch.Tensor], full_height: int | None = None) -> None:
        self.parts, self.full_height = parts, full_height
        self.edges = [0]
        for part in parts:
            self.edges.append(self.edges[-1] + part.shape[2])

    @property
    def height(self) -> int:
        return self.edges[-1]

    @property
    def width(self) -> int:
        return self.parts[0].shape[3]

    def channels_last(self) -> RowPartition:
        return RowPartition([part.contiguous(memory_format=torch.channels_last) for part in self.parts])

    def slices(self, low: int, high: int) -> Iterator[torch.Tensor]:
        """Yield rows `low` to `high` as views of the parts that contain them."""
        for part, top, bottom in zip(self.parts, self.edges, self.edges[1:], strict=False):
            if max(low, top) < min(high, bottom):
                yield part[:, :, max(low, top) - top : min(high, bottom) - top]

    def rows(self, low: int, high: int, device: torch.device | None = None) -> torch.Tensor:
        """Return rows `low` to `high` on `device`, by default the device of the first row.

        The result is a view if a single part on that device contains all of them.
        """
        slices = list(self.slices(low, high))
        device = slices[0].device if device is None else device
        return slices[0].to(device) if len(slices) == 1 else torch.cat([part.to(device) for part in slices], dim=2)

    def moved(self, low: int, high: int, device: torch.device) -> RowPartition:
        """Return rows `low` to `high` on `device`, as a part of this map."""
        return RowPartition([part.to(device) for part in self.slices(low, high)], self.height)

    def read_into(self, values: torch.Tensor, top: int, left: int) -> None:
        """Copy the rectangle that begins at row `top` and column `left` into `values` [B, C, n, w]."""
        bottom, right, row = top + values.shape[2], left + values.shape[3], 0
        for part in self.slices(top, bottom):
            values[:, :, row : row + part.shape[2]] = part[..., left:right]
            row += part.shape[2]

    def write(self, top: int, left: int, values: torch.Tensor) -> None:
        """Write `values` [B, C, n, w] at row `top` and column `left`."""
        bottom, right = top + values.shape[2], left + values.shape[3]
        for target in self.slices(top, bottom):
            target[..., left:right] = values[:, :, : target.shape[2]]
            values = values[:, :, target.shape[2] :]


def empty_partition(like: torch.Tensor, channels: int, height: int, width: int) -> RowPartition:
    """Return an uninitialised map with the batch size of `like`. It has one part, unless that would be too large."""
    # Half of the limit, so that a part with its neighbours' rows is within it too.
    size = max(1, LARGEST_TENSOR // 2 // (len(like) * channels * width))
    if height * width * channels * len(like) < LARGEST_TENSOR:
        size = height
    return RowPartition([empty(like, channels, bottom - top, width) for top, bottom in chunks(height, size)])
