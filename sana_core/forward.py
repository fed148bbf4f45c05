"""The forward of SANA's transformer for sampling: what does not change over the steps is computed once.

diffusers.SanaTransformer2DModel computes the caption's projection and the keys and values of every cross-attention,
which depend on the prompt alone, again in each step. Here `prepare` computes them once, for the tokens that the mask
keeps, and `velocity` is the rest. It calls the modules' own layers, so that LoRA, casting and offloading work, and has
no gradient's needs in mind: training uses the library's forward. What NVIDIA's code and diffusers' compute differently
follows the module's reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from .kernels.trial import runs
from .layers import pointwise
from .reference import all_blocks, reference_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffusers import SanaControlNetModel, SanaTransformer2DModel
    from diffusers.models.attention_processor import Attention
    from diffusers.models.transformers.sana_transformer import GLUMBConv, SanaTransformerBlock

    from .split.share import Share

# head sizes of the linear attention that its kernels take: powers of two that a product of matrices can have
FUSED_HEADS = (16, 32, 64)
# what diffusers adds to the attention scores of tokens that the mask drops; their weight becomes exactly 0
DROPPED = -10000.0


class Constants(NamedTuple):
    """What a batch of prompts and a size fix for all steps. P prompts of T tokens, N positions, L blocks."""

    keys: list[torch.Tensor]  # L of [P, heads, T, head_dim]
    values: list[torch.Tensor]
    bias: torch.Tensor | None  # [P, 1, 1, T], or None where no prompt is padded
    position: torch.Tensor | None  # [1, N, D], of models with a position embedding
    tables: torch.Tensor  # [L, 6, D]
    fused: bool  # whether the kernels of sana_core.kernels do what lies between the layers
    eps: float  # in the denominator of the linear attention


class Perturbation(NamedTuple):
    """Perturbed attention: in `blocks`, the self-attention of the pictures in `pictures` becomes the identity."""

    pictures: torch.Tensor  # bool [B, 1, 1]
    blocks: frozenset[int]


def longest_prompt(mask: torch.Tensor) -> int:
    """Return the number of tokens up to the last one that `mask` [P, T] keeps, at least 1."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return max(1, int((positions * (mask != 0)).max()))


def split_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, N, heads * d] to [B, heads, N, d], a view."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


@torch.no_grad()
def prepare(
    transformer: SanaTransformer2DModel | SanaControlNetModel,
    embeds: torch.Tensor,
    mask: torch.Tensor,
    height: int,
    width: int,
) -> Constants:
    """Return the constants of prompts `embeds` [P, T, C], `mask` [P, T] and latents of `height` x `width` cells.

    The embeddings must be in the dtype and on the device of the forward.
    """
    blocks = all_blocks(transformer)
    length = longest_prompt(mask)
    embeds, mask = embeds[:, :length], mask[:, :length]
    captions = transformer.caption_norm(transformer.caption_projection(embeds))
    keys, values = [], []
    for block in blocks:
        attention = block.attn2
        key, value = attention.to_k(captions), attention.to_v(captions)
        if attention.norm_k is not None:
            key = attention.norm_k(key)
        keys.append(split_heads(key, attention.heads).contiguous())
        values.append(split_heads(value, attention.heads).contiguous())
    bias = None
    if not bool((mask != 0).all()):
        # in memory for 8 tokens more, or accelerators would copy it to that in each attention
        bias = F.pad((1 - mask.to(embeds.dtype)) * DROPPED, (0, -length % 8))[:, None, None, :length]
    # a host may compute in another dtype than that of parameters it does not cast itself
    tables = torch.stack([block.scale_shift_table for block in blocks]).to(embeds.dtype)
    fused = transformer.config.attention_head_dim in FUSED_HEADS and runs(embeds.device, embeds.dtype)
    position, eps = position_embedding(transformer, embeds, height, width), reference_of(transformer).attention_eps
    return Constants(keys, values, bias, position, tables, fused, eps)


