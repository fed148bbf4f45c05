"""Linear attention with ReLU in two kernels: the sums over all keys, then the queries' outputs. Sums are in float32.

The keys are summed in at most `SPLITS` parts whose size depends on the number of positions alone, and the parts are
added in their order: a picture's result depends on nothing else in the batch. Importing this file imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .support import launch

BLOCK, SPLITS, LEAST = 64, 8, 256
# head sizes that the kernels take: powers of two that a product of matrices can have
HEAD_SIZES = (16, 32, 64)


@triton.jit
def attention_sums(
    key,
    value,
    sums,
    positions,
    part,
    heads,
    size: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    head, split = tl.program_id(0), tl.program_id(1)
    width = heads * size
    column = tl.arange(0, size)
    first = (head // heads).to(tl.int64) * positions * width + head % heads * size
    summed = tl.zeros((size, size), tl.float32)
    total = tl.zeros((size,), tl.float32)
    for start in range(split * part, tl.minimum(split * part + part, positions), block):
        row = start + tl.arange(0, block)
        offset = first + row.to(tl.int64)[:, None] * width + column[None, :]
        inside = (row < positions)[:, None]
        keys = tl.load(key + offset, mask=inside, other=0.0)
        keys = tl.where(keys < 0, 0.0, keys).to(key.dtype.element_ty)
        values = tl.load(value + offset, mask=inside, other=0.0)
        summed += tl.dot(tl.trans(keys), values, input_precision=precision)
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
    part,
    heads,
    eps,
    size: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    head, split = tl.program_id(0), tl.program_id(1)
    width = heads * size
    column = tl.arange(0, size)
    first = (head // heads).to(tl.int64) * positions * width + head % heads * size
    summed = tl.zeros((size, size), tl.float32)
    total = tl.zeros((size,), tl.float32)
    for other in range(tl.num_programs(1)):
        own = sums + (head * tl.num_programs(1) + other) * (size + 1) * size
        summed += tl.load(own + column[:, None] * size + column[None, :])
        total += tl.load(own + size * size + column)
    for start in range(split * part, tl.minimum(split * part + part, positions), block):
        row = start + tl.arange(0, block)
        offset = first + row.to(tl.int64)[:, None] * width + column[None, :]
        inside = (row < positions)[:, None]
        queries = tl.load(query + offset, mask=inside, other=0.0).to(tl.float32)
        queries = tl.where(queries < 0, 0.0, queries)
        weighted = tl.dot(queries, summed, input_precision=precision)
        weight = tl.sum(queries * total[None, :], 1) + eps
        tl.store(out + offset, weighted / weight[:, None], mask=inside)


def relu_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, eps: float) -> torch.Tensor:
    """Return what linear attention with ReLU makes of `query`, `key` and `value` [B, N, heads * d], contiguous."""
    batch, positions, width = query.shape
    splits = min(SPLITS, -(-positions // LEAST))
    part = -(-positions // (splits * BLOCK)) * BLOCK
    size, grid = width // heads, (batch * heads, splits)
    sums = torch.empty(batch * heads, splits, size + 1, size, dtype=torch.float32, device=query.device)
    out = torch.empty_like(query)
    exact = query.dtype == torch.float32
    launch(
        attention_sums,
        grid,
        query,
        key,
        value,
        sums,
        positions,
        part,
        heads,
        size=size,
        block=BLOCK,
        precision="ieee" if exact else "tf32",
    )
    launch(
        attention_outputs,
        grid,
        query,
        query,
        sums,
        out,
        positions,
        part,
        heads,
        eps,
        size=size,
        block=BLOCK,
        precision="ieee" if exact else "tf32x3",
    )
    return out
