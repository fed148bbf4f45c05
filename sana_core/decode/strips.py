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
from .attention import attend_rows, score_pieces, strips
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
    chunks,
    run,
)

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_dc import Decoder

# Rows of latents whose positions the attention sums at once. Part of the result: sums in other pieces round otherwise.
PIECE = 2


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


def uses_full_attention(block: Block, x: RowPartition) -> bool:
    """Whether diffusers computes the attention of so few positions position by position."""
    return x.height * x.width <= block.attn.attention_head_dim


def global_block(block: Block, x: RowPartition, rows: int | None, scale: int, poll: Poll) -> RowPartition:
    """Return `block` of the whole map `x`, undivided, or with `rows` rows of latents at a time."""
    poll()
    height = x.height
    if rows is None or (is_attention(block) and uses_full_attention(block, x)):
        return RowPartition([block(x.rows(0, height))])
    x = x.channels_last()
    if is_attention(block):
        pieces = score_pieces(block.attn, x, 0, height, rows * scale, PIECE * scale, poll)
        return fill(height, attend_rows(block, x, ordered_sum(pieces), 0, height, rows * scale, poll))
    layer = local_layer(block, (height, x.width))
    # at least the three rows that a residual block looks at
    parts = (run([layer], x.rows(a, b), b == height, poll) for a, b in chunks(height, max(3, rows * scale)))
    return fill(output_size(block, height), parts)


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
    return [*layers, StreamedNorm(decoder.norm_out, decoder.conv_act), last]


class StripSize(NamedTuple):
    """Rows of the boundary map that one strip completes, and columns of it in one panel, None for all."""

    rows: int
    columns: int | None = None


def pixel_rows(
    decoder: Decoder,
    stages: Stages,
    boundary: RowPartition,
    start: int,
    stop: int,
    strip: StripSize,
    poll: Poll,
    whole: int | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the pixels [B, 3, n, W] of rows `start` to `stop` of the map `boundary`, top to bottom, strip by strip.

    Panels beside each other need a halo, whole rows of the map need none. `whole` is the map's height if `boundary` is
    only a part of it.
    """
    height, width = boundary.height, boundary.width
    rows, columns = strip
    halo, stride = stages.halo, stages.stride
    # rows beyond the halo cannot reach these pixels; what the zeros there spoil is cut off
    low, high = max(0, start - halo), min(height, stop + halo)
    panels = []
    for left, right in chunks(width, columns or width):
        begin, end = max(0, left - halo), min(width, right + halo)
        layers = local_layers(decoder, stages, whole or height, width)
        panels.append((layers, begin, end, (left - begin) * stride, (right - begin) * stride))
    row = low * stride
    for top, bottom in strips(low, high, start, rows, halo):
        # a strip that is all there is begins and ends every layer, and is not cut
        piece = rows if top > low else bottom - top
        flows = [
            flow(layers, boundary.rows(top, bottom)[..., begin:end], bottom == high, piece, poll)
            for layers, begin, end, _, _ in panels
        ]
        for parts in zip(*flows, strict=True):
            cut = [part[..., left:right] for part, (_, _, _, left, right) in zip(parts, panels, strict=True)]
            done = cut[0] if len(cut) == 1 else torch.cat(cut, dim=3)
            first, row = row, row + done.shape[2]
            done = done[:, :, max(0, start * stride - first) : max(0, stop * stride - first)]
            if done.shape[2]:
                yield done


def flow(layers: list[Layer], rows: torch.Tensor, last: bool, piece: int, poll: Poll) -> Iterator[torch.Tensor]:
    """Yield what comes out of `layers` when `rows` go in: at once, but for the last rows of a picture.

    With those every layer completes the rows that it was behind, and each hands more on to the next: what has grown to
    more than a piece and a half goes on in pieces, of as many pixels as `piece` rows of `rows` have.
    """
    for index, layer in enumerate(layers):
        poll()
        # not in a function, whose caller would hold the rows that the window has replaced
        rows = layer.join(rows, last)
        rows = layer.compute(rows, last)
        if isinstance(layer, StreamedUpsample):
            piece *= 2
        height = rows.shape[2]
        if last and 2 * height > 3 * piece:
            for start, stop in chunks(height, piece):
                yield from flow(layers[index + 1 :], rows[:, :, start:stop], stop == height, piece, poll)
            return
    yield rows
