"""A transformer block whose steps between the layers are fused kernels. Importing this file imports Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..layers import pointwise, with_weights
from .channels import rms_norm
from .gated_depthwise import silu_depthwise_gate
from .linear_attention import relu_attention
from .modulation import add_gated, add_then_norm, modulated_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffusers.models.attention_processor import Attention
    from diffusers.models.normalization import RMSNorm
    from diffusers.models.transformers.sana_transformer import GLUMBConv, SanaTransformerBlock


def fused_block(
    block: SanaTransformerBlock,
    hidden: torch.Tensor,
    modulation: Sequence[torch.Tensor],
    cross_attention: Callable[[torch.Tensor], torch.Tensor],
    size: tuple[int, int],
    perturbed: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Return the hidden states [B, N, D] behind `block`, as `forward.run_block` computes them.

    `modulation` are six of [B, 1, D], `size` the rows and columns of the positions.
    """
    shift_attention, scale_attention, gate_attention, shift_forward, scale_forward, gate_forward = modulation
    states = modulated_norm(hidden, shift_attention, scale_attention, block.norm1.eps)
    hidden = add_gated(hidden, self_attention(block.attn1, states, perturbed, eps), gate_attention)
    hidden, states = add_then_norm(hidden, cross_attention(hidden), shift_forward, scale_forward, block.norm2.eps)
    return add_gated(hidden, feed_forward(block.ff, states, size), gate_forward)


def self_attention(
    attention: Attention, states: torch.Tensor, perturbed: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """As `forward.self_attention`."""
    query, key, value = attention.to_q(states), attention.to_k(states), attention.to_v(states)
    if attention.norm_q is not None:
        query, key = normed(attention.norm_q, query), normed(attention.norm_k, key)
    out = relu_attention(query.contiguous(), key.contiguous(), value.contiguous(), attention.heads, eps)
    if perturbed is not None:
        out = torch.where(perturbed, value, out)
    out = attention.to_out[0](out)
    return out.clip(-65504, 65504) if states.dtype == torch.float16 else out


def normed(norm: RMSNorm, states: torch.Tensor) -> torch.Tensor:
    """Return diffusers' RMSNorm of `states` [B, N, D]."""
    rows = states.contiguous().flatten(0, 1)
    out = with_weights(norm, states, lambda weight, bias: rms_norm(rows, weight, bias, norm.eps))
    return norm(states) if out is None else out.view_as(states)


def feed_forward(block: GLUMBConv, states: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """As `forward.feed_forward`, of `states` [B, N, D]."""
    # without a name, so that the largest of all maps is let go before the last product
    gated = gated_depthwise(block.conv_depth, pointwise(block.conv_inverted, states, size).unflatten(1, size))
    return pointwise(block.conv_point, gated.flatten(1, 2), size)


def gated_depthwise(depth: torch.nn.Module, maps: torch.Tensor) -> torch.Tensor:
    """Return value * silu(gate) [B, h, w, C] of the convolution `depth` of silu(`maps`) [B, h, w, 2 C]."""
    maps = maps.contiguous()
    gated = with_weights(depth, maps, lambda weight, bias: silu_depthwise_gate(maps, weight.contiguous(), bias))
    if gated is None:
        value, gate = depth(F.silu(maps, inplace=True).permute(0, 3, 1, 2)).chunk(2, dim=1)
        gated = (value * F.silu(gate)).permute(0, 2, 3, 1)
    return gated
