"""The exact decode in strips of rows.

The attention stages make one map at 1/8 of the resolution; where there are none, the first convolution makes one at
1/32. Everything after it is local, and goes strip by strip through all layers to finished pixels, each convolution
carrying its last rows to the next strip.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..runtime.cancellation import Poll
from .attention import attend_rows, score_pieces
from .row_partition import RowPartition, empty_partition
from .stages import Stages
from .streaming import (
    Block,
    Layer,
    StreamedConv,
    StreamedDownsample,
    StreamedNorm,
    StreamedResBlock,
    StreamedUpsample,
    run,
)
from .workspace import Strip, Workspace, chunks

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_dc import Decoder

# Rows of latents whose positions the attention sums at once. Part of the result: sums in other pieces round otherwise.
PIECE = 2
# positions of a map, so that no kernel for a few of them is chosen
FEW_POSITIONS = 64


def project_latents(decoder: Decoder, latents: torch.Tensor) -> RowPartition:
    """Return what the decoder's stages begin with, [B, C, h, w] of `latents` [B, 32, h, w]."""
    x = decoder.conv_in(latents)
    if decoder.in_shortcut:
        x += latents.repeat_interleave(decoder.in_shortcut_repeats, dim=1)
    return RowPartition([x])


def global_blocks(decoder: Decoder, stages: Stages) -> Iterator[tuple[Block, int]]:
    """Yield the blocks before the boundary map, and the rows that they have for one row of latents."""
    for stage in reversed(range(stages.local, len(stages.widths))):
        scale = stages.downscale // 2**stage
        for block in decoder.up_blocks[stage]:
            yield block, scale


def is_attention(block: Block) -> bool:
    return hasattr(block, "attn")


def runs_undivided(block: Block, x: RowPartition) -> bool:
    """Whether diffusers computes the attention of so few positions position by position, or convolves a single one."""
    return x.height * x.width <= (block.attn.attention_head_dim if is_attention(block) else 1)