def position_embedding(
    transformer: SanaTransformer2DModel | SanaControlNetModel, like: torch.Tensor, height: int, width: int
) -> torch.Tensor | None:
    """Return what the patch embedding adds to latents of `height` x `width` cells: nothing below 2K."""
    patch = transformer.patch_embed
    if patch.pos_embed is None:
        return None
    if (patch.height, patch.width) == (height // patch.patch_size, width // patch.patch_size):
        return patch.pos_embed.to(like.device)
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    return get_2d_sincos_pos_embed(
        patch.pos_embed.shape[-1],
        (height // patch.patch_size, width // patch.patch_size),
        base_size=patch.base_size,
        interpolation_scale=patch.interpolation_scale,
        device=like.device,
        output_type="pt",
    ).float()[None]


def velocity(
    transformer: SanaTransformer2DModel,
    x: torch.Tensor,
    timestep: torch.Tensor,
    constants: Constants,
    guidance: torch.Tensor | None = None,
    perturbation: Perturbation | None = None,
    control: Sequence[torch.Tensor | None] = (),
    share: Share | None = None,
) -> torch.Tensor:
    """Return the velocity [B, 32, h, w] at `x` [B, 32, h, w] and `timestep` [B], as the model's reference computes it.

    B is a multiple of the P prompts in `constants`; each prompt has B / P pictures, one after another. `timestep` and
    `guidance` [B], that of distilled models, are already in the model's scale. `control` are the residuals of
    `control_residuals`: number i is added after block i. With a `share` in a picture that several devices compute, `x`,
    the position embedding and `control` are those of its rows.
    """
    height, width = x.shape[-2:]
    patch = transformer.config.patch_size
    size = height // patch, width // patch
    hidden = embed(transformer, x, constants.position, share)
    time, embedded = embed_time(transformer, timestep, hidden, guidance)
    modulation = modulate(constants, time)
    for i, block in enumerate(transformer.transformer_blocks):
        pictures = perturbation.pictures if perturbation is not None and i in perturbation.blocks else None
        hidden = run_block(block, i, hidden, modulation, constants, size, pictures, share)
        residual = control[i] if i < len(control) else None
        if residual is not None:
            hidden = hidden + residual.to(hidden.dtype)

    hidden = transformer.norm_out(hidden, embedded, transformer.scale_shift_table.to(hidden.dtype))
    out = transformer.proj_out(hidden).unflatten(1, size).unflatten(-1, (patch, patch, -1))
    return out.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, height, width)


def embed(
    model: SanaTransformer2DModel | SanaControlNetModel,
    x: torch.Tensor,
    position: torch.Tensor | None,
    share: Share | None = None,
) -> torch.Tensor:
    """[B, 32, h, w] to hidden states [B, N, D]."""
    if share is None:
        # contiguous, or every norm and sum that follows would carry the transposed layout on
        hidden = model.patch_embed.proj(x).flatten(2).transpose(1, 2).contiguous()
    else:
        hidden = share.embed(model.patch_embed.proj, x)
    return hidden if position is None else (hidden + position).to(hidden.dtype)


def embed_time(
    model: SanaTransformer2DModel | SanaControlNetModel,
    timestep: torch.Tensor,
    hidden: torch.Tensor,
    guidance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what modulates the blocks [B, 6 D], and the embedded time [B, D], which the last layer takes."""
    if guidance is None:
        return model.time_embed(timestep, batch_size=len(hidden), hidden_dtype=hidden.dtype)
    return model.time_embed(timestep, guidance=guidance, hidden_dtype=hidden.dtype)


def modulate(constants: Constants, time: torch.Tensor) -> torch.Tensor:
    """Return [B, L, 6, 1, D]: shift, 1 + scale and gate of self-attention, then of the feed-forward."""
    modulation = (constants.tables + time.view(len(time), 1, 6, -1)).unsqueeze(3)
    modulation[:, :, 1::3] += 1
    return modulation


def run_block(
    block: SanaTransformerBlock,
    i: int,
    hidden: torch.Tensor,
    modulation: torch.Tensor,
    constants: Constants,
    size: tuple[int, int],
    perturbed: torch.Tensor | None = None,
    share: Share | None = None,
) -> torch.Tensor:
    """Return the hidden states [B, N, D] behind `block`, number `i` of `constants`, of `size` rows and columns.

    With a `share`, those are the rows of one of several devices; plain torch computes them.
    """
    own = modulation[:, i].unbind(1)
    shift_attention, scale_attention, gate_attention, shift_forward, scale_forward, gate_forward = own
    if constants.fused and share is None:
        from .kernels.block import fused_block

        def cross(states: torch.Tensor) -> torch.Tensor:
            return cross_attention(block.attn2, states, constants.keys[i], constants.values[i], constants.bias)

        return fused_block(block, hidden, own, cross, size, perturbed, constants.eps)
    sums = attention_sums if share is None else share.sums
    # on a CPU the kernel for softmax depends on how many queries there are
    row = size[1] if share is not None and hidden.device.type == "cpu" else None
    states = torch.addcmul(shift_attention, block.norm1(hidden), scale_attention).to(hidden.dtype)
    attended = self_attention(block.attn1, states, perturbed, constants.eps, sums)
    hidden = torch.addcmul(hidden, gate_attention, attended)
    hidden = hidden + cross_attention(block.attn2, hidden, constants.keys[i], constants.values[i], constants.bias, row)
    states = torch.addcmul(shift_forward, block.norm2(hidden), scale_forward)
    out = feed_forward(block.ff, states, size) if share is None else share.feed_forward(block.ff, states)
    return torch.addcmul(hidden, gate_forward, out)


def attention_sums(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the sums [B, heads, d, d + 1] over the positions of `key` and `value` [B, heads, N, d], last the key's."""
    return torch.cat([key.transpose(2, 3) @ value, key.sum(2, keepdim=True).transpose(2, 3)], dim=3)


def self_attention(
    attention: Attention,
    states: torch.Tensor,
    perturbed: torch.Tensor | None = None,
    eps: float = 1e-15,
    sums: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = attention_sums,
) -> torch.Tensor:
    """Linear attention with ReLU over `states` [B, N, D] (SANA paper, section 2.2), summed in float32 by `sums`.

    Where `perturbed` [B, 1, 1] is set, the value itself is the output, as if each position saw only itself (Ahn et al.
    2024); the norms of query and key, which SANA-1.5 has, don't touch it.
    """
    query, key, value = attention.to_q(states), attention.to_k(states), attention.to_v(states)
    if attention.norm_q is not None:
        query, key = attention.norm_q(query), attention.norm_k(key)
    query, key, value = (split_heads(part, attention.heads) for part in (query, key, value))
    key = F.relu(key).float()
    summed = sums(key, value.float())
    del key
    # in one product: by the last column alone, CPUs add up in an order that depends on how many positions there are
    out = F.relu(query).float() @ summed
    out = (out[..., :-1] / (out[..., -1:] + eps)).to(states.dtype)
    if perturbed is not None:
        out = torch.where(perturbed[..., None], value, out)
    out = attention.to_out[0](out.transpose(1, 2).flatten(2))
    return out.clip(-65504, 65504) if states.dtype == torch.float16 else out


def cross_attention(
    attention: Attention,
    states: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    row: int | None = None,
) -> torch.Tensor:
    """Softmax attention of `states` [B, N, D] to the tokens of P prompts, of which each has B / P pictures.

    With `row`, the length of one, each row of a picture is attended by itself, to the same bits whatever their number.
    """
    query = attention.to_q(states)
    if attention.norm_q is not None:
        query = attention.norm_q(query)
    # the pictures of a prompt stand in one row of queries, so that keys and values need no copies
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
    """Return [1, heads, N, d] of the pictures of one prompt, `query` being [P, N, heads * d], a row at a time."""
    rows = split_heads(query[prompt].unflatten(0, (-1, row)), heads)
    # views that repeat
    key, value = (part[prompt].expand(len(rows), -1, -1, -1) for part in (key, value))
    mask = None if bias is None else bias[prompt].expand(len(rows), heads, row, -1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
    return out.transpose(0, 1).flatten(1, 2)[None]


def feed_forward(
    block: GLUMBConv, states: torch.Tensor, size: tuple[int, int], kept: slice = slice(None)
) -> torch.Tensor:
    """The gated feed-forward with its 3x3 depthwise convolution, `states` [B, N, D] (SANA paper, section 2.2).

    Returns the rows `kept` of those in `states`, whose `size` is in rows and columns.
    """
    if states.device.type == "cpu":
        maps = states.unflatten(1, size).permute(0, 3, 1, 2)
        maps = F.silu(block.conv_inverted(maps), inplace=True)
        maps, gate = block.conv_depth(maps)[:, :, kept].chunk(2, dim=1)
        return block.conv_point(maps * F.silu(gate)).flatten(2).transpose(1, 2)
    states = F.silu(pointwise(block.conv_inverted, states, size), inplace=True)
    maps, gate = block.conv_depth(states.unflatten(1, size).permute(0, 3, 1, 2))[:, :, kept].chunk(2, dim=1)
    del states
    maps = (maps * F.silu(gate)).permute(0, 2, 3, 1)
    return pointwise(block.conv_point, maps.flatten(1, 2), (maps.shape[1], size[1]))
