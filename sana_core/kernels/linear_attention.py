"""Linear attention with ReLU in two kernels: the sums over all keys, then the queries' outputs. Sums are in float32.

The keys are summed in at most `SPLITS` parts. The size of a part depends only on the number of positions, and the parts
are added in order, so the result of an image does not depend on the rest of the batch. Importing this file imports
Triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .support import launch

BLOCK, SPLITS, MIN_POSITIONS = 64, 8, 256


@triton.jit
def attention_sums(
    key,
    value,
    sums,
    positions,
    key_stride,
    value_stride,
    part,
    heads,
    size: tl.constexpr,
    block: tl.constexpr,
):
    head, split = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, size)
    first, channel = (head // heads).to(tl.int64) * positions, (head % heads * size + column)[None, :]
    summed = tl.zeros((size, size), tl.float32)
    total = tl.zeros((size,), tl.float32)
    for start in range(split * part, tl.minimum(split * part + part, positions), block):
        row = start + tl.arange(0, block)
        mask, position = (row < positions)[:, None], (first + row)[:, None]
        keys = tl.load(key + position * key_stride + channel, mask=mask, other=0.0)
        keys = tl.where(keys < 0, 0.0, keys).to(key.dtype.element_ty)
        values = tl.load(value + position * value_stride + channel, mask=mask, other=0.0)
        summed += tl.dot(tl.trans(keys), values, input_precision="ieee")
        total += tl.sum(keys.to(tl.float32), 0)
    out = sums + (head * tl.num_programs(1) + split) * (size + 1) * size
    tl.store(out + column[:, None] * size + column[None, :], summed)
    tl.store(out + size * size + column, total)


@triton.jit
def attention_outputs(
    query,
    sums,
    out,
    positions,
    stride,
    parts,
    part,
    heads,
    eps,
    size: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    head, split = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, size)
    first, channel = (head // heads).to(tl.int64) * positions, (head % heads * size + column)[None, :]
    summed = tl.zeros((size, size), tl.float32)
    total = tl.zeros((size,), tl.float32)
    for index in range(parts):
        part_sums = sums + (head * parts + index) * (size + 1) * size
        # If the image is sharded, its sums are in float64.
        summed += tl.load(part_sums + column[:, None] * size + column[None, :]).to(tl.float32)
        total += tl.load(part_sums + size * size + column).to(tl.float32)
    for start in range(split * part, tl.minimum(split * part + part, positions), block):
        row = start + tl.arange(0, block)
        mask, position = (row < positions)[:, None], (first + row)[:, None]
        queries = tl.load(query + position * stride + channel, mask=mask, other=0.0).to(tl.float32)
        queries = tl.where(queries < 0, 0.0, queries)
        weighted = tl.dot(queries, summed, input_precision=precision)
        weight = tl.sum(queries * total[None, :], 1) + eps
        tl.store(out + position * heads * size + channel, weighted / weight[:, None], mask=mask)


def relu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    eps: float,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the output [B, N, heads * d] of linear attention with ReLU for `query`, `key` and `value`, of that shape.

    For a shard of the positions, `all_reduce` takes its sums [B, heads, parts, d + 1, d] and returns the sums of all
    shards [B, heads, d + 1, d], in float64 or float32 and contiguous.
    """
    batch, positions, width = query.shape
    query, key, value = map(in_rows, (query, key, value))
    splits = min(SPLITS, -(-positions // MIN_POSITIONS))
    part = -(-positions // (splits * BLOCK)) * BLOCK
    size, grid = width // heads, (batch * heads, splits)
    sums = torch.empty(batch * heads, splits, size + 1, size, dtype=torch.float32, device=query.device)
    strides = key.stride(1), value.stride(1)
    launch(attention_sums, grid, query, key, value, sums, positions, *strides, part, heads, size=size, block=BLOCK)
    if all_reduce is not None:
        sums = all_reduce(sums.unflatten(0, (batch, heads))).flatten(0, 1)[:, None]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch(
        attention_outputs,
        grid,
        query,
        query,
        sums,
        out,
        positions,
        query.stride(1),
        sums.shape[1],
        part,
        heads,
        eps,
        size=size,
        block=BLOCK,
        precision=precision(query.dtype),
    )
    return out


def in_rows(states: torch.Tensor) -> torch.Tensor:
    """Return `states` [B, N, D] with the same stride between all rows. A slice of a wider tensor's columns has it."""
    regular = states.stride(2) == 1 and states.stride(0) == states.shape[1] * states.stride(1)
    return states if regular else states.contiguous()


def precision(dtype: torch.dtype) -> str:
    """Return Triton's precision for products of float32.

    For 16-bit inputs, three products of TF32 are exact enough and faster. Triton's AMD backend does not have them.
    """
    return "ieee" if dtype == torch.float32 or torch.version.hip else "tf32x3"
