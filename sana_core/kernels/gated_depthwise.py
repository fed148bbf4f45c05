"""The middle of a gated feed-forward in one kernel: SiLU, the depthwise 3x3 convolution, its bias, and the gate.

Importing this file imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .support import launch

# of the output, that one program makes from the top to the bottom: rows, columns and channels
ROWS, COLUMNS, CHANNELS = 8, 8, 64


@triton.jit
def row_sums(x, weight, row, column, channel, inside, columns, channels):
    """What one row of the input adds to the output rows below it, beside it and above it [columns, channels]."""
    below = tl.zeros((column.shape[0], channel.shape[0]), tl.float32)
    beside = tl.zeros((column.shape[0], channel.shape[0]), tl.float32)
    above = tl.zeros((column.shape[0], channel.shape[0]), tl.float32)
    for tap in tl.static_range(3):
        source = column + tap - 1
        mask = inside & ((source >= 0) & (source < columns))[:, None]
        value = tl.load(x + (row * columns + source)[:, None] * channels + channel[None, :], mask=mask, other=0.0)
        value = value.to(tl.float32)
        value = value * tl.sigmoid(value)
        # a 3x3 in the order of memory: its first row reads what is above
        below += value * tl.load(weight + channel * 9 + tap)[None, :].to(tl.float32)
        beside += value * tl.load(weight + channel * 9 + 3 + tap)[None, :].to(tl.float32)
        above += value * tl.load(weight + channel * 9 + 6 + tap)[None, :].to(tl.float32)
    return below, beside, above


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
    rows: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    image, band = tl.program_id(0) // bands, tl.program_id(0) % bands
    column = tl.program_id(1) * block + tl.arange(0, block)
    channel = tl.program_id(2) * width + tl.arange(0, width)
    valid = (channel < channels)[None, :] & (column < columns)[:, None]
    channel = tl.where(channel < channels, channel, 0)
    x += image.to(tl.int64) * rows_in * columns * 2 * channels
    out += image.to(tl.int64) * rows_out * columns * channels
    top = band * rows
    # what the rows so far have added to the output row above the current input row, and to the one beside it
    value_above = tl.zeros((block, width), tl.float32)
    value_beside = tl.zeros((block, width), tl.float32)
    gate_above = tl.zeros((block, width), tl.float32)
    gate_beside = tl.zeros((block, width), tl.float32)
    for step in range(rows + 2):
        row = (top + step - 1 + begin).to(tl.int64)
        inside = valid & (row >= 0) & (row < rows_in)
        below, beside, above = row_sums(x, weight, row, column, channel, inside, columns, 2 * channels)
        value = value_above + above
        value_above, value_beside = value_beside + beside, below
        below, beside, above = row_sums(
            x + channels, weight + channels * 9, row, column, channel, inside, columns, 2 * channels
        )
        gate = gate_above + above
        gate_above, gate_beside = gate_beside + beside, below
        if bias is not None:
            value += tl.load(bias + channel)[None, :].to(tl.float32)
            gate += tl.load(bias + channels + channel)[None, :].to(tl.float32)
        target = (top + step - 2).to(tl.int64)
        offset = (target * columns + column)[:, None] * channels + channel[None, :]
        written = valid & (step >= 2) & (target < rows_out)
        tl.store(out + offset, value * gate * tl.sigmoid(gate), mask=written)


def silu_depthwise_gate(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, edges: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Return value * silu(gate) [B, n, W, C], where (value, gate) is the depthwise 3x3 convolution of silu(`x`).

    `x` [B, h, W, 2 C] and `weight` [2 C, 1, 3, 3] are contiguous. `edges` are the rows of `x` above and below, 0 or 1,
    that are only read for those beside them; where there are none, zeros are. There are always zeros left and right.
    """
    batch, rows_in, columns, width = x.shape
    rows_out, channels = rows_in - sum(edges), width // 2
    out = torch.empty(batch, rows_out, columns, channels, dtype=x.dtype, device=x.device)
    bands = -(-rows_out // ROWS)
    grid = (batch * bands, -(-columns // COLUMNS), -(-channels // CHANNELS))
    launch(
        gated_depthwise,
        grid,
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
        rows=ROWS,
        block=COLUMNS,
        width=CHANNELS,
    )
    return out
