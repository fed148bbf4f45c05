"""Latents to pixels by several processes: each has a band of rows of every map, as the devices of one process do.

Sums are taken over the same pieces and added in the same order as on the devices of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ..accelerator import free_bytes
from ..decode.attention import GLU_HALO, attend_rows, halo, score_pieces
from ..decode.devices import ATTENTION_ROWS
from ..decode.oom import OomRetry, Report
from ..decode.row_partition import RowPartition
from ..decode.run import BUDGET, planner_for
from ..decode.streaming import run
from ..decode.strips import (
    PIECE,
    global_blocks,
    is_attention,
    local_layer,
    ordered_sum,
    output_size,
    project_latents,
)
from ..polling import no_poll
from .processes import ProcessExchange, gather
from .rows import Span

if TYPE_CHECKING:
    from diffusers import AutoencoderDC
    from diffusers.models.autoencoders.autoencoder_dc import Decoder

    from ..decode.stages import Stages

# rows that a block of convolutions sees: one after the other, and an upsampling one
CONVOLUTIONS = 2


@torch.no_grad()
def decode_shard(
    autoencoder: AutoencoderDC, latents: torch.Tensor, exchange: ProcessExchange, spans: Sequence[Span]
) -> torch.Tensor:
    """Return the pixels [1, 3, n, W] that this process makes of `latents` [1, 32, h, w]; those of all are the picture.

    `spans` are the rows that each has sampled, from the top to the bottom; their edges are moved to those of the pieces
    that sums are taken over. Where bands are so low that a block sees beyond the neighbours', each process computes the
    attention alone, a tenth of the work, over all of the latents.
    """
    like = next(autoencoder.parameters())
    latents = latents.to(device=like.device, dtype=like.dtype)
    planner = planner_for(autoencoder, latents.shape, True, 1)
    plan, stages, decoder = planner.strips(int(BUDGET * free_bytes(like.device))), planner.stages, autoencoder.decoder
    retry = OomRetry(planner, plan, Report(None, stages, plan))
    (height, width), edges = latents.shape[2:], [PIECE * round(span.top / PIECE) for span in spans]
    bands: Sequence[Span] = [Span(*pair) for pair in pairwise([*edges, height])]
    if alone(decoder, stages, bands, width):
        bands = spans
        boundary, first = retry.global_stage(decoder, stages, latents, no_poll), 0
    else:
        rows = plan.attention_rows or ATTENTION_ROWS
        boundary, first = boundary_rows(decoder, stages, latents, exchange, bands, rows)
    top, bottom = (edge * stages.scale - first for edge in bands[exchange.rank])
    strips = retry.local_stage(decoder, stages, boundary, no_poll, (top, bottom), height * stages.scale)
    return torch.cat([pixels for _, pixels in strips], dim=2)


def alone(decoder: Decoder, stages: Stages, bands: Sequence[Span], width: int) -> bool:
    """Whether each process computes the boundary map alone: no attention, few positions, or too low a band."""
    shortest = min(bottom - top for top, bottom in bands)
    reaches = [-(-stages.halo // stages.scale)]
    for block, scale in global_blocks(decoder, stages):
        reaches.append(-(-(halo(block.attn) + GLU_HALO) // scale) if is_attention(block) else CONVOLUTIONS)
    return not stages.attends or bands[-1].bottom * width <= stages.head_dim or shortest < max(reaches)


def boundary_rows(
    decoder: Decoder,
    stages: Stages,
    latents: torch.Tensor,
    exchange: ProcessExchange,
    bands: Sequence[Span],
    rows: int,
) -> tuple[RowPartition, int]:
    """Return this process's band of the boundary map with the halo above and below, and the map's row it begins at.

    The attention takes `rows` rows of latents at a time.
    """
    band, height = bands[exchange.rank], latents.shape[2]
    own = project_latents(decoder, latents).channels_last().rows(*band)
    pieces_of = [-(-(bottom - top) // PIECE) for top, bottom in bands]
    for block, scale in global_blocks(decoder, stages):
        if is_attention(block):
            x, start = extended(own, exchange, halo(block.attn) + GLU_HALO)
            stop = start + own.shape[2]
            pieces = list(score_pieces(block.attn, x, start, stop, rows * scale, PIECE * scale, no_poll))
            scores = ordered_sum(iter(gather(torch.stack(pieces), pieces_of, 0)))
            own = torch.cat(list(attend_rows(block, x, scores, start, stop, rows * scale, no_poll)), dim=2)
        else:
            x, start = extended(own, exchange, CONVOLUTIONS)
            out = run([local_layer(block, (height, own.shape[3]))], x.rows(0, x.height), True, no_poll)
            own = out[:, :, output_size(block, start) : output_size(block, start + own.shape[2])]
            height = output_size(block, height)
    x, above = extended(own, exchange, stages.halo)
    return x, band.top * stages.scale - above


def extended(own: torch.Tensor, exchange: ProcessExchange, reach: int) -> tuple[RowPartition, int]:
    """Return the band `own` [1, C, n, W] with `reach` rows of each neighbour, and where it begins in that."""
    above, below = exchange.swap(own[:, :, :reach].contiguous(), own[:, :, -reach:].contiguous())
    parts = [part for part in (above, own, below) if part is not None]
    return RowPartition(parts).channels_last(), 0 if above is None else reach
