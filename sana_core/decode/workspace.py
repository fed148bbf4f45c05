"""The memory of a decode in strips, made once, and what of it each layer takes.

A map in a workspace has rows above its own for those that a layer carries, and below for the zeros beyond the image's
edge, so that a layer reads its window where the rows are. What a convolution returns is new memory, so it makes a piece
at a time, which is written where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

# elements that a convolution reads or makes at once on a CPU: few, since the allocator may keep what it makes
CPU_PIECE = 2**19
# rows of space below a map's own: zeros, and what comes from beyond the last strip
BELOW = 2
# of a convolution's weights, that oneDNN makes for a while
COPIES = 2


class Strip(NamedTuple):
    """Rows `top` to `top` + `size` of `map` [1, C, H, W], a view of one buffer of a workspace."""

    buffer: int
    map: torch.Tensor
    top: int
    size: int

    @property
    def rows(self) -> torch.Tensor:
        return self.map[:, :, self.top : self.top + self.size]


class WorkspaceSize(NamedTuple):
    """Elements of each buffer and of what is kept from strip to strip, and rows of a map above its own."""

    buffer: int
    kept: int
    above: int


class Workspace:
    """Memory that is made once: two buffers for maps with rows above their own and one below, and what layers keep.

    The attention's windows lie in it too, before there are strips.
    """

    def __init__(self, like: torch.Tensor, size: WorkspaceSize) -> None:
        self.memory, self.size, self.used = like.new_empty(2 * size.buffer + size.kept), size, 0
        self.piece = piece_elements(size.buffer, like.device.type != "cpu")

    def keep(self, channels: int, height: int, width: int) -> torch.Tensor:
        """Return a map [1, C, H, W] that stays until other layers begin, which set `used` to 0."""
        self.used, start = self.used + channels * height * width, 2 * self.size.buffer + self.used
        return self.memory[start:][: channels * height * width].view(1, height, width, channels).permute(0, 3, 1, 2)

    def map(self, channels: int, height: int, width: int, buffer: int = 0) -> torch.Tensor:
        """Return a map [1, C, H, W] that begins with `buffer`."""
        flat = self.memory[buffer * self.size.buffer : 2 * self.size.buffer][: height * width * channels]
        return flat.view(1, height, width, channels).permute(0, 3, 1, 2)

    def strip(self, buffer: int, channels: int, count: int, width: int) -> Strip:
        """Return a strip of `count` rows whose values are still to be written."""
        above = self.size.above
        return Strip(buffer, self.map(channels, above + count + 1, width, buffer), above, count)

    def beside(self, strip: Strip, channels: int, count: int, width: int) -> Strip:
        """Return a new strip in the other buffer than `strip`."""
        return self.strip(1 - strip.buffer, channels, count, width)

    def put(self, rows: torch.Tensor) -> Strip:
        """Return a strip with the values of `rows` [1, C, n, W]."""
        strip = self.strip(0, rows.shape[1], rows.shape[2], rows.shape[3])
        strip.rows.copy_(rows)
        return strip

    def pieces(self, total: int, row: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of pieces of `total` rows of `row` elements that a convolution reads or makes."""
        return chunks(total, max(1, self.piece // row))


def piece_elements(elements: int, accelerator: bool) -> int:
    """Return what a convolution reads or makes at once beside buffers of `elements`: much, to fill an accelerator."""
    return 2 * elements // 3 if accelerator else CPU_PIECE


class LayerShape(NamedTuple):
    """What a layer takes of memory, in elements of maps whose width is that of what goes in."""

    inner: int  # channels that go in
    outer: int  # and that come out
    made: int  # that its convolution makes, 0 without one
    scale: float = 1  # rows and columns that it makes of one
    carried: int = 0  # rows of `inner` channels that it keeps for the next strip
    interpolates: bool = False

    def largest_map(self, above: int, rows: int, width: int) -> int:
        """Return the larger one of its maps of a strip of `rows` rows."""
        out_rows, out_width = int(rows * self.scale), int(width * self.scale)
        return max(self.inner * (above + rows + BELOW) * width, self.outer * (above + out_rows + BELOW) * out_width)

    def passing(self, rows: int, width: int, piece: int, accelerator: bool) -> int:
        """Return what its convolution makes at once, and its weights as oneDNN reorders them."""
        weights = 0 if accelerator else COPIES * 9 * self.inner * self.made
        if self.interpolates:
            count = min(rows, interpolated_rows(2 * width * (self.inner + self.made), piece))
            return 2 * width * 2 * (self.inner * (count + 1) + self.made * count) + weights
        if self.scale < 1:
            # and what the shortcut is the mean of, with that
            rows, width, row = rows // 2, width // 2, 4 * self.inner * (width // 2)
            return (row + 2 * self.made * width) * min(rows, max(1, piece // row)) + weights
        return self.made * width * min(rows, max(1, piece // (self.made * width or 1))) + weights


def buffer_elements(shapes: Iterable[LayerShape], above: int, rows: int, width: int) -> int:
    """Return the elements of each buffer of a workspace for layers of these shapes, and strips of `rows` x `width`."""
    most = 0
    for shape in shapes:
        most = max(most, shape.largest_map(above, rows, width))
        rows, width = int(rows * shape.scale), int(width * shape.scale)
    return most


def interpolated_rows(row: int, piece: int) -> int:
    """Return how many rows are interpolated at once, beside one more, to rows of `row` elements with what is made of
    them."""
    return max(1, piece // (2 * row) - 1)


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive pieces of `size`, the last one smaller."""
    for start in range(0, total, size):
        yield start, min(start + size, total)
