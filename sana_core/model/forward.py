"""The forward of SANA's transformer for sampling: what does not change over the steps is computed once.

diffusers.SanaTransformer2DModel computes the caption's projection and the keys and values of every cross-attention,
which depend on the prompt alone, again in each step. Here `prepare` computes them once, for the tokens that the mask
keeps, and `velocity` is the rest. It calls the modules' own layers, so that LoRA, casting and offloading work, and has
no gradient's needs in mind: training uses the library's forward. What NVIDIA's code and diffusers' compute differently
follows the module's reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..kernels.trial import kernels_on
from ..runtime.accelerator import has_float64
from .block import BlockInputs, Carried, add, add_then_norm, run_block, split_heads
from .constants import Constants, Perturbation, RowOperations
from .reference import all_blocks, reference_of
from .row_shards import Shard, shard_constants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffusers import SanaControlNetModel, SanaTransformer2DModel, SanaVideoTransformer3DModel


# head sizes of the linear attention that its kernels take: powers of two that a product of matrices can have
FUSED_HEADS = (16, 32, 64)
# what diffusers adds to the attention scores of tokens that the mask drops; their weight becomes exactly 0
DROPPED = -10000.0


def longest_prompt(mask: torch.Tensor) -> int:
    """Return the number of tokens up to the last one that `mask` [P, T] keeps, at least 1."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return max(1, int((positions * (mask != 0)).max()))


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
    keys, values, bias, tables = prompt_constants(transformer, embeds, mask)
    kernels = kernels_on(embeds.device, embeds.dtype)
    if transformer.config.attention_head_dim not in FUSED_HEADS:
        kernels -= {"linear_attention"}
    position, eps = position_embedding(transformer, embeds, height, width), reference_of(transformer).attention_eps
    return Constants(keys, values, bias, position, tables, kernels, eps)


