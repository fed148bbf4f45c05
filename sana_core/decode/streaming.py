"""The local layers in strips: every convolution carries its last rows to the next strip, so nothing is recomputed.

A layer receives the rows of one strip and returns the output rows that it can complete with them. A 3x3 convolution is
therefore always one row behind. Strips are views of a `Workspace`. A residual block works in place: its output
overwrites the input rows that it was added to. It starts two rows higher if it includes rows of the previous strip.

All maps are channels-last in memory, so the rows of a strip are contiguous. In diffusers they are channels-last too,
from the first attention block on. On the CPU in fp32 the results are bit-identical to the undivided layers.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn import functional

from ..runtime.cancellation import Poll
from . import fused
from .workspace import LayerShape, Strip, Workspace, chunks, interpolated_rows

Block = Any  # a module of diffusers, whose annotations do not include its layers

# Up to this many elements of input, torch convolves fp32 on the CPU without oneDNN (aten/native/Convolution.cpp).
SMALL_INPUT = 20480
# Elements that a norm processes at a time. They fit into a core's cache, because the norm passes over them eight times.
CACHE_ELEMENTS = 2**17


class Layer(Protocol):
    shape: LayerShape

    def __call__(self, strip: Strip, last: bool, workspace: Workspace) -> Strip:
        """Return the output rows that `strip` completes: perhaps none at first, and all that remain if it is `last`."""

    def completes(self, count: int) -> int:
        """Return the number of output rows if the last strip has `count` rows."""


def run(layers: list[Layer], strip: Strip, last: bool, workspace: Workspace, poll: Poll) -> Strip:
    """Run `strip` through `layers`. `poll` is called before each layer and cancels by raising."""
    for layer in layers:
        poll()
        strip = layer(strip, last, workspace)
        if not strip.size:
            break
    return strip


class Carry:
    """The last `overlap` rows of a layer's input, and the numbers of zero rows `above` and `below` the image."""

    def __init__(self, overlap: int = 2, above: int = 1, below: int = 1) -> None:
        self.overlap, self.zeros_above, self.zeros_below = overlap, above, below
        self.carried: Any = None

    @property
    def above(self) -> int:
        """Number of rows above the new rows in the next window."""
        return self.zeros_above if self.carried is None else self.overlap

    def window(self, full_map: torch.Tensor, top: int, count: int, last: bool, workspace: Workspace) -> torch.Tensor:
        """Return `count` rows of `full_map` from row `top` on, with the rows around them.

        The carried rows are written above them, or zeros at the top of the image. After the last strip, zeros are
        written below.
        """
        low, high = top - self.above, top + count
        if self.carried is None:
            full_map[:, :, low:top] = 0
            self.carried = workspace.keep(full_map.shape[1], self.overlap, full_map.shape[3])
        else:
            full_map[:, :, low:top] = self.carried
        if last:
            full_map[:, :, high : high + self.zeros_below] = 0
            high += self.zeros_below
        self.carried.copy_(full_map[:, :, high - self.overlap : high])
        return full_map[:, :, low:high]


def empty(like: torch.Tensor, channels: int, height: int, width: int) -> torch.Tensor:
    """Return an uninitialised channels-last map with the batch size of `like`."""
    shape = (len(like), channels, height, width)
    return torch.empty(shape, device=like.device, dtype=like.dtype, memory_format=torch.channels_last)


def convolve(conv: torch.nn.Conv2d, window: torch.Tensor, input_elements: int) -> torch.Tensor:
    """Return `conv` of a window that includes its padding rows. `input_elements`: size of the undivided input."""
    padding = (0, int(conv.padding[1]))
    small_window, small_input = window.numel() <= SMALL_INPUT, input_elements <= SMALL_INPUT
    if small_window != small_input and window.device.type == "cpu" and window.dtype == torch.float32:
        # Use the kernel that torch chooses for the undivided input.
        if small_input:
            kernel = conv.weight.shape[2:]
            return torch.ops.aten.thnn_conv2d(window, conv.weight, kernel, conv.bias, conv.stride, padding)
        return torch.mkldnn_convolution(
            window, conv.weight, conv.bias, padding, conv.stride, conv.dilation, conv.groups
        )
    return functional.conv2d(window, conv.weight, conv.bias, conv.stride, padding, conv.dilation, conv.groups)


