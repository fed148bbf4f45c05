"""The kernel between the layers of a transformer block: residual, gate, LayerNorm and modulation in one pass.

Importing this file imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .support import launch, power_of_two


@triton.jit
def residual_norm(
    hidden,
    branch,
    gate,
    shift,
    scale,
    added,
    out,
    positions,
    stride,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    picture = row // positions * stride
    column = tl.arange(0, block)
    inside = column < width
    value = tl.load(hidden + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if branch is not None:
        update = tl.load(branch + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            update *= tl.load(gate + picture + column, mask=inside, other=0.0).to(tl.float32)
        # as it is stored, and as the next block reads it
        rounded = (value + update).to(added.dtype.element_ty)
        tl.store(added + row * width + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if shift is not None:
        centred = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
        inverse = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
        factor = tl.load(scale + picture + column, mask=inside, other=0.0).to(tl.float32)
        value = centred * inverse * factor
        value += tl.load(shift + picture + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + column, value, mask=inside)


def run(
    hidden: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    shift: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, positions, width = hidden.shape
    hidden, branch = hidden.contiguous(), None if branch is None else branch.contiguous()
    given = gate if gate is not None else shift
    stride = 0 if given is None else given.stride(0)
    added = hidden if branch is None else torch.empty_like(hidden)
    out = added if shift is None else torch.empty_like(hidden)
    launch(
        residual_norm,
        (batch * positions,),
        hidden,
        hidden,
        branch,
        gate,
        shift,
        scale,
        None if branch is None else added,
        None if shift is None else out,
        positions,
        stride,
        eps,
        width=width,
        block=power_of_two(width),
        num_warps=8,
    )
    return added, out


def modulated_norm(hidden: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """Return LayerNorm without weights of `hidden` [B, N, D], times `scale`, plus `shift`, both [B, 1, D]."""
    return run(hidden, None, None, shift, scale, eps)[1]


def add_gated(hidden: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return `hidden` + `gate` [B, 1, D] * `branch`, both [B, N, D]."""
    return run(hidden, branch, gate, None, None, 0.0)[0]


def add_then_norm(
    hidden: torch.Tensor, branch: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `hidden` + `branch`, and what `modulated_norm` makes of that."""
    return run(hidden, branch, None, shift, scale, eps)