def prompt_constants(
    transformer: SanaTransformer2DModel | SanaControlNetModel | SanaVideoTransformer3DModel,
    embeds: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
    """Return keys, values, bias and tables of Constants for prompts `embeds` [P, T, C], `mask` [P, T]."""
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
    return keys, values, bias, tables


def pad_prompts(constants: Constants, length: int) -> Constants:
    """Return `constants` with prompts of `length` tokens, of which those that are added get no attention: then one
    compiled forward, and its CUDA graphs, serve every prompt."""
    own = constants.keys[0]
    bias = own.new_zeros(len(own), 1, 1, own.shape[2]) if constants.bias is None else constants.bias
    more = length - own.shape[2]
    # in memory for 8 tokens more, as in prompt_constants
    bias = F.pad(F.pad(bias, (0, more), value=DROPPED), (0, -length % 8))[..., :length]
    keys, values = ([F.pad(part, (0, 0, 0, more)) for part in parts] for parts in (constants.keys, constants.values))
    return constants._replace(keys=keys, values=values, bias=bias)


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

    return (
        get_2d_sincos_pos_embed(
            patch.pos_embed.shape[-1],
            (height // patch.patch_size, width // patch.patch_size),
            base_size=patch.base_size,
            interpolation_scale=patch.interpolation_scale,
            # It computes in float64, and rounds to float32 in the end.
            device=like.device if has_float64(like.device) else torch.device("cpu"),
            output_type="pt",
        )
        .float()[None]
        .to(like.device)
    )


def allow_no_float64(transformer: SanaTransformer2DModel | SanaControlNetModel, device: torch.device) -> None:
    """Let diffusers' forward of `transformer` work on a `device` without float64.

    diffusers computes the position embedding of an image size that the config does not have in float64 on the device.
    """
    patch = transformer.patch_embed
    if patch.pos_embed is None or has_float64(device):
        return

    def forward(latent: torch.Tensor) -> torch.Tensor:
        states = patch.proj(latent).flatten(2).transpose(1, 2)
        position = position_embedding(transformer, latent, *latent.shape[-2:])
        return (states + position).to(states.dtype)

    patch.forward = forward


def velocity(
    transformer: SanaTransformer2DModel,
    x: torch.Tensor,
    timestep: torch.Tensor,
    constants: Constants,
    guidance: torch.Tensor | None = None,
    perturbation: Perturbation | None = None,
    control: Sequence[torch.Tensor | None] = (),
    ops: RowOperations | None = None,
) -> torch.Tensor:
    """Return the velocity [B, 32, h, w] at `x` [B, 32, h, w] and `timestep` [B], as the model's reference computes it.

    B is a multiple of the P prompts in `constants`; each prompt has B / P images, one after another. `timestep` and
    `guidance` [B], that of distilled models, are already in the model's scale. `control` are the residuals of
    `control_residuals`: number i is added after block i. With the `ops` of a shard, `x`, the position embedding and
    `control` are those of its rows.
    """
    height, width = x.shape[-2:]
    patch = transformer.config.patch_size
    size = height // patch, width // patch
    carried: Carried = embed(transformer, x, constants.position, ops), None
    time, embedded = embed_time(transformer, timestep, carried[0], guidance, ops)
    inputs = BlockInputs(modulate(constants, time), constants, size, ops)
    for i, block in enumerate(transformer.transformer_blocks):
        images = perturbation.images if perturbation is not None and i in perturbation.blocks else None
        carried = run_block(block, i, carried, inputs, images)
        residual = control[i] if i < len(control) else None
        if residual is not None:
            hidden = add(*carried, constants.kernels)
            carried = hidden + residual.to(hidden.dtype), None
    out = transformer.proj_out(last_norm(transformer, carried, embedded, constants.kernels))
    out = out.unflatten(1, size).unflatten(-1, (patch, patch, -1))
    return out.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, height, width)


def shard_velocity(
    forward: Callable[..., torch.Tensor],
    shard: Shard,
    timestep: torch.Tensor,
    constants: Constants,
    guidance: torch.Tensor | None,
    perturbation: Perturbation | None,
    control: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Return what `forward`, `velocity` of a transformer, does for `shard`, of what the whole batch and image have, on
    whichever device."""
    x, spec, columns = shard.x, shard.spec, shard.x.shape[3]
    rows = slice(spec.span.start * columns, spec.span.stop * columns)
    residuals = [None if one is None else spec.part(one)[:, rows].to(x.device) for one in control]
    scale = None if guidance is None else spec.part(guidance).to(x.device)
    if perturbation is not None:
        perturbation = perturbation._replace(images=spec.part(perturbation.images).to(x.device))
    part, time = shard_constants(constants, shard), spec.part(timestep).to(x.device)
    return forward(x, time, part, scale, perturbation, residuals, shard.ops)


def last_norm(
    transformer: SanaTransformer2DModel,
    carried: Carried,
    embedded: torch.Tensor,
    kernels: frozenset[str],
) -> torch.Tensor:
    """Return what the last layer projects, of what the last block returns and the `embedded` time [B, D]."""
    table = transformer.scale_shift_table.to(carried[0].dtype)
    if "modulation" not in kernels:
        return transformer.norm_out(add(*carried), embedded, table)
    shift, scale = (table + embedded[:, None]).chunk(2, dim=1)
    return add_then_norm(*carried, transformer.norm_out.norm, shift, 1 + scale, kernels)[1]


def embed(
    model: SanaTransformer2DModel | SanaControlNetModel,
    x: torch.Tensor,
    position: torch.Tensor | None,
    ops: RowOperations | None = None,
) -> torch.Tensor:
    """[B, 32, h, w] to hidden states [B, N, D]."""
    if ops is None:
        # contiguous, or every norm and sum that follows would carry the transposed layout on
        hidden = model.patch_embed.proj(x).flatten(2).transpose(1, 2).contiguous()
    else:
        hidden = ops.embed(model.patch_embed.proj, x)
    return hidden if position is None else (hidden + position).to(hidden.dtype)


def embed_time(
    model: SanaTransformer2DModel | SanaControlNetModel,
    timestep: torch.Tensor,
    hidden: torch.Tensor,
    guidance: torch.Tensor | None = None,
    ops: RowOperations | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what modulates the blocks [B, 6 D], and the embedded time [B, D], which the last layer takes."""
    if ops is not None and len(timestep) == 1 and hidden.device.type == "cpu":
        # as a row of more: alone, CPUs multiply it by another kernel, to other bits than in a batch
        two = None if guidance is None else guidance.expand(2)
        time, embedded = embed_time(model, timestep.expand(2), hidden.expand(2, -1, -1), two)
        return time[:1], embedded[:1]
    if guidance is None:
        return model.time_embed(timestep, batch_size=len(hidden), hidden_dtype=hidden.dtype)
    return model.time_embed(timestep, guidance=guidance, hidden_dtype=hidden.dtype)


def modulate(constants: Constants, time: torch.Tensor) -> torch.Tensor:
    """Return [B, L, 6, 1, D]: shift, 1 + scale and gate of self-attention, then of the feed-forward."""
    modulation = (constants.tables + time.view(len(time), 1, 6, -1)).unsqueeze(3)
    modulation[:, :, 1::3] += 1
    return modulation
