"""The forward of SANA-Video's transformers for sampling, with the prompt's part computed once as in forward.py.

The module's layers choose the arithmetic. Self-attention is linear, gated linear or gated softmax. It rotates queries
and keys by time, row and column. The feed-forward is the images' one with a convolution over time, or a
SwiGLU. Sublayers of SANA-Video 2.0 read a mean of earlier states (DepthStates). Each frame may have its own time,
because some frames are given. Hidden states are [B, T, S, D]: T frames of S positions. Sources: NVlabs/Sana,
diffusion/model/nets/{sana_multi_scale_video,sana_blocks,basic_modules,sana_video2,sana_video2_blocks}.py; diffusers,
models/transformers/transformer_sana_video.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F

from ..model import block as image
from ..model.block import NO_KERNELS, Constants, cross_attention, split_heads
from ..model.forward import modulate, prompt_constants
from ..model.reference import reference_of

if TYPE_CHECKING:
    from diffusers import ModelMixin
    from diffusers.models.attention_processor import Attention
    from diffusers.models.transformers.transformer_sana_video import SanaVideoTransformerBlock

    # diffusers' SanaVideoTransformer3DModel, or SanaVideo2Transformer3DModel. transformer.py imports this module.
    VideoTransformer: TypeAlias = ModelMixin

THETA = 10000.0
# positions whose queries and keys are in float32 at a time: all at once they would be the forward's peak
PART = 2**14
# queries whose scores are in memory at a time where torch has no tiled attention: 0.5 GB in float32 for 193 frames of
# 1280 x 736 pixels, where the scores of all queries have 21 GB
QUERIES = 512


@torch.no_grad()
def prepare(
    transformer: VideoTransformer,
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
    blocks: Any = transformer.transformer_blocks
    dims = {tables.shape[-1] // block.attn1.heads for block in blocks}
    turns = {dim: rotation(dim, size).to(embeds.device) for dim in dims}
    eps = reference_of(transformer).attention_eps
    return Constants(keys, values, bias, None, tables, NO_KERNELS, eps, turns)


def grid(transformer: VideoTransformer, latent: tuple[int, ...]) -> tuple[int, ...]:
    """Return frames, rows and columns of the patches of a `latent` of frames, height and width."""
    return tuple(length // side for length, side in zip(latent, transformer.config.patch_size, strict=True))


def rotation(dim: int, size: tuple[int, ...]) -> torch.Tensor:
    """Return the rotations of the pairs of a head's `dim` channels, complex64 [T, S, dim / 2].

    A third of the pairs depends on the row, a third on the column, and the rest, which is larger, on the frame.
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
    transformer: VideoTransformer, x: torch.Tensor, timestep: torch.Tensor, constants: Constants
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
    depth = DepthStates(transformer.attn_res) if hasattr(transformer, "attn_res") else None
    for i, block in enumerate(transformer.transformer_blocks):
        if depth is not None and i % transformer.config.group_layers == 0:
            depth.append(hidden)
            hidden = None
        hidden = run_block(block, i, hidden, modulation[:, :, i], constants, size, depth)
    if depth is not None:
        depth.append(hidden)
        hidden = depth.mix("final_proj", None)
    embedded = embedded.view(len(x), -1, 1, embedded.shape[-1])
    shift, scale = (table + embedded for table in transformer.scale_shift_table.to(hidden.dtype))
    out = transformer.proj_out(torch.addcmul(shift, transformer.norm_out.norm(hidden), 1 + scale))
    out = out.unflatten(2, size[1:]).unflatten(-1, (*transformer.config.patch_size, -1))
    return out.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(len(x), -1, *x.shape[2:])


