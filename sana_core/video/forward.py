"""The forward of SANA-Video's transformer for sampling, with the prompt's part computed once as in forward.py.

Linear attention whose queries and keys are rotated by time, row and column; a feed-forward on each frame and a
convolution over time behind it; a time for each frame where some frames are given. Hidden states are [B, T, S, D]: T
frames of S positions. Sources: NVlabs/Sana, diffusion/model/nets/{sana_multi_scale_video,sana_blocks,basic_modules}.py;
diffusers, models/transformers/transformer_sana_video.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..model import block as image
from ..model.block import NO_KERNELS, cross_attention, split_heads
from ..model.forward import modulate, prompt_constants
from ..model.forward_inputs import Constants
from ..model.reference import reference_of

if TYPE_CHECKING:
    from diffusers import SanaVideoTransformer3DModel
    from diffusers.models.attention_processor import Attention
    from diffusers.models.transformers.transformer_sana_video import GLUMBTempConv, SanaVideoTransformerBlock

THETA = 10000.0
# positions whose queries and keys are in float32 at a time: all at once they would be the forward's peak
PART = 2**14


@torch.no_grad()
def prepare(
    transformer: SanaVideoTransformer3DModel,
    embeds: torch.Tensor,
    mask: torch.Tensor,
    frames: int,
    height: int,
    width: int,
) -> Constants:
    """Return the constants of prompts `embeds` [P, T, C], `mask` [P, T] and latents of that size.

    The embeddings must be in the dtype and on the device of the forward.
    """
    keys, values, bias, tables = prompt_constants(transformer, embeds, mask)
    size = grid(transformer, (frames, height, width))
    turns = rotation(transformer.config.attention_head_dim, size).to(embeds.device)
    return Constants(keys, values, bias, turns, tables, NO_KERNELS, reference_of(transformer).attention_eps)


def grid(transformer: SanaVideoTransformer3DModel, latent: tuple[int, ...]) -> tuple[int, ...]:
    """Return frames, rows and columns of the patches of a `latent` of frames, height and width."""
    return tuple(length // side for length, side in zip(latent, transformer.config.patch_size, strict=True))


def rotation(dim: int, size: tuple[int, ...]) -> torch.Tensor:
    """Return what pairs of a head's `dim` channels are multiplied by, complex64 [T, S, dim / 2].

    A third of them turns with the row, one with the column, and the rest, which is more, with the frame.
    """
    side = 2 * (dim // 6)
    parts = []
    for axis, (length, channels) in enumerate(zip(size, (dim - 2 * side, side, side), strict=True)):
        rates = THETA ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
        shape = [length if axis == other else 1 for other in range(3)]
        parts.append(torch.polar(torch.ones_like(angles), angles).view(*shape, -1).expand(*size, -1))
    return torch.cat(parts, dim=-1).flatten(1, 2).to(torch.complex64)


def velocity(
    transformer: SanaVideoTransformer3DModel, x: torch.Tensor, timestep: torch.Tensor, constants: Constants
) -> torch.Tensor:
    """Return the velocity [B, C, T, h, w] at `x` [B, C, T, h, w], as the model's reference computes it.

    `timestep` is [B], or [B, T] with 0 for frames that are given, and in the model's scale. B is a multiple of the P
    prompts in `constants`, as for images.
    """
    size = grid(transformer, x.shape[2:])
    hidden = transformer.patch_embedding(x).flatten(3).permute(0, 2, 3, 1).contiguous()
    time, embedded = transformer.time_embed(timestep.flatten(), batch_size=len(x), hidden_dtype=hidden.dtype)
    # [B, T or 1, L, 6, 1, D]
    modulation = modulate(constants, time).unflatten(0, (len(x), -1))
    for i, block in enumerate(transformer.transformer_blocks):
        hidden = run_block(block, i, hidden, modulation[:, :, i], constants, size)
    embedded = embedded.view(len(x), -1, 1, embedded.shape[-1])
    shift, scale = (table + embedded for table in transformer.scale_shift_table.to(hidden.dtype))
    out = transformer.proj_out(torch.addcmul(shift, transformer.norm_out.norm(hidden), 1 + scale))
    out = out.unflatten(2, size[1:]).unflatten(-1, (*transformer.config.patch_size, -1))
    return out.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(len(x), -1, *x.shape[2:])


def run_block(
    block: SanaVideoTransformerBlock,
    i: int,
    hidden: torch.Tensor,
    modulation: torch.Tensor,
    constants: Constants,
    size: tuple[int, ...],
) -> torch.Tensor:
    """Return what the block after `block` gets of `hidden`, by its `modulation` [B, T or 1, 6, 1, D].

    It is number `i` of `constants`; `size` is frames, rows and columns.
    """
    shift_attention, scale_attention, gate_attention, shift_forward, scale_forward, gate_forward = modulation.unbind(2)
    states = torch.addcmul(shift_attention, block.norm1(hidden), scale_attention)
    hidden = torch.addcmul(hidden, gate_attention, self_attention(block.attn1, states, constants))
    # it makes room for the softmax's
    del states
    crossed = cross_attention(block.attn2, hidden.flatten(1, 2), constants.keys[i], constants.values[i], constants.bias)
    hidden = hidden + crossed.view_as(hidden)
    del crossed
    states = torch.addcmul(shift_forward, block.norm2(hidden), scale_forward)
    return torch.addcmul(hidden, gate_forward, feed_forward(block.ff, states, size))


def self_attention(attention: Attention, states: torch.Tensor, constants: Constants) -> torch.Tensor:
    """Linear attention over `states` [B, T, S, D]: rotated queries and keys above the line, plain ones below it.

    It is summed in float32, a few frames at a time.
    """
    frames, heads = max(1, PART // states.shape[2]), attention.heads
    turns = [part.flatten(0, 1) for part in constants.position.split(frames)]  # type: ignore[union-attr]
    key, value = attention.norm_k(attention.to_k(states)), attention.to_v(states)
    sums: torch.Tensor | float = 0.0
    total: torch.Tensor | float = 0.0
    for keys, values, turn in zip(key.split(frames, 1), value.split(frames, 1), turns, strict=True):
        keys = F.relu(wide_heads(keys, heads))
        total = total + keys.sum(2)[..., None]
        sums = sums + rotate(keys, turn).transpose(2, 3) @ wide_heads(values, heads)
    del key, value, keys, values
    query = attention.norm_q(attention.to_q(states))
    for part, turn in zip(query.split(frames, 1), turns, strict=True):
        queries = F.relu(wide_heads(part, heads))
        out = rotate(queries, turn) @ sums / (queries @ total + constants.eps)
        part.copy_(out.transpose(1, 2).reshape(part.shape))
    return attention.to_out[0](query)


def wide_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, T, S, heads * d] to float32 [B, heads, T * S, d]."""
    return split_heads(states.flatten(1, 2), heads).float()


def rotate(states: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Return float32 `states` [B, heads, N, d], each two neighbouring channels times a complex `turn` [N, d / 2]."""
    return torch.view_as_real(torch.view_as_complex(states.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def feed_forward(block: GLUMBTempConv, states: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """The images' feed-forward on each frame of `states` [B, T, S, D], and a convolution over time of what it gives."""
    maps = image.feed_forward(block, states.flatten(0, 1), size[1:]).view_as(states)  # type: ignore[arg-type]
    return maps + block.conv_temp(maps.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
