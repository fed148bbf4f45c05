"""Strips through local layers: every convolution carries its last rows to the next strip, so nothing is recomputed.

A layer takes the rows of one strip and returns those that they complete: a 3x3 convolution is always one row behind.
`join` puts the carried rows, or the zeros beyond the picture's edge, around the new ones; `compute` does the layer's
work on that window. Two steps, so that the caller can let go of the strip before the work begins.

All maps are channels-last in memory, as they are in diffusers once an attention block has made them so: the rows of a
strip are one piece of memory. On the CPU in fp32 the results are then those of the undivided layers bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.nn import functional

from ..runtime.cancellation import Poll
from . import fused

Block = Any  # a module of diffusers, whose types say nothing of its layers

# up to this many elements of input, torch convolves fp32 on the CPU without oneDNN (aten/native/Convolution.cpp)
SMALL_INPUT = 20480
# elements of one pass of a norm, few enough for a core's cache, since it passes over them eight times
CACHE_ELEMENTS = 2**17


class Layer(Protocol):
    def join(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        """Return `rows` [B, C, n, W] with the carried ones above, and zeros below if the picture ends there."""

    def compute(self, window: torch.Tensor, last: bool) -> torch.Tensor:
        """Return the rows that the window of `join` completes."""


def run(layers: list[Layer], rows: torch.Tensor, last: bool, poll: Poll) -> torch.Tensor:
    """Return what comes out of `layers` when `rows` go in. `poll` is called between layers; it cancels by raising."""
    for layer in layers:
        poll()
        rows = layer.join(rows, last)
        rows = layer.compute(rows, last)
    return rows


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive pieces of `size`, the last one smaller."""
    for start in range(0, total, size):
        yield start, min(start + size, total)