class DepthStates:
    """The states of SANA-Video 2.0: the embedded patches, and the sum of the updates of each finished group of layers.

    A sublayer reads their weighted mean, together with the unfinished sum of its own group. The weights are a softmax
    over the states. The score of a state is the product of a query with the state, divided by its root mean square.
    """

    def __init__(self, queries: torch.nn.Module) -> None:
        self.queries = queries
        self.states: list[torch.Tensor] = []
        self.scores: dict[str, list[torch.Tensor]] = {name: [] for name in queries._modules}

    def append(self, state: torch.Tensor) -> None:
        """Add the state of a finished group."""
        self.states.append(state)
        for name, scores in self.scores.items():
            scores.append(self.score(name, state))

    def score(self, name: str, state: torch.Tensor) -> torch.Tensor:
        """Return the score [B, T, S, 1] of a state, in float32."""
        length = torch.linalg.vector_norm(state, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(length.square() / state.shape[-1] + 1e-6)
        return self.queries.get_submodule(name)(state).float() * scale

    def mix(self, name: str, current: torch.Tensor | None) -> torch.Tensor:
        """Return the mean of the finished states and of `current`, the unfinished one, by the query `name`."""
        states, scores = self.states, self.scores[name]
        if current is not None:
            states, scores = [*states, current], [*scores, self.score(name, current)]
        if len(states) == 1:
            return states[0]
        weights = torch.stack(scores).softmax(0).to(states[0].dtype)
        mean = states[0] * weights[0]
        for state, weight in zip(states[1:], weights[1:], strict=True):
            mean.addcmul_(state, weight)
        return mean


def run_block(
    block: SanaVideoTransformerBlock,
    i: int,
    hidden: torch.Tensor | None,
    modulation: torch.Tensor,
    constants: Constants,
    size: tuple[int, ...],
    depth: DepthStates | None = None,
) -> torch.Tensor:
    """Run transformer block `i` by its `modulation` [B, T or 1, 6, 1, D]. Returns the new hidden states.

    `size`: frames, rows and columns. With `depth`, the hidden states are the sum of the group, None before its first
    block.
    """
    shift_attention, scale_attention, gate_attention, shift_forward, scale_forward, gate_forward = modulation.unbind(2)
    source: Any = hidden if depth is None else depth.mix("attn_proj", hidden)
    states = torch.addcmul(shift_attention, block.norm1(source), scale_attention)
    update = self_attention(block.attn1, states, constants)
    # Free them before the cross-attention allocates its tensors.
    del states
    attended = torch.addcmul(source, gate_attention, update)
    crossed = cross_attention(
        block.attn2, attended.flatten(1, 2), constants.keys[i], constants.values[i], constants.bias
    ).view_as(attended)
    if depth is None:
        hidden = source = attended + crossed
    else:
        update = torch.addcmul(crossed, gate_attention, update)
        hidden = update if hidden is None else hidden + update
        source = depth.mix("mlp_proj", hidden)
    del update, attended, crossed
    states = torch.addcmul(shift_forward, block.norm2(source), scale_forward)
    del source
    return torch.addcmul(hidden, gate_forward, feed_forward(block.ff, states, size))


def self_attention(attention: Attention, states: torch.Tensor, constants: Constants) -> torch.Tensor:
    """Attention over all positions of `states` [B, T, S, D], with rotated queries and keys.

    SANA-Video 2.0 multiplies the result by a gate, and has softmax in the layers without `to_beta`.
    """
    turns = constants.turns[states.shape[-1] // attention.heads]  # type: ignore[index]
    gate = getattr(attention, "to_gate", None)
    if gate is None or hasattr(attention, "to_beta"):
        out = linear_attention(attention, states, turns, constants.eps)
    else:
        out = softmax_attention(attention, states, turns)
    return attention.to_out[0](out if gate is None else out * gate(states).sigmoid())


def linear_attention(attention: Attention, states: torch.Tensor, turns: torch.Tensor, eps: float) -> torch.Tensor:
    """Linear attention, summed in float32, a few frames at a time.

    SANA-Video has a ReLU, and divides rotated queries and keys by plain ones. SANA-Video 2.0 weighs the keys by
    `to_beta`, and normalises each head in place of the division.
    """
    frames, heads = max(1, PART // states.shape[2]), attention.heads
    parts = [part.flatten(0, 1) for part in turns.split(frames)]
    weights = attention.to_beta(states).sigmoid().split(frames, 1) if hasattr(attention, "to_beta") else None
    key, value = attention.norm_k(attention.to_k(states)), attention.to_v(states)
    sums: torch.Tensor | float = 0.0
    total: torch.Tensor | float = 0.0
    for i, (keys, values) in enumerate(zip(key.split(frames, 1), value.split(frames, 1), strict=True)):
        keys = wide_heads(keys, heads)
        if weights is None:
            keys = F.relu(keys)
            total = total + keys.sum(2)[..., None]
        else:
            keys = keys * wide_heads(weights[i], heads)
        sums = sums + rotate(keys, parts[i]).transpose(2, 3) @ wide_heads(values, heads)
    del key, value, keys, values
    query = attention.norm_q(attention.to_q(states))
    for part, turn in zip(query.split(frames, 1), parts, strict=True):
        queries = wide_heads(part, heads)
        if weights is None:
            queries = F.relu(queries)
            out = rotate(queries, turn) @ sums / (queries @ total + eps)
        else:
            out = attention.norm_out(rotate(queries, turn) @ sums)
        part.copy_(out.transpose(1, 2).reshape(part.shape))
    return query


def softmax_attention(attention: Attention, states: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """SANA-Video 2.0's in every fourth layer, in the dtype of the states, rotated in float32."""
    frames, heads = max(1, PART // states.shape[2]), attention.heads
    query, key = attention.norm_q(attention.to_q(states)), attention.norm_k(attention.to_k(states))
    for rotated_states in (query, key):
        for part, turn in zip(rotated_states.split(frames, 1), turns.split(frames), strict=True):
            rotated = rotate(wide_heads(part, heads), turn.flatten(0, 1))
            part.copy_(rotated.transpose(1, 2).reshape(part.shape))
    query, key, value = (split_heads(x.flatten(1, 2), heads) for x in (query, key, attention.to_v(states)))
    # The rows of a softmax are independent. The results replace the queries.
    for part in query.split(query.shape[2] if is_tiled(query, key, value) else QUERIES, 2):
        part.copy_(F.scaled_dot_product_attention(part, key, value))
    return query.transpose(1, 2).reshape(states.shape)


def is_tiled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch computes the attention in tiles. Otherwise it allocates the scores of all queries."""
    if query.device.type == "mps":
        return False
    # The compiler cannot trace the question.
    if torch.compiler.is_compiling():
        return True
    try:
        return torch._fused_sdp_choice(query, key, value) > 0
    except NotImplementedError:
        # This build of torch lacks the operator for the device, such as an XPU.
        return True


def wide_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, T, S, heads * d] to float32 [B, heads, T * S, d]."""
    return split_heads(states.flatten(1, 2), heads).float()


def rotate(states: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Return float32 `states` [B, heads, N, d], each two neighbouring channels times a complex `turn` [N, d / 2]."""
    return torch.view_as_real(torch.view_as_complex(states.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def feed_forward(block: Any, states: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Return the feed-forward of `states` [B, T, S, D].

    `block`: a SwiGLU, or a GLUMBTempConv, which is the images' feed-forward on each frame and a convolution over time.
    """
    if not hasattr(block, "conv_temp"):
        return block.down_proj(F.silu(block.gate_proj(states), inplace=True).mul_(block.up_proj(states)))
    maps = image.feed_forward(block, states.flatten(0, 1), size[1:]).view_as(states)  # type: ignore[arg-type]
    return maps + block.conv_temp(maps.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
