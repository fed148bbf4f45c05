"""Kernels over the channels of channels-last maps.

One does an RMS norm, a bias, a residual and an activation in one pass. The other is between the layers of a transformer
block: residual, gate, LayerNorm and modulation in one pass. Importing this file imports Triton.
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


@triton.jit
def residual_norm(
    hidden,
    branch,
    gate,
    shift,
    scale,
    out,
    positions,
    gate_stride,
    stride,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    image = row // positions
    column = tl.arange(0, block)
    inside = column < width
    value = tl.load(hidden + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if branch is not None:
        update = tl.load(branch + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            update *= tl.load(gate + image * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        # The norm uses the rounded sum, which is stored and which the next block reads.
        rounded = (value + update).to(hidden.dtype.element_ty)
        tl.store(hidden + row * width + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if shift is not None:
        centred = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
        inverse = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
        factor = tl.load(scale + image * stride + column, mask=inside, other=0.0).to(tl.float32)
        value = centred * inverse * factor
        value += tl.load(shift + image * stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + column, value, mask=inside)


def add_then_norm(
    hidden: torch.Tensor,
    branch: tuple[torch.Tensor | None, torch.Tensor | None],
    shift: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum `hidden` + gate * update, and LayerNorm(sum) * `scale` + `shift`.

    `hidden` [B, N, D] is overwritten with the sum if it is contiguous. `branch` is (update [B, N, D], gate [B, 1, D]),
    which may be None. `scale` and `shift` are [B, 1, D]. The norm has no weights. Without `shift` there is no norm.
    """
    batch, positions, width = hidden.shape
    update, gate = branch
    hidden, update = hidden.contiguous(), None if update is None else update.contiguous()
    (gate,), (shift, scale) = in_rows(batch, gate), in_rows(batch, shift, scale)
    out = hidden if shift is None else torch.empty_like(hidden)
    launch(
        residual_norm,
        (batch * positions,),
        hidden,
        hidden,
        update,
        gate,
        shift,
        scale,
        None if shift is None else out,
        positions,
        0 if gate is None else gate.stride(0),
        0 if shift is None else shift.stride(0),
        eps,
        width=width,
        block=power_of_two(width),
        num_warps=8,
    )
    return hidden, out


def add_gated(hidden: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return `hidden` + `gate` [B, 1, D] * `branch`, both [B, N, D], in the memory of `hidden` if it is contiguous."""
    return add_then_norm(hidden, (branch, gate), None, None, 0.0)[0]


def in_rows(batch: int, *tables: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return `tables` [B or 1, 1, D] with contiguous rows and the same stride between rows."""
    rows = [None if table is None else table.expand(batch, -1, -1) for table in tables]
    strides = {(table.stride(0), table.stride(2)) for table in rows if table is not None}
    if len(strides) > 1 or any(stride != 1 for _, stride in strides):
        rows = [None if table is None else table.contiguous() for table in rows]
    return rows
