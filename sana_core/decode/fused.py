"""Norms, activations and gates of strips on accelerators: one kernel each, or else a few operations of torch."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.trial import kernels_on

ACTIVATIONS = {torch.nn.SiLU: "silu", torch.nn.ReLU: "relu", torch.nn.Identity: ""}


def fuses(x: torch.Tensor, activation: torch.nn.Module | None = None, kernel: str = "channels") -> bool:
    """Whether `kernel` can run on the device and dtype of `x`, and can apply `activation`."""
    return type(activation or torch.nn.Identity()) in ACTIVATIONS and kernel in kernels_on(x.device, x.dtype)


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return a view [n * W, C] of one image [C, n, W] whose rows are contiguous."""
    return x.movedim(0, -1).view(x.shape[1] * x.shape[2], x.shape[0])


def norm_into(
    out: torch.Tensor, x: torch.Tensor, norm: Any, residual: torch.Tensor | None, activation: torch.nn.Module | None
) -> None:
    """Write activation(norm(`x`) + `residual`) into `out`. `x` [1, C, n, W] is overwritten."""
    rows, target = flat(x[0]), flat(out[0])
    added = None if residual is None else flat(residual[0])
    if fuses(x, activation) and rows.is_contiguous() and (added is None or added.is_contiguous()):
        from ..kernels.channels import rms_norm

        name = ACTIVATIONS[type(activation or torch.nn.Identity())]
        rms_norm(rows, norm.weight, norm.bias, norm.eps, added, target, name)
        return
    norm_rows_(rows, norm)
    if added is not None:
        rows = torch.add(rows, added, out=target)
    if activation is not None or added is None:
        target.copy_(rows if activation is None else activation(rows))


def norm_rows_(rows: torch.Tensor, norm: Any) -> None:
    """Apply diffusers' RMSNorm to `rows` [N, C] in place, without a copy in float32."""
    scale = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().div_(rows.shape[1]).add_(norm.eps).rsqrt_()
    rows.mul_(scale)
    if norm.bias is not None:
        torch.addcmul(norm.bias, rows, norm.weight, out=rows)
    else:
        rows.mul_(norm.weight)


def bias_into(x: torch.Tensor, bias: torch.Tensor, activation: torch.nn.Module, out: torch.Tensor) -> None:
    """Write activation(`x` [B, C, n, W] + `bias` [C]) into `out`. Requires `fuses(x, activation)`."""
    from ..kernels.channels import add_bias

    for image in range(len(x)):
        add_bias(flat(x[image]).contiguous(), bias, flat(out[image]), ACTIVATIONS[type(activation)])


def gated_depthwise(window: torch.Tensor, depth: torch.nn.Conv2d) -> torch.Tensor:
    """Apply silu, the depthwise convolution `depth` and value * silu(gate) to `window` [B, 2 C, n + 2, W]."""
    from ..kernels.gated_depthwise import silu_depthwise_gate

    maps = window.permute(0, 2, 3, 1).contiguous()
    return silu_depthwise_gate(maps, depth.weight.contiguous(), depth.bias, (1, 1)).permute(0, 3, 1, 2)
