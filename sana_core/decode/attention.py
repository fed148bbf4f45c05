"""EfficientViT blocks in strips of rows, with the sums of linear attention over the whole image.

Each block passes over its input twice. The first pass computes only keys and values and sums value @ key^T. The second
pass computes only queries and applies the sums. Each projection is therefore computed once. diffusers concatenates the
projections q, k and v and reads groups of 3 * 32 channels as one head's q, k and v. A head's queries therefore come
from all three matrices.

The terms of the sums are pieces of fixed height, added from top to bottom. The result therefore depends neither on the
height of the strips nor on the number of devices. With a single piece of all rows, it is bit-identical to diffusers on
a CPU in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..runtime.cancellation import Poll
from .fused import flat, fuses, gated_depthwise
from .row_partition import RowPartition
from .streaming import Block, Carry, activate_into, empty, norm_into
from .workspace import Workspace, chunks

# Indices of query, key and value.
QUERY, KEY_VALUE = (0,), (1, 2)
# Rows above and below that the depthwise 3x3 convolution of the gated feed-forward reads.
GLU_HALO = 1


def halo(attn: Block) -> int:
    """Return the number of rows above and below that the attention's widest projection reads."""
    return max((scale.proj_in.kernel_size[0] // 2 for scale in attn.to_qkv_multiscale), default=0)


class Scale(NamedTuple):
    """The weights of one module of `to_qkv_multiscale`."""

    # [heads * parts * d, 1, k, k]
    depthwise: torch.Tensor
    # [heads * parts, d, d]
    pointwise: torch.Tensor


class Projection(NamedTuple):
    """The weights that project a block's input to queries, or to keys and values."""

    # [heads * parts * d, C]
    weight: torch.Tensor
    scales: list[Scale]


def projection(attn: Block, parts: tuple[int, ...]) -> Projection:
    """Select the weights of `parts`, which is QUERY or KEY_VALUE."""
    d = attn.attention_head_dim

    def pick(weight: torch.Tensor) -> torch.Tensor:
        # A slice, because a tuple of indices would be copied to the device.
        return weight.unflatten(0, (-1, 3, d))[:, parts[0] : parts[-1] + 1].flatten(0, 2)

    scales = [
        Scale(pick(scale.proj_in.weight), pick(scale.proj_out.weight.flatten(1)).unflatten(0, (-1, d)))
        for scale in attn.to_qkv_multiscale
    ]
    # A head's query, key and value are adjacent in the concatenated matrices. They may come from different matrices.
    rows = [part for matrix in (attn.to_q, attn.to_k, attn.to_v) for part in matrix.weight.split(d)]
    chosen = [part for index, part in enumerate(rows) if index % 3 in parts]
    return Projection(torch.cat(chosen), scales)


class InputRows(NamedTuple):
    """The input rows `low` to `high` that a layer reads, and the zero rows `above` and `below` the image's edges."""

    low: int
    high: int
    above: int
    below: int


def input_rows(height: int, start: int, stop: int, reach: int) -> InputRows:
    """Return the rows of a map of `height` rows that a layer reads for output rows `start` to `stop`.

    `reach`: rows that it reads above and below each output row.
    """
    return InputRows(
        max(0, start - reach), min(height, stop + reach), max(0, reach - start), max(0, stop + reach - height)
    )


def strips(low: int, high: int, start: int, rows: int, reach: int) -> Iterator[tuple[int, int]]:
    """Yield the input rows (begin, end) of each strip between `low` and `high`.

    Each strip completes `rows` output rows, and the first output row is `start`.
    """
    edges = [low, *range(start + rows + reach, high, rows), high]
    yield from itertools.pairwise(edges)


class Window(Carry):
    """A carry whose window is in a workspace, from the writing of its rows to their reading."""

    def __init__(self, workspace: Workspace, overlap: int, inputs: InputRows) -> None:
        super().__init__(overlap, inputs.above, inputs.below)
        self.workspace = workspace

    def rows(self, channels: int, count: int, width: int) -> torch.Tensor:
        """Return uninitialised memory for the next `count` rows, which the caller writes."""
        self.memory = self.workspace.map(channels, self.overlap + count + self.zeros_below, width)
        return self.memory[:, :, self.overlap : self.overlap + count]

    def joined(self, count: int, last: bool) -> torch.Tensor:
        """Return the rows that were written, with the carried rows or zeros around them."""
        return self.window(self.memory, self.overlap, count, last, self.workspace)


class StreamedProjection:
    """Projects strips of the input to one map [B, heads, parts * d, n * W] per scale."""

    def __init__(self, attn: Block, parts: tuple[int, ...], inputs: InputRows, workspace: Workspace) -> None:
        self.parts, self.d, self.workspace = len(parts), attn.attention_head_dim, workspace
        self.weights = projection(attn, parts)
        self.reach = halo(attn)
        self.carry = Window(workspace, 2 * self.reach, inputs)

    def __call__(self, rows: torch.Tensor, last: bool) -> list[torch.Tensor]:
        # Carry the output of the matrix rather than its input, because the matrix is nearly all of the work.
        weight, width = self.weights.weight, rows.shape[3]
        projected = self.carry.rows(len(weight), rows.shape[2], width)
        torch.mm(rows.movedim(1, -1).flatten(0, 2), weight.T, out=flat(projected[0]))
        window = self.carry.joined(rows.shape[2], last)
        count = window.shape[2] - 2 * self.reach
        maps = [self.heads(window[:, :, self.reach : self.reach + count])]
        for scale in self.weights.scales:
            k = scale.depthwise.shape[-1]
            skip = self.reach - k // 2
            inner = window[:, :, skip : window.shape[2] - skip]
            mixed = window.new_empty(len(scale.pointwise), self.d, count * width)
            for start, stop in self.workspace.pieces(count, len(weight) * width):
                part = inner[:, :, start : stop + k - 1]
                spread = functional.conv2d(part, scale.depthwise, padding=(0, k // 2), groups=inner.shape[1])
                torch.bmm(scale.pointwise, self.heads(spread)[0], out=mixed[..., start * width : stop * width])
                del spread
            maps.append(mixed[None])
        return [scale_map.unflatten(1, (-1, self.parts)).flatten(2, 3) for scale_map in maps]

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view [B, heads * parts, d, n * W] of `x` [B, heads * parts * d, n, W], channels-last."""
        return x.movedim(1, -1).flatten(1, 2).unflatten(2, (-1, self.d)).permute(0, 2, 3, 1)


def score_pieces(
    attn: Block, x: RowPartition, span: range, rows: int, piece: int, workspace: Workspace, poll: Poll
) -> Iterator[torch.Tensor]:
    """Yield value @ key^T [B, scales * heads, d + 1, d] in fp32, for every `piece` rows of the rows `span` of `x`.

    `rows`: rows processed at a time, a multiple of `piece`. `x` is the whole map, or a part of it that includes the
    rows above and below that the projections read.
    """
    reach, d, width = halo(attn), attn.attention_head_dim, x.width
    inputs = input_rows(x.height, span.start, span.stop, reach)
    project = StreamedProjection(attn, KEY_VALUE, inputs, workspace)
    for begin, end in strips(inputs.low, inputs.high, span.start, rows, reach):
        poll()
        maps = project(x.rows(begin, end), end == inputs.high)
        if x.parts[0].device.type != "cpu":
            yield from batched_scores(maps, piece * width, d)
            continue
        maps = [scale_map.float() for scale_map in maps]
        for left, right in chunks(maps[0].shape[-1], piece * width):
            yield torch.cat([piece_scores(scale_map[..., left:right], d) for scale_map in maps], dim=1)


def batched_scores(maps: list[torch.Tensor], size: int, d: int) -> Iterator[torch.Tensor]:
    """Yield the scores of every `size` positions of `maps`. All are computed at once, with few launches."""
    count = maps[0].shape[-1]
    # Positions in pieces of full size.
    full = count // size * size
    if full:
        # In fp32, with the piece as the first dimension, so that one batched product computes all pieces.
        stacked = [scale_map[..., :full].unflatten(-1, (-1, size)).movedim(-2, 0) for scale_map in maps]
        contiguous = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
        yield from torch.cat([piece_scores(pieces.to(**contiguous), d) for pieces in stacked], dim=2)
    if full < count:
        yield torch.cat([piece_scores(scale_map[..., full:].float(), d) for scale_map in maps], dim=1)


def piece_scores(key_value: torch.Tensor, d: int) -> torch.Tensor:
    """Return value @ key^T of `key_value` [..., 2 d, N] in fp32. The keys are overwritten."""
    key, value = key_value.split(d, dim=-2)
    # A row of ones sums the keys. The result is divided by this sum.
    return functional.pad(value, (0, 0, 0, 1), value=1.0) @ key.relu_().mT


class StreamedAttention:
    """The second pass of linear attention, with the sums of the first pass, and its residual."""

    def __init__(self, attn: Block, scores: torch.Tensor, inputs: InputRows, workspace: Workspace) -> None:
        self.attn, self.scores = attn, scores
        self.project = StreamedProjection(attn, QUERY, inputs, workspace)
        self.residual = Residual(self.project.reach - inputs.above)

    def __call__(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        self.residual.push(rows)
        width = rows.shape[3]
        maps = [scale_map.float() for scale_map in self.project(rows, last)]
        if rows.device.type != "cpu":
            # A single map needs half the launches.
            maps = [torch.cat(maps, dim=1)]
        scores = self.scores.chunk(len(maps), dim=1)
        hidden = [self.attend(scale_scores, maps).to(rows.dtype).flatten(1, 2) for scale_scores in scores]
        window = (hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1)).unflatten(2, (-1, width))
        del hidden
        out = functional.linear(window.movedim(1, -1), self.attn.to_out.weight).movedim(-1, 1)
        norm_into(out, out, self.attn.norm_out, self.residual.pop(out.shape[2]))
        return out

    def attend(self, scores: torch.Tensor, queries: list[torch.Tensor]) -> torch.Tensor:
        """Return the attention of the first of `queries`. It is removed from the list, so that it is freed here."""
        out = scores @ queries.pop(0).relu_()
        return out[:, :, :-1].div_(out[:, :, -1:] + self.attn.eps)


class StreamedGlu:
    """The gated feed-forward, which contains a depthwise 3x3 convolution, and its residual."""

    def __init__(self, glu: Block, inputs: InputRows, workspace: Workspace) -> None:
        self.glu, self.workspace = glu, workspace
        self.carry = Window(workspace, 2 * GLU_HALO, inputs)
        self.residual = Residual(GLU_HALO - inputs.above)

    def __call__(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        self.residual.push(rows)
        glu, count, width = self.glu, rows.shape[2], rows.shape[3]
        hidden = self.carry.rows(glu.conv_inverted.out_channels, count, width)
        weight, bias = glu.conv_inverted.weight.flatten(1), glu.conv_inverted.bias
        torch.addmm(bias, rows.movedim(1, -1).flatten(0, 2), weight.T, out=flat(hidden[0]))
        # The fused kernel activates its input itself.
        fused = fuses(hidden, kernel="gated_depthwise")
        if not fused:
            activate_into(hidden, hidden, glu.nonlinearity)
        window = self.carry.joined(count, last)
        residual = self.residual.pop(window.shape[2] - 2 * GLU_HALO)
        if fused:
            out = pointwise(glu.conv_point, gated_depthwise(window, glu.conv_depth))
            norm_into(out, out, glu.norm, residual)
            return out
        out = empty(residual, residual.shape[1], residual.shape[2], width)
        for start, stop in self.workspace.pieces(out.shape[2], window.shape[1] * width):
            part = self.gated(window[:, :, start : stop + 2 * GLU_HALO])
            norm_into(out[:, :, start:stop], part, glu.norm, residual[:, :, start:stop])
            del part
        return out

    def gated(self, window: torch.Tensor) -> torch.Tensor:
        """Return the output rows of `window`, before the norm."""
        depth = self.glu.conv_depth
        hidden = functional.conv2d(window, depth.weight, depth.bias, padding=(0, 1), groups=depth.groups)
        value, gate = hidden.chunk(2, dim=1)
        activate_into(gate, gate, self.glu.nonlinearity)
        return pointwise(self.glu.conv_point, value.mul_(gate))


class Residual:
    """Holds a layer's input rows until the layer has computed the output rows that they are added to."""

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.rows: Any = None

    def push(self, rows: torch.Tensor) -> None:
        if self.rows is None:
            self.rows = rows[:, :, self.skip :]
        else:
            self.rows = torch.cat([self.rows, rows], dim=2)

    def pop(self, count: int) -> torch.Tensor:
        out = self.rows[:, :, :count]
        self.rows = self.rows[:, :, count:].clone()
        return out


def pointwise(conv: torch.nn.Conv2d, rows: torch.Tensor) -> torch.Tensor:
    """Return a 1x1 convolution of `rows`, as a matrix product: the number of rows does not change its rounding."""
    return functional.linear(rows.movedim(1, -1), conv.weight.flatten(1), conv.bias).movedim(-1, 1)


def attend_rows(
    block: Block, x: RowPartition, scores: torch.Tensor, span: range, rows: int, workspace: Workspace, poll: Poll
) -> Iterator[torch.Tensor]:
    """Yield the output rows `span` of the EfficientViTBlock `block`, from top to bottom, about `rows` at a time."""
    reach = halo(block.attn)
    glu = input_rows(x.height, span.start, span.stop, GLU_HALO)
    attention = input_rows(x.height, glu.low, glu.high, reach)
    attend = StreamedAttention(block.attn, scores, attention, workspace)
    feed_forward = StreamedGlu(block.conv_out, glu, workspace)
    for begin, end in strips(attention.low, attention.high, span.start, rows, reach + GLU_HALO):
        poll()
        last = end == attention.high
        hidden = attend(x.rows(begin, end), last)
        poll()
        hidden = feed_forward(hidden, last)
        yield hidden
        del hidden