def norm_into(
    out: torch.Tensor,
    x: torch.Tensor,
    norm: Any,
    residual: torch.Tensor | None = None,
    activation: torch.nn.Module | None = None,
) -> None:
    """Write activation(norm(`x`) + `residual`) into `out`. `x` [1, C, n, W] is overwritten.

    `out` may be `x` or `residual`. On the CPU, the operations and their order are as in diffusers' RMSNorm.
    """
    if x.device.type != "cpu" and not isinstance(norm, torch.nn.BatchNorm2d):
        fused.norm_into(out, x, norm, residual, activation)
        return
    if isinstance(norm, torch.nn.BatchNorm2d):
        out.copy_(norm(x) if residual is None else norm(x).add_(residual))
    else:
        norm_in_cache(out, x, norm, residual)
    if activation is not None:
        activate_into(out, out, activation)


def norm_in_cache(out: torch.Tensor, x: torch.Tensor, norm: Any, residual: torch.Tensor | None) -> None:
    """Normalise block by block, so that each block stays in the cache."""
    rows, target = fused.flat(x[0]), fused.flat(out[0])
    added = None if residual is None else fused.flat(residual[0])
    for start, stop in chunks(len(rows), max(1, CACHE_ELEMENTS // rows.shape[1])):
        block, written = rows[start:stop], target[start:stop]
        variance = block.float().pow(2).mean(-1, keepdim=True)
        block.mul_(variance.add_(norm.eps).rsqrt_()).mul_(norm.weight)
        if norm.bias is not None:
            block.add_(norm.bias)
        if added is not None:
            torch.add(block, added[start:stop], out=written)
        elif out is not x:
            written.copy_(block)


def activate_into(out: torch.Tensor, x: torch.Tensor, activation: torch.nn.Module) -> None:
    """Write `activation` of `x` into `out`, which may be x."""
    if isinstance(activation, torch.nn.SiLU):
        torch.ops.aten.silu.out(x, out=out)
    elif isinstance(activation, torch.nn.ReLU):
        torch.clamp_min(x, 0, out=out)
    else:
        out.copy_(activation(x))


class StreamedNorm:
    """A norm and an activation, in place."""

    def __init__(self, norm: Any, activation: torch.nn.Module, channels: int) -> None:
        self.norm, self.activation = norm, activation
        self.shape = LayerShape(channels, channels, 0)

    def __call__(self, strip: Strip, last: bool, workspace: Workspace) -> Strip:
        rows = strip.rows
        norm_into(rows, rows, self.norm, None, self.activation)
        return strip

    def completes(self, count: int) -> int:
        return count


class StreamedConv:
    """A convolution that ends a decoder or begins an encoder, one row behind."""

    def __init__(self, conv: torch.nn.Conv2d, size: tuple[int, int]) -> None:
        self.conv = conv
        self.shape = LayerShape(conv.in_channels, conv.out_channels, conv.out_channels, carried=2)
        self.input_elements = conv.in_channels * size[0] * size[1]
        self.carry = Carry()

    def __call__(self, strip: Strip, last: bool, workspace: Workspace) -> Strip:
        window = self.carry.window(strip.map, strip.top, strip.size, last, workspace)
        count, width, channels = max(0, window.shape[2] - 2), window.shape[3], self.conv.out_channels
        out = workspace.beside(strip, channels, count, width)
        for start, stop in workspace.pieces(count, channels * width):
            out.rows[:, :, start:stop] = convolve(self.conv, window[:, :, start : stop + 2], self.input_elements)
        return out

    def completes(self, count: int) -> int:
        return count + self.carry.above - 1


class StreamedResBlock:
    """diffusers' ResBlock, two rows behind, in place."""

    def __init__(self, block: Block, size: tuple[int, int]) -> None:
        self.block = block
        channels = block.conv1.in_channels
        self.shape = LayerShape(channels, channels, channels, carried=4)
        self.input_elements = channels * size[0] * size[1]
        self.carry, self.inner = Carry(), Carry()

    def __call__(self, strip: Strip, last: bool, workspace: Workspace) -> Strip:
        above = self.carry.above
        window = self.carry.window(strip.map, strip.top, strip.size, last, workspace)
        channels, width = window.shape[1], window.shape[3]
        hidden = workspace.beside(strip, channels, max(0, window.shape[2] - 2), width)
        if not hidden.size:
            return strip._replace(size=0)
        for start, stop in workspace.pieces(hidden.size, channels * width):
            self.first(window[:, :, start : stop + 2], hidden.rows[:, :, start:stop])
        # The first output row is added to this row.
        top = strip.top - (above - 1) - (self.inner.above - 1)
        window = self.inner.window(hidden.map, hidden.top, hidden.size, last, workspace)
        out = Strip(strip.buffer, strip.map, top, max(0, window.shape[2] - 2))
        for start, stop in workspace.pieces(out.size, channels * width):
            x = convolve(self.block.conv2, window[:, :, start : stop + 2], self.input_elements)
            rows = out.rows[:, :, start:stop]
            norm_into(rows, x, self.block.norm, rows)
            # Free it before the next piece is allocated.
            del x
        return out

    def first(self, window: torch.Tensor, out: torch.Tensor) -> None:
        """Write the first convolution of `window`, activated, into `out`."""
        conv, activation = self.block.conv1, self.block.nonlinearity
        if conv.bias is None or not fused.fuses(window, activation):
            activate_into(out, convolve(conv, window, self.input_elements), activation)
            return
        hidden = functional.conv2d(window, conv.weight, None, conv.stride, (0, int(conv.padding[1])))
        fused.bias_into(hidden, conv.bias, activation, out)

    def completes(self, count: int) -> int:
        return count + self.carry.above + self.inner.above - 2


class StreamedUpsample:
    """diffusers' DCUpBlock2d: twice the rows and columns, one row behind."""

    def __init__(self, block: Block, size: tuple[int, int]) -> None:
        self.block = block
        inner, conv_channels, interpolates = block.conv.in_channels, block.conv.out_channels, block.interpolate
        outer = conv_channels if interpolates else conv_channels // 4
        self.shape = LayerShape(inner, outer, conv_channels, 2, 1 if interpolates else 2, interpolates)
        # If the convolution comes after the interpolation, its input has four times the size.
        self.input_elements = block.conv.in_channels * size[0] * size[1] * (4 if block.interpolate else 1)
        # With interpolation, a row depends on one neighbouring row. With pixel_shuffle, it depends on two.
        self.carry = Carry(1) if block.interpolate else Carry()

    def __call__(self, strip: Strip, last: bool, workspace: Workspace) -> Strip:
        first = self.carry.carried is None
        window = self.carry.window(strip.map, strip.top, strip.size, last, workspace)
        width, conv = window.shape[3], self.block.conv
        if self.block.interpolate:
            count = 2 * (window.shape[2] - 1) - first - last
            out = workspace.beside(strip, conv.out_channels, count, 2 * width)
            self.interpolate(window, out.rows, first, last, workspace.piece)
            return out
        count = max(0, window.shape[2] - 2)
        out = workspace.beside(strip, self.shape.outer, 2 * count, 2 * width)
        for start, stop in workspace.pieces(count, conv.out_channels * width):
            x = convolve(conv, window[:, :, start : stop + 2], self.input_elements)
            rows = out.rows[:, :, 2 * start : 2 * stop]
            # pixel_shuffle, straight into the workspace.
            split = rows.unflatten(3, (width, 2)).unflatten(2, (stop - start, 2)).permute(0, 1, 3, 5, 2, 4)
            split.copy_(x.unflatten(1, (-1, 2, 2)))
            del x
            if self.block.shortcut:
                self.add_shortcut(rows, rows, window[:, :, start + 1 : stop + 1], 0)
        return out

    def interpolate(self, window: torch.Tensor, out: torch.Tensor, first: bool, last: bool, piece: int) -> None:
        """Double the rows and columns of `window`, and write their convolution into `out`."""
        channels, width = window.shape[1], window.shape[3]
        total, row = window.shape[2] - 1, 2 * width * (channels + self.block.conv.out_channels)
        for start, stop in chunks(total, interpolated_rows(row, piece)):
            count = stop + 1 - start
            doubled = empty(window, channels, 2 * count, 2 * width)
            rows = window[:, :, start : stop + 1, None, :, None]
            doubled.unflatten(3, (width, 2)).unflatten(2, (count, 2)).copy_(rows)
            # Beyond the image's edge, the doubled map has only one row of zeros. Skip the second one.
            skipped = int(first and start == 0)
            doubled_rows = doubled[:, :, skipped : 2 * count - int(last and stop == total)]
            x = convolve(self.block.conv, doubled_rows, self.input_elements)
            top = 2 * start - int(first) + skipped
            target = out[:, :, top : top + x.shape[2]]
            if self.block.shortcut:
                # Unless a row was skipped, the output begins with the second row of a pair.
                self.add_shortcut(target, x, window[:, :, start + skipped : stop + 1], 1 - skipped)
            else:
                target.copy_(x)
            del doubled, doubled_rows, x

    def add_shortcut(self, out: torch.Tensor, x: torch.Tensor, source: torch.Tensor, skip: int) -> None:
        """Write `x` + shortcut into `out`.

        The shortcut is repeat_interleave and pixel_shuffle of `source`, without its first `skip` rows.
        """
        repeats, width = self.block.repeats, source.shape[3]
        for row in (0, 1):
            first = (row - skip) % 2
            target, added = (rows[:, :, first::2].unflatten(3, (width, 2)) for rows in (out, x))
            begin = (first + skip) // 2
            # Channel c of the shortcut is channel (4 c + 2 row + column) // repeats of the source.
            for columns in (slice(0, 1), slice(1, 2)) if repeats == 1 else (slice(0, 2),):
                channel = (2 * row + columns.start) // repeats
                picked = source[:, channel :: 4 // repeats, begin : begin + target.shape[2], :, None]
                torch.add(added[..., columns], picked, out=target[..., columns])

    def completes(self, count: int) -> int:
        if self.block.interpolate:
            return 2 * count + int(self.carry.carried is not None)
        return 2 * (count + self.carry.above - 1)


class StreamedDownsample:
    """diffusers' DCDownBlock2d: half the rows and columns."""

    def __init__(self, block: Block, size: tuple[int, int]) -> None:
        self.block = block
        inner, conv_channels = block.conv.in_channels, block.conv.out_channels
        self.shape = LayerShape(inner, conv_channels * (4 if block.downsample else 1), conv_channels, 0.5, 3)
        self.input_elements = inner * size[0] * size[1]
        self.carried: Any = None

    def __call__(self, strip: Strip, last: bool, workspace: Workspace) -> Strip:
        # Only complete pairs of rows are processed. Their window is the pair and the row above it, and with a stride of
        # 1 also the row below.
        below = 1 if self.block.stride == 1 else 0
        above = 1 if self.carried is None else self.carried.shape[2]
        low, high = strip.top - above, strip.top + strip.size
        strip.map[:, :, low : strip.top] = 0 if self.carried is None else self.carried
        if last and below:
            strip.map[:, :, high] = 0
            high += 1
        count = max(0, high - low - 1 - below) // 2
        window = strip.map[:, :, low : low + 2 * count + 1 + below]
        self.carried = strip.map[:, :, low + 2 * count : high].clone()
        conv, width = self.block.conv, window.shape[3] // 2
        out = workspace.beside(strip, self.shape.outer, count, width)
        for start, stop in workspace.pieces(count, 4 * window.shape[1] * width):
            x = convolve(conv, window[:, :, 2 * start : 2 * stop + 1 + below], self.input_elements)
            if self.block.downsample:
                x = functional.pixel_unshuffle(x, 2)
            if self.block.shortcut:
                pairs = window[:, :, 1 + 2 * start : 1 + 2 * stop]
                x += functional.pixel_unshuffle(pairs, 2).unflatten(1, (-1, self.block.group_size)).mean(dim=2)
            out.rows[:, :, start:stop] = x
            del x
        return out

    def completes(self, count: int) -> int:
        return (count + (0 if self.carried is None else self.carried.shape[2] - 1)) // 2
