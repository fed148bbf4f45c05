"""Kernels over the channels of channels-last maps: an RMS norm, a bias, a residual and an activation in one pass.

Importing this file imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .support import launch, power_of_two

# Elements per program, which is 16 for each thread of its four warps.
TILE = 2048


@triton.jit
def activate(value, activation: tl.constexpr):
    if activation == "silu":
        value = value * tl.sigmoid(value)
    elif activation == "relu":
        # This comparison keeps NaN.
        value = tl.where(value < 0, 0.0, value)
    return value


@triton.jit
def map_rows(
    x,
    weight,
    bias,
    residual,
    out,
    positions,
    stride,
    eps,
    channels: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    activation: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    valid = column < channels
    mask = (row < positions)[:, None] & valid[None, :]
    offset = row[:, None] * channels + column[None, :]
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        inverse = 1 / tl.sqrt(tl.sum(value * value, 1) / channels + eps)
        factor = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)
        value = value * inverse[:, None] * factor[None, :]
    if bias is not None:
        value += tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        value += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, activate(value, activation), mask=mask)


def tile(positions: int, channels: int) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return the grid and the sizes of a program for a map of `positions` x `channels`."""
    block = power_of_two(channels)
    rows = max(1, TILE // block)
    return (-(-positions // rows),), {"channels": channels, "block": block, "rows": rows}


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    activation: str = "",
) -> torch.Tensor:
    """Return activation(norm(`x`) * `weight` + `bias` + `residual`), with the RMS norm over the channels of `x` [N, C].

    All tensors are contiguous, except that the rows of `x` may have gaps. `out` may be `x`. Sums and products are in
    float32 and rounded once.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    grid, sizes = tile(*x.shape)
    arguments = x, weight, bias, residual, out, len(x), x.stride(0), eps
    launch(map_rows, grid, x, *arguments, **sizes, activation=activation)
    return out


def add_bias(x: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, activation: str = "") -> None:
    """Write activation(`x` [N, C] + `bias` [C]) into `out` [N, C], which may be `x`. All are contiguous."""
    grid, sizes = tile(*x.shape)
    arguments = x, None, bias, None, out, len(x), x.stride(0), 0.0
    launch(map_rows, grid, x, *arguments, **sizes, activation=activation)