class Carry:
    """The last `overlap` rows of a convolution's input, and the rows of zeros `above` and `below` the picture."""

    def __init__(self, overlap: int = 2, above: int = 1, below: int = 1) -> None:
        self.overlap, self.zeros_above, self.zeros_below = overlap, above, below
        self.kept: Any = None

    def above(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what lies above `rows`, at a band's start nothing."""
        return zeros(rows, self.zeros_above) if self.kept is None else self.kept

    def keep(self, window: torch.Tensor) -> None:
        # a clone, since a view would keep all of the window
        self.kept = window[:, :, window.shape[2] - self.overlap :].clone()

    def room(self, like: torch.Tensor, count: int, width: int, last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a window like `join`'s for `count` rows that are not there yet, and the view that takes them."""
        above = self.above(empty(like, like.shape[1], 0, width))
        top = above.shape[2]
        below = self.zeros_below if last else 0
        window = empty(like, like.shape[1], top + count + below, width)
        window[:, :, :top] = above
        if below:
            window[:, :, top + count :] = 0
        return window, window[:, :, top : top + count]

    def join(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        parts = [self.above(rows), rows]
        if last:
            parts.append(zeros(rows, self.zeros_below))
        # an empty part would decide the memory format
        window = torch.cat([part for part in parts if part.shape[2]], dim=2)
        self.keep(window)
        return window


def zeros(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` rows of zeros, as wide as `rows`."""
    return empty(rows, rows.shape[1], count, rows.shape[3]).zero_()


def empty(like: torch.Tensor, channels: int, height: int, width: int) -> torch.Tensor:
    """Return an uninitialised map of as many pictures as `like`, channels-last."""
    shape = (len(like), channels, height, width)
    return torch.empty(shape, device=like.device, dtype=like.dtype, memory_format=torch.channels_last)


def convolve(conv: torch.nn.Conv2d, window: torch.Tensor, whole: int) -> torch.Tensor:
    """Return `conv` of a window whose rows are padded already; `whole` is the picture's size in elements of input."""
    padding = (0, int(conv.padding[1]))
    small, small_whole = window.numel() <= SMALL_INPUT, whole <= SMALL_INPUT
    if small != small_whole and window.device.type == "cpu" and window.dtype == torch.float32:
        # as the undivided picture would be convolved
        if small_whole:
            kernel = conv.weight.shape[2:]
            return torch.ops.aten.thnn_conv2d(window, conv.weight, kernel, conv.bias, conv.stride, padding)
        return torch.mkldnn_convolution(
            window, conv.weight, conv.bias, padding, conv.stride, conv.dilation, conv.groups
        )
    return functional.conv2d(window, conv.weight, conv.bias, conv.stride, padding, conv.dilation, conv.groups)


def norm_(
    x: torch.Tensor, norm: Any, residual: torch.Tensor | None = None, activation: torch.nn.Module | None = None
) -> torch.Tensor:
    """Normalise `x` [B, C, n, W] over its channels in place, add `residual`, activate, and return it.

    On the CPU the operations of diffusers' RMSNorm in their order, block by block while the block is in the cache.
    """
    if isinstance(norm, torch.nn.BatchNorm2d):
        x.copy_(norm(x))
        x = x if residual is None else x.add_(residual)
    elif x.device.type != "cpu":
        return fused.norm_(x, norm, residual, activation)
    else:
        norm_in_cache_(x, norm, residual)
    return x if activation is None else in_place(activation, x)


def norm_in_cache_(x: torch.Tensor, norm: Any, residual: torch.Tensor | None) -> None:
    channels, positions = x.shape[1], x.shape[2] * x.shape[3]
    step = max(1, CACHE_ELEMENTS // channels)
    for picture in range(len(x)):
        flat = x[picture].movedim(0, -1).view(positions, channels)
        added = None if residual is None else residual[picture].movedim(0, -1).view(positions, channels)
        for start, stop in chunks(positions, step):
            block = flat[start:stop]
            variance = block.float().pow(2).mean(-1, keepdim=True)
            block.mul_(variance.add_(norm.eps).rsqrt_()).mul_(norm.weight)
            if norm.bias is not None:
                block.add_(norm.bias)
            if added is not None:
                block.add_(added[start:stop])


class StreamedNorm:
    """A norm and an activation, in place."""

    def __init__(self, norm: Any, activation: torch.nn.Module) -> None:
        self.norm, self.activation = norm, activation

    def join(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        return rows

    def compute(self, window: torch.Tensor, last: bool) -> torch.Tensor:
        return norm_(window, self.norm, None, self.activation)


class StreamedConv:
    """A convolution that ends a decoder or begins an encoder."""

    def __init__(self, conv: torch.nn.Conv2d, size: tuple[int, int]) -> None:
        self.conv = conv
        self.whole = conv.in_channels * size[0] * size[1]
        self.carry = Carry()

    def join(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        return self.carry.join(rows, last)

    def compute(self, window: torch.Tensor, last: bool) -> torch.Tensor:
        return convolve(self.conv, window, self.whole)


class StreamedResBlock:
    """diffusers' ResBlock, two rows behind."""

    def __init__(self, block: Block, size: tuple[int, int]) -> None:
        self.block = block
        self.whole = block.conv1.in_channels * size[0] * size[1]
        self.carry, self.inner = Carry(), Carry()
        self.edge = 1

    def join(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        self.edge = 1 if self.carry.kept is None else 0
        return self.carry.join(rows, last)

    def compute(self, window: torch.Tensor, last: bool) -> torch.Tensor:
        hidden = self.first(window, last)
        out = convolve(self.block.conv2, hidden, self.whole)
        del hidden
        return norm_(out, self.block.norm, window[:, :, self.edge : self.edge + out.shape[2]])

    def first(self, window: torch.Tensor, last: bool) -> torch.Tensor:
        """Return the window of the second convolution."""
        conv, activation = self.block.conv1, self.block.nonlinearity
        if conv.bias is None or not fused.fuses(window, activation):
            return self.inner.join(in_place(activation, convolve(conv, window, self.whole)), last)
        hidden = functional.conv2d(window, conv.weight, None, conv.stride, (0, int(conv.padding[1])))
        # the bias, the activation and the way into the window are one pass
        inner, rows = self.inner.room(hidden, hidden.shape[2], hidden.shape[3], last)
        fused.bias_into(hidden, conv.bias, activation, rows)
        self.inner.keep(inner)
        return inner


class StreamedUpsample:
    """diffusers' DCUpBlock2d: twice the rows and columns, one row behind."""

    def __init__(self, block: Block, size: tuple[int, int]) -> None:
        self.block = block
        # the convolution sees the larger picture if it comes after the interpolation
        self.whole = block.conv.in_channels * size[0] * size[1] * (4 if block.interpolate else 1)
        self.carry = Carry()
        self.source: Any = None  # the rows that the shortcut still needs
        self.skip = 0  # how many rows of the shortcut of `source` are out already

    def join(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        first = self.carry.kept is None
        if self.block.shortcut:
            self.skip = 0 if first else self.behind
            self.source = rows if first else torch.cat([self.source, rows], dim=2)
        if not self.block.interpolate:
            return self.carry.join(rows, last)
        count, width = rows.shape[2:]
        window, inner = self.carry.room(rows, 2 * count, 2 * width, last)
        # the nearest of each pixel, written where the convolution reads it
        inner.unflatten(3, (width, 2)).unflatten(2, (count, 2)).copy_(rows[:, :, :, None, :, None])
        self.carry.keep(window)
        return window

    @property
    def behind(self) -> int:
        """Rows of the last row pair that are out: of an interpolated picture one, of a shuffled one none."""
        return 1 if self.block.interpolate else 0

    def compute(self, window: torch.Tensor, last: bool) -> torch.Tensor:
        out = convolve(self.block.conv, window, self.whole)
        if not self.block.interpolate:
            out = shuffle(out)
        if self.block.shortcut:
            self.add_shortcut(out)
            # a clone, since a view would keep all of it
            self.source = self.source[:, :, -1:].clone()
        return out

    def add_shortcut(self, out: torch.Tensor) -> None:
        """Add what repeat_interleave and pixel_shuffle make of `source`, without making it."""
        repeats = self.block.repeats
        for row in (0, 1):
            first = (row - self.skip) % 2
            target = out[:, :, first::2]
            begin = (first + self.skip) // 2
            for column in (0, 1):
                # channel c of the shuffle is channel (4 c + 2 row + column) // repeats of the source
                picked = self.source[:, (2 * row + column) // repeats :: 4 // repeats]
                target[..., column::2] += picked[:, :, begin : begin + target.shape[2]]


def shuffle(x: torch.Tensor) -> torch.Tensor:
    """Return pixel_shuffle of `x` [B, 4 C, n, W] by 2, channels-last; torch's own copies twice on accelerators."""
    count, channels, height, width = x.shape
    parts = x.permute(0, 2, 3, 1).view(count, height, width, channels // 4, 2, 2)
    return parts.permute(0, 1, 4, 2, 5, 3).reshape(count, 2 * height, 2 * width, channels // 4).permute(0, 3, 1, 2)


class StreamedDownsample:
    """diffusers' DCDownBlock2d: half the rows and columns."""

    def __init__(self, block: Block, size: tuple[int, int]) -> None:
        self.block = block
        self.whole = block.conv.in_channels * size[0] * size[1]
        self.kept: Any = None

    def join(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        parts = [zeros(rows, 1) if self.kept is None else self.kept, rows]
        if last and self.block.stride == 1:
            parts.append(zeros(rows, 1))
        window = torch.cat(parts, dim=2)
        # whole pairs of rows only: their window is the pair, the row above it, and one below for a stride of 1
        below = 1 if self.block.stride == 1 else 0
        used = (window.shape[2] - 1 - below) // 2 * 2 + 1 + below
        self.kept = window[:, :, used - 1 - below :].clone()
        return window[:, :, :used]

    def compute(self, window: torch.Tensor, last: bool) -> torch.Tensor:
        out = convolve(self.block.conv, window, self.whole)
        if self.block.downsample:
            out = functional.pixel_unshuffle(out, 2)
        if self.block.shortcut:
            pairs = window[:, :, 1 : 1 + 2 * out.shape[2]]
            out += functional.pixel_unshuffle(pairs, 2).unflatten(1, (-1, self.block.group_size)).mean(dim=2)
        return out


def in_place(activation: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return `activation` of `x`, in x's memory where that function has such a form."""
    if isinstance(activation, torch.nn.SiLU):
        return functional.silu(x, inplace=True)
    if isinstance(activation, torch.nn.ReLU):
        return functional.relu_(x)
    return activation(x)