def global_block(
    block: Block, x: RowPartition, rows: int | None, scale: int, workspace: Workspace, poll: Poll
) -> RowPartition:
    """Return `block` of the whole map `x`, which it uses up, with `rows` rows of latents at a time; `scale` is the rows
    of the map for one of them. None are few rows, but all in the sums of attention, for the library's bits on a CPU.
    """
    poll()
    height = x.height
    if runs_undivided(block, x):
        return RowPartition([block(x.rows(0, height))])
    x, workspace.used = x.channels_last(), 0
    high = min(height, max(PIECE * scale, -(-FEW_POSITIONS // x.width)) if rows is None else rows * scale)
    if is_attention(block):
        summed = (height, height) if rows is None else (high, PIECE * scale)
        scores = ordered_sum(score_pieces(block.attn, x, range(height), *summed, workspace, poll))
        workspace.used = 0
        # in place: what comes out lies above what is still read
        top = 0
        for part in attend_rows(block, x, scores, range(height), high, workspace, poll):
            x.write(top, 0, part)
            top += part.shape[2]
            del part
        return x
    return convolved(block, x, x, high, workspace, poll)


def convolved(
    block: Block, x: RowPartition, whole: RowPartition, rows: int, workspace: Workspace, poll: Poll
) -> RowPartition:
    """Return a block of convolutions of `x`, which is `whole` or a part of it, with `rows` rows at a time."""
    layer = local_layer(block, (whole.height, whole.width))
    parts = (
        run([layer], workspace.put(x.rows(top, bottom)), bottom == x.height, workspace, poll).rows
        for top, bottom in chunks(x.height, rows)
    )
    return fill(output_size(block, x.height), parts)


def ordered_sum(pieces: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return the sum of `pieces` from the first to the last: floats added in another order round otherwise."""
    total = next(pieces)
    for piece in pieces:
        total += piece
    return total


def fill(height: int, parts: Iterator[torch.Tensor]) -> RowPartition:
    """Return a map of `height` rows made of `parts` from top to bottom."""
    first = next(parts)
    out, top = empty_partition(first, first.shape[1], height, first.shape[3]), 0
    for part in itertools.chain([first], parts):
        out.write(top, 0, part)
        top += part.shape[2]
    return out


def output_size(block: Block, side: int) -> int:
    """Return how many rows or columns `block` makes of `side`."""
    if hasattr(block, "interpolate"):
        return 2 * side
    return side // 2 if hasattr(block, "downsample") else side


def local_layer(block: Block, size: tuple[int, int]) -> Layer:
    """Return the layer in strips of a ResBlock, DCUpBlock2d or DCDownBlock2d of a map of `size` (height, width)."""
    if hasattr(block, "interpolate"):
        return StreamedUpsample(block, size)
    return StreamedDownsample(block, size) if hasattr(block, "downsample") else StreamedResBlock(block, size)


def local_layers(decoder: Decoder, stages: Stages, height: int, width: int) -> list[Layer]:
    """Return the layers from a boundary map of `height` x `width` to pixels."""
    layers: list[Layer] = []
    size = (height, width)
    for stage in reversed(range(stages.local)):
        for block in decoder.up_blocks[stage]:
            layers.append(local_layer(block, size))
            size = (output_size(block, size[0]), output_size(block, size[1]))
    end = decoder.conv_out
    last: Layer = StreamedConv(end, size) if isinstance(end, torch.nn.Conv2d) else local_layer(end, size)
    return [*layers, StreamedNorm(decoder.norm_out, decoder.conv_act, last.shape.inner), last]


class StripSize(NamedTuple):
    """Rows of the boundary map in one strip, and columns of it in one panel, None for all."""

    rows: int
    columns: int | None = None


def pixel_rows(
    decoder: Decoder,
    stages: Stages,
    boundary: RowPartition,
    span: range,
    strip: StripSize,
    workspace: Workspace,
    poll: Poll,
) -> Iterator[torch.Tensor]:
    """Yield the pixels [1, 3, n, W] of the rows in `span` of the map `boundary`, top to bottom, strip by strip.

    Panels beside each other need a halo, whole rows of the map need none.
    """
    height, width = boundary.height, boundary.width
    halo, stride, columns = stages.halo, stages.stride, strip.columns or width
    # rows beyond the halo cannot reach these pixels; what the zeros there spoil is cut off
    low, high = max(0, span.start - halo), min(height, span.stop + halo)
    capacity = stages.strip_rows(min(strip.rows, high - low))
    panels, workspace.used = [], 0
    for left, right in chunks(width, columns):
        begin, end = max(0, left - halo), min(width, right + halo)
        layers = local_layers(decoder, stages, boundary.whole or height, width)
        panels.append((layers, begin, end, (left - begin) * stride, (right - begin) * stride))

    def panel_rows(panel: tuple, top: int, bottom: int) -> Iterator[torch.Tensor]:
        layers, begin, end, left, right = panel
        rows = workspace.strip(0, boundary.parts[0].shape[1], bottom - top, end - begin)
        boundary.read_into(rows.rows, top, begin)
        for done in flow(layers, rows, bottom == high, capacity, workspace, poll):
            # a copy, for the next panel and the next strip use the workspace again
            yield done.rows[..., left:right].clone()

    row = low * stride
    for top in range(low, high, strip.rows):
        bottom = min(top + strip.rows, high)
        for cut in zip(*(panel_rows(panel, top, bottom) for panel in panels), strict=True):
            done = cut[0] if len(cut) == 1 else torch.cat(cut, dim=3)
            first, row = row, row + done.shape[2]
            done = done[:, :, max(0, span.start * stride - first) : max(0, span.stop * stride - first)]
            if done.shape[2]:
                yield done


def flow(
    layers: list[Layer], strip: Strip, last: bool, capacity: int, workspace: Workspace, poll: Poll
) -> Iterator[Strip]:
    """Yield what comes out of `layers` when `strip` goes in: nothing or one strip, but for the last rows of an image.

    With those every layer completes the rows that it was behind. Where that would be more than the workspace holds, of
    `capacity` rows of the map that goes in, the strip goes on first, and what the layers have kept follows.
    """
    for index, layer in enumerate(layers):
        poll()
        grown = int(capacity * layer.shape.scale)
        if last and strip.size and layer.completes(strip.size) > grown:
            yield from flow(layers[index:], strip, False, capacity, workspace, poll)
            strip = strip._replace(size=0)
        strip, capacity = layer(strip, last, workspace), grown
        if not strip.size:
            return
    yield strip
