"""A block of SANA's transformer, with fused kernels where the device supports them.

`kernels`: names of the kernels in `sana_core.kernels` to use. Plain torch computes the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from .layers import pointwise, with_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from diffusers.models.attention_processor import Attention
    from diffusers.models.normalization import RMSNorm
    from diffusers.models.transformers.sana_transformer import GLUMBConv, SanaTransformerBlock

NO_KERNELS: frozenset[str] = frozenset()


class Branch(NamedTuple):
    """A residual that has not been added to the hidden states yet: `update` times `gate`.

    The addition is deferred because one kernel adds the residual and computes the next norm.
    """

    update: torch.Tensor  # [B, N, D]
    gate: torch.Tensor | None  # [B, 1, D]; None: 1


class Constants(NamedTuple):
    """Tensors that depend only on the prompts and the image size. Computed once per sampling.

    P prompts of T tokens, N positions, L blocks.
    """

    keys: list[torch.Tensor]  # L of [P, heads, T, head_dim]
    values: list[torch.Tensor]
    bias: torch.Tensor | None  # [P, 1, 1, T], or None if no prompt is padded
    position: torch.Tensor | None  # position embedding [1, N, D], or None
    tables: torch.Tensor  # [L, 6, D]
    kernels: frozenset[str]  # names of the fused kernels in sana_core.kernels to use between the layers
    eps: float  # in the denominator of the linear attention
    # SANA-Video: the rotation for each number of channels in a head (sana_core/video/forward.py).
    turns: dict[int, torch.Tensor] | None = None


class Perturbation(NamedTuple):
    """Perturbed attention: in `blocks`, the self-attention of the images in `images` becomes the identity."""

    images: torch.Tensor  # bool [B, 1, 1]
    blocks: frozenset[int]


class RowOperations(Protocol):
    """The operations of a forward that need the rows of other shards. row_shards.py implements them."""

    def embed(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the patch embedding [B, N, D] of `x` [B, 32, n, w]."""

    def sums(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the sums [B, heads, d, d + 1] of the linear attention over the whole image."""

    def kernel_sums(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the same sums as [B, heads, d + 1, d], from the parts of the fused kernel."""

    def feed_forward(self, block: GLUMBConv, states: torch.Tensor, kernels: frozenset[str]) -> torch.Tensor:
        """Return the feed-forward of `states` [B, N, D]. Its convolution reads one row of each neighbour."""


# Hidden states [B, N, D], and a residual that has not been added to them yet. A kernel adds it in place, so the next
# block overwrites the hidden states. Code that needs them later has to clone them.
Carried = tuple[torch.Tensor, Branch | None]


class BlockInputs(NamedTuple):
    """The inputs of a step that all blocks share."""

    modulation: torch.Tensor  # [B, L, 6, 1, D]
    constants: Constants
    size: tuple[int, int]  # rows and columns of positions; in a shard, only the shard's rows
    ops: RowOperations | None  # in a shard: the operations that need rows of other shards


def run_block(
    block: SanaTransformerBlock,
    i: int,
    carried: Carried,
    inputs: BlockInputs,
    perturbed: torch.Tensor | None = None,
) -> Carried:
    """Run transformer block `i`. Returns its output in the same deferred form as `carried`.

    `perturbed`: see `self_attention`.
    """
    modulation, constants, size, ops = inputs
    modulations = modulation[:, i].unbind(1)
    shift_attention, scale_attention, gate_attention, shift_forward, scale_forward, gate_forward = modulations
    kernels = constants.kernels
    hidden, states = add_then_norm(*carried, block.norm1, shift_attention, scale_attention, kernels)
    attended = self_attention(block.attn1, states, perturbed, constants.eps, kernels, ops)
    hidden = add(hidden, Branch(attended, gate_attention), kernels)
    # Free them before the cross-attention allocates its tensors.
    del states, attended
    # On a CPU the kernel of the softmax attention depends on the number of queries. Single rows keep the bits the same.
    row = size[1] if ops is not None and hidden.device.type == "cpu" else None
    crossed = cross_attention(block.attn2, hidden, constants.keys[i], constants.values[i], constants.bias, kernels, row)
    crossing = Branch(crossed, None)
    hidden, states = add_then_norm(hidden, crossing, block.norm2, shift_forward, scale_forward, kernels)
    del crossed, crossing
    out = feed_forward(block.ff, states, size, kernels) if ops is None else ops.feed_forward(block.ff, states, kernels)
    return hidden, Branch(out, gate_forward)


def add(hidden: torch.Tensor, branch: Branch | None, kernels: frozenset[str] = NO_KERNELS) -> torch.Tensor:
    """Return `hidden` with `branch` added. The fused kernel adds it in place."""
    if branch is None:
        return hidden
    update, gate = branch
    if gate is None:
        return hidden + update
    if "modulation" in kernels:
        from ..kernels.channels import add_gated

        return add_gated(hidden, update, gate)
    return torch.addcmul(hidden, gate, update)


def add_then_norm(
    hidden: torch.Tensor,
    branch: Branch | None,
    norm: torch.nn.LayerNorm,
    shift: torch.Tensor,
    scale: torch.Tensor,
    kernels: frozenset[str] = NO_KERNELS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `branch` to `hidden` as `add` does. Returns the sum, and norm(sum) * scale + shift.

    `shift` and `scale` are [B, 1, D].
    """
    if "modulation" in kernels:
        from ..kernels.channels import add_then_norm

        return add_then_norm(hidden, branch or (None, None), shift, scale, norm.eps)
    hidden = add(hidden, branch)
    return hidden, torch.addcmul(shift, norm(hidden), scale).to(hidden.dtype)


def split_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [B, N, heads * d] as [B, heads, N, d], a view."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def attention_sums(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the sums [B, heads, d, d + 1] over the N positions of `key` and `value` [B, heads, N, d].

    The first d columns are the sum of key times value, the last column is the sum of the keys.
    """
    return torch.cat([key.transpose(2, 3) @ value, key.sum(2, keepdim=True).transpose(2, 3)], dim=3)


def self_attention(
    attention: Attention,
    states: torch.Tensor,
    perturbed: torch.Tensor | None = None,
    eps: float = 1e-15,
    kernels: frozenset[str] = NO_KERNELS,
    ops: RowOperations | None = None,
) -> torch.Tensor:
    """Linear attention with ReLU over `states` [B, N, D] (SANA paper, section 2.2), summed in float32.

    For images with `perturbed` [B, 1, 1] set, the output is the value, as if each position saw only itself (Ahn et al.
    2024). SANA-1.5 normalises query and key, but not the value.
    """
    if hasattr(attention, "to_qkv"):
        query, key, value = attention.to_qkv(states).chunk(3, dim=-1)
    else:
        query, key, value = attention.to_q(states), attention.to_k(states), attention.to_v(states)
    if attention.norm_q is not None:
        query, key = (
            rms_norm(norm, part, kernels) for norm, part in ((attention.norm_q, query), (attention.norm_k, key))
        )
    if "linear_attention" in kernels:
        from ..kernels.linear_attention import relu_attention

        out = relu_attention(query, key, value, attention.heads, eps, None if ops is None else ops.kernel_sums)
    else:
        own = attention_sums if ops is None else ops.sums
        out = linear_attention(query, key, value, attention.heads, eps, own)
    if perturbed is not None:
        out = torch.where(perturbed, value, out)
    out = attention.to_out[0](out)
    return out.clip(-65504, 65504) if states.dtype == torch.float16 else out


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    eps: float,
    sums: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return linear attention with ReLU of `query`, `key` and `value` [B, N, D]. `sums` adds up keys and values."""
    dtype = value.dtype
    query, key, value = (split_heads(part, heads) for part in (query, key, value))
    summed = sums(F.relu(key).float(), value.float())
    # One product for numerator and denominator. If the denominator had its own product, the order of its sum on a CPU
    # would depend on the number of positions.
    out = F.relu(query).float() @ summed
    return (out[..., :-1] / (out[..., -1:] + eps)).to(dtype).transpose(1, 2).flatten(2)


def rms_norm(norm: RMSNorm, states: torch.Tensor, kernels: frozenset[str]) -> torch.Tensor:
    """Return diffusers' RMSNorm of `states` [B, N, D]."""
    if "channels" not in kernels:
        return norm(states)
    from ..kernels import channels

    rows = states.flatten(0, 1)
    out = with_weights(norm, states, lambda weight, bias: channels.rms_norm(rows, weight, bias, norm.eps))
    return norm(states) if out is None else out.view(states.shape)


def cross_attention(
    attention: Attention,
    states: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    kernels: frozenset[str] = NO_KERNELS,
    row: int | None = None,
) -> torch.Tensor:
    """Softmax attention of `states` [B, N, D] to the tokens of P prompts. Each prompt has B / P images.

    `row`: number of positions in a row. Each row of an image is then computed alone, so that the bits do not depend on
    the number of rows.
    """
    query = attention.to_q(states)
    if attention.norm_q is not None:
        query = rms_norm(attention.norm_q, query, kernels)
    # Join the queries of all images of a prompt, so that keys and values need no copies.
    query = query.reshape(len(key), -1, query.shape[-1])
    if row is None:
        out = F.scaled_dot_product_attention(split_heads(query, attention.heads), key, value, attn_mask=bias)
    else:
        out = torch.cat([attend_rows(attention.heads, query, i, key, value, bias, row) for i in range(len(key))])
    return attention.to_out[0](out.transpose(1, 2).reshape(*states.shape[:2], -1))


def attend_rows(
    heads: int,
    query: torch.Tensor,
    prompt: int,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    row: int,
) -> torch.Tensor:
    """Attend from the images of one prompt, a row at a time. `query`: [P, N, heads * d]. Returns [1, heads, N, d]."""
    rows = split_heads(query[prompt].unflatten(0, (-1, row)), heads)
    # These views repeat the prompt without a copy.
    key, value = (part[prompt].expand(len(rows), -1, -1, -1) for part in (key, value))
    mask = None if bias is None else bias[prompt].expand(len(rows), heads, row, -1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
    return out.transpose(0, 1).flatten(1, 2)[None]


def feed_forward(
    block: GLUMBConv,
    states: torch.Tensor,
    size: tuple[int, int],
    kernels: frozenset[str] = NO_KERNELS,
    edges: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """Return the gated feed-forward of `states` [B, N, D], with a 3x3 depthwise convolution (SANA paper, section 2.2).

    `size`: rows and columns of `states`. `edges`: how many rows at the top and at the bottom are only input of the
    convolution. The result does not have these rows.
    """
    inner_rows = slice(edges[0], size[0] - edges[1])
    if states.device.type == "cpu" and "gated_depthwise" not in kernels:
        maps = states.unflatten(1, size).permute(0, 3, 1, 2)
        maps = F.silu(block.conv_inverted(maps), inplace=True)
        maps, gate = block.conv_depth(maps)[:, :, inner_rows].chunk(2, dim=1)
        return block.conv_point(maps * F.silu(gate)).flatten(2).transpose(1, 2)
    # The largest map [B, rows, columns, 2 C]. It is deleted before the next maps are allocated. As an argument of
    # another function it could not be freed there: before Python 3.11, and while torch.compile or a debugger replaces
    # the evaluation of frames, the caller keeps its arguments.
    maps = pointwise(block.conv_inverted, states, size).unflatten(1, size)
    gated = None
    if "gated_depthwise" in kernels:
        from ..kernels.gated_depthwise import silu_depthwise_gate

        gated = with_weights(
            block.conv_depth,
            maps,
            lambda weight, bias: silu_depthwise_gate(maps.contiguous(), weight.contiguous(), bias, edges),
        )
    if gated is None:
        hidden = block.conv_depth(F.silu(maps, inplace=True).permute(0, 3, 1, 2))[:, :, inner_rows]
        del maps
        value, gate = hidden.chunk(2, dim=1)
        gated = (value * F.silu(gate)).permute(0, 2, 3, 1)
        del hidden, value, gate
    else:
        del maps
    return pointwise(block.conv_point, gated.flatten(1, 2), (gated.shape[1], size[1]))
