"""The middle of a gated feed-forward in one kernel: SiLU, the depthwise 3x3 convolution, its bias, and the gate.

Importing this file imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .support import CHANNELS, COLUMNS, divide_rows, launch


@triton.jit
def silu(x, fast: tl.constexpr):
    """Return silu(x) in float32. With `fast`, skip the guards that libdevice adds for denormal numbers."""
    x = x.to(tl.float32)
    if fast:
        return tl.extra.cuda.libdevice.fast_dividef(x, 1 + tl.extra.cuda.libdevice.fast_expf(-x))
    return x * tl.sigmoid(x)


@triton.jit
def load_weights(weight, channel, valid):
    """Return the nine weights of each channel from `weight` [C, 3, 3], in the order of memory."""
    weights = ()
    for i in tl.static_range(9):
        weights = weights + (tl.load(weight + channel * 9 + i, mask=valid, other=0.0),)
    return weights


@triton.jit
def load_row(row, inside, first, columns, stride, count: tl.constexpr):
    """Return `count` columns of one input row from column `first` on. Columns outside the image are zero."""
    values = ()
    for i in tl.static_range(count):
        column = first + i
        mask = inside & (column >= 0) & (column < columns)
        values = values + (tl.load(row + column * stride, mask=mask, other=0.0),)
    return values


@triton.jit
def zeros(count: tl.constexpr, width: tl.constexpr):
    sums = ()
    for _ in tl.static_range(count):
        sums = sums + (tl.zeros((width,), tl.float32),)
    return sums


@triton.jit
def convolve_row(row, weights, above, beside, bias, count: tl.constexpr, fast: tl.constexpr):
    """Add one input row to the three output rows that it touches.

    `above` is the unfinished sum of the output row above the input row. `beside` is the unfinished sum of the output
    row at the same height. Returns the finished row above, then `above` and `beside` for the next input row.
    """
    activated = ()
    for i in tl.static_range(count + 2):
        activated = activated + (silu(row[i], fast),)
    w = ()
    for i in tl.static_range(9):
        w = w + (weights[i].to(tl.float32),)
    finished = ()
    next_above = ()
    next_beside = ()
    for i in tl.static_range(count):
        west, center, east = activated[i], activated[i + 1], activated[i + 2]
        # The output row above reads this input row with the last row of the 3x3, the output row below with the first.
        finished = finished + (above[i] + west * w[6] + center * w[7] + east * w[8] + bias,)
        next_above = next_above + (beside[i] + west * w[3] + center * w[4] + east * w[5],)
        next_beside = next_beside + (west * w[0] + center * w[1] + east * w[2],)
    return finished, next_above, next_beside


@triton.jit
def gated_depthwise(
    x,
    weight,
    bias,
    out,
    rows_in,
    rows_out,
    columns,
    channels,
    begin,
    bands,
    band_rows,
    count: tl.constexpr,
    width: tl.constexpr,
    fast: tl.constexpr,
):
    image, band = tl.program_id(0) // bands, tl.program_id(0) % bands
    first = tl.program_id(1) * count
    channel = tl.program_id(2) * width + tl.arange(0, width)
    valid = channel < channels
    stride = 2 * channels
    x += image.to(tl.int64) * rows_in * columns * stride
    out += image.to(tl.int64) * rows_out * columns * channels
    value_weights = load_weights(weight, channel, valid)
    gate_weights = load_weights(weight + channels * 9, channel, valid)
    value_bias = 0.0
    gate_bias = 0.0
    if bias is not None:
        value_bias = tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
        gate_bias = tl.load(bias + channels + channel, mask=valid, other=0.0).to(tl.float32)
    value_above = zeros(count, width)
    value_beside = zeros(count, width)
    gate_above = zeros(count, width)
    gate_beside = zeros(count, width)
    top = band * band_rows
    for step in range(tl.minimum(band_rows, rows_out - top) + 2):
        # Input row target + 1 finishes output row `target`. The first two steps only fill the sums.
        target = (top + step - 2).to(tl.int64)
        row = target + 1 + begin
        inside = valid & (row >= 0) & (row < rows_in)
        source = x + row * columns * stride + channel
        values = load_row(source, inside, first - 1, columns, stride, count + 2)
        gates = load_row(source + channels, inside, first - 1, columns, stride, count + 2)
        value, value_above, value_beside = convolve_row(
            values, value_weights, value_above, value_beside, value_bias, count, fast
        )
        gate, gate_above, gate_beside = convolve_row(
            gates, gate_weights, gate_above, gate_beside, gate_bias, count, fast
        )
        outputs = out + target * columns * channels + channel
        written = valid & (step >= 2)
        for i in tl.static_range(count):
            mask = written & (first + i < columns)
            tl.store(outputs + (first + i) * channels, value[i] * silu(gate[i], fast), mask=mask)


def silu_depthwise_gate(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, edges: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Return value * silu(gate) [B, n, W, C], where (value, gate) is the depthwise 3x3 convolution of silu(`x`).

    `x` [B, h, W, 2 C] and `weight` [2 C, 1, 3, 3] are contiguous. `edges` are the numbers of rows, 0 or 1, at the top
    and at the bottom of `x` that are only read: the output has h - sum(edges) rows. Where there is no such row, and to
    the left and right of the image, the convolution reads zeros. The result of a row does not depend on the batch.
    """
    batch, rows_in, columns, width = x.shape
    rows_out, channels = rows_in - sum(edges), width // 2
    out = torch.empty(batch, rows_out, columns, channels, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    bands, band_rows = divide_rows(batch, rows_out, columns, channels)
    launch(
        gated_depthwise,
        (batch * bands, -(-columns // COLUMNS), -(-channels // CHANNELS)),
        x,
        x,
        weight,
        bias,
        out,
        rows_in,
        rows_out,
        columns,
        channels,
        edges[0],
        bands,
        band_rows,
        count=COLUMNS,
        width=CHANNELS,
        # In float32 the fast functions lose a digit. Only Triton for NVIDIA has all of them.
        fast=x.is_cuda and torch.version.hip is None and x.dtype != torch.float32,
        num_warps=1,
    )
    return out
