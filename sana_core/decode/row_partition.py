"""A map in bands of rows: on several devices, or on one where a single tensor would be too large for its kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .streaming import empty
from .workspace import chunks

# many kernels count elements in 32 bits, and fall back to ones that need many times the memory
LARGEST_TENSOR = 2**31


class RowPartition:
    """A map [B, C, height, width], cut into one or more `parts` [B, C, n, width]; of `whole` rows if it is a part."""

    def __init__(self, parts: list[torch.Tensor], whole: int | None = None) -> None:
        self.parts, self.whole = parts, whole
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
        """Yield rows `low` to `high` as views of the parts that have them."""
        for part, top, bottom in zip(self.parts, self.edges, self.edges[1:], strict=False):
            if max(low, top) < min(high, bottom):
                yield part[:, :, max(low, top) - top : min(high, bottom) - top]

    def rows(self, low: int, high: int, device: torch.device | None = None) -> torch.Tensor:
        """Return rows `low` to `high` on `device`, the first one's without it; a view where one part has them all."""
        found = list(self.slices(low, high))
        device = found[0].device if device is None else device
        return found[0].to(device) if len(found) == 1 else torch.cat([part.to(device) for part in found], dim=2)

    def moved(self, low: int, high: int, device: torch.device) -> RowPartition:
        """Return rows `low` to `high` on `device`."""
        return RowPartition([part.to(device) for part in self.slices(low, high)], self.height)

    def read_into(self, values: torch.Tensor, top: int, left: int) -> None:
        """Copy the map from row `top` and column `left` on into `values` [B, C, n, w]."""
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
    """Return an uninitialised map of as many images as `like`, in one part unless that would be too large."""
    # half of what a tensor may have, so that a part with its neighbours' rows is one too
    size = max(1, LARGEST_TENSOR // 2 // (len(like) * channels * width))
    if height * width * channels * len(like) < LARGEST_TENSOR:
        size = height
    return RowPartition([empty(like, channels, bottom - top, width) for top, bottom in chunks(height, size)])
