"""EfficientViT blocks in strips of rows, with the sums of linear attention over the whole image.

Two passes over a block's input. The first makes keys and values only and sums value @ key^T, the second makes queries
only and applies the sums: between them they do each projection once. diffusers projects q, k and v, concatenates them
and reads groups of 3 * 32 channels as one head's q, k and v, so a head's queries come from all three matrices.

The sums are added over pieces of fixed height from top to bottom. So the result depends neither on the height of the
strips nor on how many devices have shared them out. With one piece of all rows it has diffusers' bits on a CPU in fp32.
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

QUERY, KEY_VALUE = (0,), (1, 2)
# rows above and below that the second pass looks at: 2 for the 5x5 projection, 1 for the feed-forward
GLU_HALO = 1


def halo(attn: Block) -> int:
    """Return the rows above and below that the attention's widest projection reads."""
    return max((scale.proj_in.kernel_size[0] // 2 for scale in attn.to_qkv_multiscale), default=0)


class Scale(NamedTuple):
    """One of `to_qkv_multiscale`: depthwise weights [heads * parts * d, 1, k, k], pointwise [heads * parts, d, d]."""

    depthwise: torch.Tensor
    pointwise: torch.Tensor


class Projection(NamedTuple):
    """The weights that make some of each head's query, key and value (0, 1, 2) from the block's input."""

    weight: torch.Tensor  # [heads * parts * d, C]
    scales: list[Scale]


def projection(attn: Block, parts: tuple[int, ...]) -> Projection:
    d = attn.attention_head_dim

    def pick(weight: torch.Tensor) -> torch.Tensor:
        # a slice, since a tuple of numbers would be copied to the device
        return weight.unflatten(0, (-1, 3, d))[:, parts[0] : parts[-1] + 1].flatten(0, 2)

    scales = [
        Scale(pick(scale.proj_in.weight), pick(scale.proj_out.weight.flatten(1)).unflatten(0, (-1, d)))
        for scale in attn.to_qkv_multiscale
    ]
    # a head's query, key and value lie beside each other, of whichever matrix
    rows = [part for matrix in (attn.to_q, attn.to_k, attn.to_v) for part in matrix.weight.split(d)]
    chosen = [part for index, part in enumerate(rows) if index % 3 in parts]
    return Projection(torch.cat(chosen), scales)


class Reading(NamedTuple):
    """The rows of its input that a layer reads for some of its output, and the zeros beyond the image's edges."""

    low: int
    high: int
    above: int
    below: int


def reading(height: int, start: int, stop: int, reach: int) -> Reading:
    """Return what is read of a map of `height` rows for rows `start` to `stop`, `reach` above and below each."""
    return Reading(
        max(0, start - reach), min(height, stop + reach), max(0, reach - start), max(0, stop + reach - height)
    )


def strips(low: int, high: int, start: int, rows: int, reach: int) -> Iterator[tuple[int, int]]:
    """Yield the rows read by each strip from `low` to `high`: as many as complete `rows` rows, from `start` on."""
    edges = [low, *range(start + rows + reach, high, rows), high]
    yield from itertools.pairwise(edges)


class Window(Carry):
    """A carry whose window lies in a workspace, from when its rows are written to when they are read."""

    def __init__(self, workspace: Workspace, overlap: int, read: Reading) -> None:
        super().__init__(overlap, read.above, read.below)
        self.workspace = workspace

    def rows(self, channels: int, count: int, width: int) -> torch.Tensor:
        """Return where `count` rows of `channels` channels are to be written."""
        self.memory = self.workspace.map(channels, self.overlap + count + self.zeros_below, width)
        return self.memory[:, :, self.overlap : self.overlap + count]

    def joined(self, count: int, last: bool) -> torch.Tensor:
        """Return the window of the rows that were written."""
        return self.window(self.memory, self.overlap, count, last, self.workspace)


class StreamedProjection:
    """Input rows to one map [B, heads, parts * d, n * W] a scale."""

    def __init__(self, attn: Block, parts: tuple[int, ...], read: Reading, workspace: Workspace) -> None:
        self.parts, self.d, self.workspace = len(parts), attn.attention_head_dim, workspace
        self.weights = projection(attn, parts)
        self.reach = halo(attn)
        self.carry = Window(workspace, 2 * self.reach, read)

    def __call__(self, rows: torch.Tensor, last: bool) -> list[torch.Tensor]:
        # what the matrix makes is carried, not its input: nearly all of the work is in it
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
        return [one.unflatten(1, (-1, self.parts)).flatten(2, 3) for one in maps]

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view [B, heads * parts, d, n * W] of `x` [B, heads * parts * d, n, W], channels-last."""
        return x.movedim(1, -1).flatten(1, 2).unflatten(2, (-1, self.d)).permute(0, 2, 3, 1)


def score_pieces(
    attn: Block, x: RowPartition, span: range, rows: int, piece: int, workspace: Workspace, poll: Poll
) -> Iterator[torch.Tensor]:
    """Yield value @ key^T [B, scales * heads, d + 1, d] in fp32 of each `piece` rows in `span` of `x`.

    `rows` is a multiple of `piece`; `x` is the whole map, or a part of it with as many rows above and below as are
    read.
    """
    reach, d, width = halo(attn), attn.attention_head_dim, x.width
    read = reading(x.height, span.start, span.stop, reach)
    project = StreamedProjection(attn, KEY_VALUE, read, workspace)
    for begin, end in strips(read.low, read.high, span.start, rows, reach):
        poll()
        maps = project(x.rows(begin, end), end == read.high)
        if x.parts[0].device.type != "cpu":
            yield from together(maps, piece * width, d)
            continue
        maps = [one.float() for one in maps]
        for left, right in chunks(maps[0].shape[-1], piece * width):
            yield torch.cat([piece_scores(one[..., left:right], d) for one in maps], dim=1)


def together(maps: list[torch.Tensor], size: int, d: int) -> Iterator[torch.Tensor]:
    """Yield the scores of each `size` positions of `maps`, all computed at once: few launches for an accelerator."""
    count = maps[0].shape[-1]
    whole = count // size * size
    if whole:
        # in fp32, the pieces first, so that their products are one
        stacked = [one[..., :whole].unflatten(-1, (-1, size)).movedim(-2, 0) for one in maps]
        contiguous = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
        yield from torch.cat([piece_scores(one.to(**contiguous), d) for one in stacked], dim=2)
    if whole < count:
        yield torch.cat([piece_scores(one[..., whole:].float(), d) for one in maps], dim=1)


def piece_scores(key_value: torch.Tensor, d: int) -> torch.Tensor:
    """Return value @ key^T of `key_value` [..., 2 d, N] in fp32, whose keys are used up."""
    key, value = key_value.split(d, dim=-2)
    # a row of ones sums the keys, which the result is divided by
    return functional.pad(value, (0, 0, 0, 1), value=1.0) @ key.relu_().mT


class StreamedAttention:
    """Linear attention with known sums, and its residual."""

    def __init__(self, attn: Block, scores: torch.Tensor, read: Reading, workspace: Workspace) -> None:
        self.attn, self.scores = attn, scores
        self.project = StreamedProjection(attn, QUERY, read, workspace)
        self.residual = Residual(self.project.reach - read.above)

    def __call__(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        self.residual.push(rows)
        width = rows.shape[3]
        maps = [one.float() for one in self.project(rows, last)]
        if rows.device.type != "cpu":
            # one map, for half the launches
            maps = [torch.cat(maps, dim=1)]
        scores = self.scores.chunk(len(maps), dim=1)
        hidden = [self.attend(one, maps.pop(0)).to(rows.dtype).flatten(1, 2) for one in scores]
        window = (hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1)).unflatten(2, (-1, width))
        del hidden
        out = functional.linear(window.movedim(1, -1), self.attn.to_out.weight).movedim(-1, 1)
        norm_into(out, out, self.attn.norm_out, self.residual.pop(out.shape[2]))
        return out

    def attend(self, scores: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        out = scores @ query.relu_()
        del query
        return out[:, :, :-1].div_(out[:, :, -1:] + self.attn.eps)


class StreamedGlu:
    """The gated feed-forward with a depthwise 3x3 in it, and its residual."""

    def __init__(self, glu: Block, read: Reading, workspace: Workspace) -> None:
        self.glu, self.workspace = glu, workspace
        self.carry = Window(workspace, 2 * GLU_HALO, read)
        self.residual = Residual(GLU_HALO - read.above)

    def __call__(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        self.residual.push(rows)
        glu, count, width = self.glu, rows.shape[2], rows.shape[3]
        hidden = self.carry.rows(glu.conv_inverted.out_channels, count, width)
        weight, bias = glu.conv_inverted.weight.flatten(1), glu.conv_inverted.bias
        torch.addmm(bias, rows.movedim(1, -1).flatten(0, 2), weight.T, out=flat(hidden[0]))
        # the kernel activates what it reads
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
        """Return the rows that `window` completes, before the norm."""
        depth = self.glu.conv_depth
        hidden = functional.conv2d(window, depth.weight, depth.bias, padding=(0, 1), groups=depth.groups)
        value, gate = hidden.chunk(2, dim=1)
        activate_into(gate, gate, self.glu.nonlinearity)
        return pointwise(self.glu.conv_point, value.mul_(gate))


class Residual:
    """The rows that a layer adds to its result when that has caught up with them."""

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
    """Return a 1x1 convolution of `rows`, as a product of matrices: the same bits however many rows there are."""
    return functional.linear(rows.movedim(1, -1), conv.weight.flatten(1), conv.bias).movedim(-1, 1)


def attend_rows(
    block: Block, x: RowPartition, scores: torch.Tensor, span: range, rows: int, workspace: Workspace, poll: Poll
) -> Iterator[torch.Tensor]:
    """Yield the rows in `span` of EfficientViTBlock `block` of `x`, top to bottom, about `rows` at a time."""
    reach = halo(block.attn)
    glu = reading(x.height, span.start, span.stop, GLU_HALO)
    attention = reading(x.height, glu.low, glu.high, reach)
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
