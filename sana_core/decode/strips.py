"""The exact decode in strips of rows.

The attention stages compute the boundary map at 1/8 of the resolution. In a decoder without attention, the first
convolution computes it at 1/32. All later layers are local. Each strip passes through all of them to finished pixels,
and each convolution keeps its last rows for the next strip.
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

# Rows of latents that the attention sums at once. Another value would change the rounding of the result.
PIECE = 2
# Fewest positions in a strip. With fewer, torch chooses other kernels.
FEW_POSITIONS = 64


def project_latents(decoder: Decoder, latents: torch.Tensor) -> RowPartition:
    """Apply the decoder's first convolution and its shortcut to `latents` [B, 32, h, w]."""
    x = decoder.conv_in(latents)
    if decoder.in_shortcut:
        x += latents.repeat_interleave(decoder.in_shortcut_repeats, dim=1)
    return RowPartition([x])


def global_blocks(decoder: Decoder, stages: Stages) -> Iterator[tuple[Block, int]]:
    """Yield each block before the boundary map, and the rows of its map per row of latents."""
    for stage in reversed(range(stages.local, len(stages.widths))):
        scale = stages.downscale // 2**stage
        for block in decoder.up_blocks[stage]:
            yield block, scale


def is_attention(block: Block) -> bool:
    return hasattr(block, "attn")


def runs_undivided(block: Block, x: RowPartition) -> bool:
    """Return whether to call diffusers directly: it uses another algorithm for very few positions."""
    return x.height * x.width <= (block.attn.attention_head_dim if is_attention(block) else 1)


def global_block(
    block: Block, x: RowPartition, rows: int | None, scale: int, workspace: Workspace, poll: Poll
) -> RowPartition:
    """Run a block on the whole map, `rows` latent rows at a time; `x` is overwritten.

    rows=None: process few rows at a time, but sum the attention once over all rows, which is bit-identical to diffusers
    on a CPU. `scale`: rows of the map per row of latents.
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
        # In place, because finished rows are above all rows that are still read.
        top = 0
        for part in attend_rows(block, x, scores, range(height), high, workspace, poll):
            x.write(top, 0, part)
            top += part.shape[2]
            del part
        return x
    return convolved(block, x, x, high, workspace, poll)


def convolved(
    block: Block, x: RowPartition, full_map: RowPartition, rows: int, workspace: Workspace, poll: Poll
) -> RowPartition:
    """Run a block of convolutions on `x`, `rows` rows at a time. `x` is `full_map` or a part of it."""
    layer = local_layer(block, (full_map.height, full_map.width))
    parts = (
        run([layer], workspace.put(x.rows(top, bottom)), bottom == x.height, workspace, poll).rows
        for top, bottom in chunks(x.height, rows)
    )
    return fill(output_size(block, x.height), parts)


def ordered_sum(pieces: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return the sum of `pieces` from the first to the last. Another order would round differently."""
    total = next(pieces)
    for piece in pieces:
        total += piece
    return total


def fill(height: int, parts: Iterator[torch.Tensor]) -> RowPartition:
    """Join `parts`, which come from top to bottom, into a map of `height` rows."""
    first = next(parts)
    out, top = empty_partition(first, first.shape[1], height, first.shape[3]), 0
    for part in itertools.chain([first], parts):
        out.write(top, 0, part)
        top += part.shape[2]
    return out


def output_size(block: Block, side: int) -> int:
    """Return the rows or columns of the output of `block` for `side` rows or columns."""
    if hasattr(block, "interpolate"):
        return 2 * side
    return side // 2 if hasattr(block, "downsample") else side


def local_layer(block: Block, size: tuple[int, int]) -> Layer:
    """Wrap a ResBlock, DCUpBlock2d or DCDownBlock2d to run in strips. `size`: (height, width) of the input."""
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
    """The size of a strip, in rows and columns of the boundary map."""

    rows: int
    columns: int | None = None  # per panel; None: all


def pixel_rows(
    decoder: Decoder,
    stages: Stages,
    boundary: RowPartition,
    span: range,
    strip: StripSize,
    workspace: Workspace,
    poll: Poll,
) -> Iterator[torch.Tensor]:
    """Yield the pixels [1, 3, n, W] for the rows `span` of the map `boundary`, from top to bottom, strip by strip.

    Adjacent panels need a halo. Strips of whole rows need none.
    """
    height, width = boundary.height, boundary.width
    halo, stride, columns = stages.halo, stages.stride, strip.columns or width
    # Rows beyond the halo do not affect these pixels. The rows that the zero padding spoils are cut off below.
    low, high = max(0, span.start - halo), min(height, span.stop + halo)
    capacity = stages.strip_rows(min(strip.rows, high - low))
    panels, workspace.used = [], 0
    for left, right in chunks(width, columns):
        begin, end = max(0, left - halo), min(width, right + halo)
        layers = local_layers(decoder, stages, boundary.full_height or height, width)
        panels.append((layers, begin, end, (left - begin) * stride, (right - begin) * stride))

    def panel_rows(panel: tuple, top: int, bottom: int) -> Iterator[torch.Tensor]:
        layers, begin, end, left, right = panel
        rows = workspace.strip(0, boundary.parts[0].shape[1], bottom - top, end - begin)
        boundary.read_into(rows.rows, top, begin)
        for pixels in flow(layers, rows, bottom == high, capacity, workspace, poll):
            # A copy, because the next panel and the next strip overwrite the workspace.
            yield pixels.rows[..., left:right].clone()

    row = low * stride
    for top in range(low, high, strip.rows):
        bottom = min(top + strip.rows, high)
        for cut in zip(*(panel_rows(panel, top, bottom) for panel in panels), strict=True):
            pixels = cut[0] if len(cut) == 1 else torch.cat(cut, dim=3)
            first, row = row, row + pixels.shape[2]
            pixels = pixels[:, :, max(0, span.start * stride - first) : max(0, span.stop * stride - first)]
            if pixels.shape[2]:
                yield pixels


def flow(
    layers: list[Layer], strip: Strip, last: bool, capacity: int, workspace: Workspace, poll: Poll
) -> Iterator[Strip]:
    """Run `strip` through `layers`. Yields no strip or one strip, and for the last rows of an image perhaps several.

    With the last rows, each layer also completes the rows that it had carried. If the workspace cannot hold all of
    them, the strip goes through first, and the carried rows follow. `capacity`: rows of the input map that the
    workspace can hold.
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
