"""The forward of SANA's transformer for sampling. It computes once what does not change between steps.

diffusers.SanaTransformer2DModel projects the caption and computes the keys and values of every cross-attention again in
each step, although they depend on the prompt alone. Here `prepare` computes them once, up to the last token that the
mask keeps. `velocity` computes the rest in each step. Both call the layers of the module, so that LoRA, casting and
offloading work. They are not for training, which uses the forward of diffusers. Where NVIDIA's code and diffusers
differ, they follow the module's reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..errors import InputError
from ..kernels.trial import kernels_on
from ..runtime.accelerator import has_float64
from .block import (
    BlockInputs,
    Carried,
    Constants,
    Perturbation,
    RowOperations,
    add,
    add_then_norm,
    run_block,
    split_heads,
)
from .reference import all_blocks, reference_of
from .row_shards import Shard, shard_constants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from diffusers import SanaControlNetModel, SanaTransformer2DModel, SanaVideoTransformer3DModel


# Head sizes that the fused kernel of the linear attention supports.
FUSED_HEADS = (16, 32, 64)
# diffusers adds this to the attention scores of masked tokens. Their weight becomes exactly 0.
DROPPED = -10000.0


def check_mask(field: str, mask: torch.Tensor) -> None:
    """Raise InputError if a prompt in `mask` [P, T] has no token. Attention over no token has no meaning."""
    if not (mask != 0).any(1).all():
        raise InputError(f"{field}: got a prompt without a token, expected at least one; encode the text again")


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
        # The rows in memory have a multiple of 8 tokens. Otherwise accelerators copy the bias in each attention.
        bias = F.pad((1 - mask.to(embeds.dtype)) * DROPPED, (0, -length % 8))[:, None, None, :length]
    # ComfyUI may compute in another dtype than these parameters have, and it does not cast them.
    tables = torch.stack([block.scale_shift_table for block in blocks]).to(embeds.dtype)
    return keys, values, bias, tables


def pad_prompts(constants: Constants, length: int) -> Constants:
    """Return `constants` with prompts padded to `length` tokens. The padding gets no attention.

    With equal lengths, one compiled forward and its CUDA graphs serve all prompts.
    """
    first_keys = constants.keys[0]
    bias = (
        first_keys.new_zeros(len(first_keys), 1, 1, first_keys.shape[2]) if constants.bias is None else constants.bias
    )
    more = length - first_keys.shape[2]
    # The rows in memory have a multiple of 8 tokens, as in prompt_constants.
    bias = F.pad(F.pad(bias, (0, more), value=DROPPED), (0, -length % 8))[..., :length]
    keys, values = ([F.pad(part, (0, 0, 0, more)) for part in parts] for parts in (constants.keys, constants.values))
    return constants._replace(keys=keys, values=values, bias=bias)


def position_embedding(
    transformer: SanaTransformer2DModel | SanaControlNetModel, like: torch.Tensor, height: int, width: int
) -> torch.Tensor | None:
    """Return the position embedding for latents of `height` x `width` cells, or None for models below 2K."""
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
            # It computes in float64. The result is rounded to float32 below.
            device=like.device if has_float64(like.device) else torch.device("cpu"),
            output_type="pt",
        )
        .float()[None]
        .to(like.device)
    )


def allow_no_float64(transformer: SanaTransformer2DModel | SanaControlNetModel, device: torch.device) -> None:
    """Let diffusers' forward of `transformer` work on a `device` without float64.

    For an image size that differs from the config's, diffusers computes the position embedding on the device in
    float64.
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
    blocks: Iterable[torch.nn.Module] | None = None,
) -> torch.Tensor:
    """Return the velocity [B, 32, h, w] at `x` [B, 32, h, w] and `timestep` [B], as the model's reference computes it.

    B is a multiple of the P prompts in `constants`. Each prompt has B / P consecutive images. `timestep` and `guidance`
    [B] are already in the model's scale. Only distilled models have `guidance`. `control`: output of
    `control_residuals`; residual i is added after block i. `ops`: for a shard. Then `x`, the position embedding and
    `control` have only the rows of the shard. `blocks`: the blocks of `transformer`, whose iterator loads weights.
    """
    height, width = x.shape[-2:]
    patch = transformer.config.patch_size
    size = height // patch, width // patch
    carried: Carried = embed(transformer, x, constants.position, ops), None
    time, embedded = embed_time(transformer, timestep, carried[0], guidance, ops)
    inputs = BlockInputs(modulate(constants, time), constants, size, ops)
    for i, block in enumerate(transformer.transformer_blocks if blocks is None else blocks):
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
    """Run `forward` on one shard: slice the inputs to its rows and move them to its device.

    `forward` is `velocity` with its first argument bound. The other arguments are for the whole batch and image. They
    may be on any device.
    """
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
    """Normalise and modulate the hidden states for the last layer.

    `carried`: output of the last block. `embedded`: embedded time [B, D].
    """
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
    """Return the hidden states [B, N, D] of latents [B, 32, h, w]."""
    if ops is None:
        # Contiguous, because all later norms and sums would keep the transposed layout.
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
    """Return the modulation of the blocks [B, 6 D], and the embedded time [B, D] for the last layer."""
    if ops is not None and len(timestep) == 1 and hidden.device.type == "cpu":
        # CPUs multiply a single row with another kernel, which gives other bits than in a batch. So compute two rows.
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
