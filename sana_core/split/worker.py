"""What a process does that draws some rows of a picture: it samples them, and decodes them."""

from __future__ import annotations

import torch

from ..batch.draw import Embedding, Models, Settings, sample
from ..batch.plan import Picture
from ..guidance import Shared, Steered
from .decode import decode_shard
from .processes import ProcessExchange, gather, run_rows
from .rows import Span


@torch.no_grad()
def draw_rows(
    models: Models,
    settings: Settings,
    picture: Picture,
    text: Embedding,
    negative: Embedding,
    exchange: ProcessExchange,
    spans: list[Span],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents [32, h, w] of `picture`, and pixels [3, n, W] in [-1, 1], which `decode_shard` makes of them.

    `spans` are the rows of all processes, by rank. While they sample and decode, the processes tell each other the sums
    and the rows of each block. In between the latents are gathered in all of them, an eighth of a byte for a pixel.
    """
    span = spans[exchange.rank]
    shared = Shared(run_rows(exchange, span, spans[-1].bottom), [Steered(models.transformer, None)], span)
    rows = sample(models, settings, (picture,), [text], negative, shared=shared)
    latents = gather(rows, [bottom - top for top, bottom in spans], 2)
    autoencoder = models.autoencoder
    assert autoencoder is not None
    scaled = (latents / autoencoder.config.scaling_factor).to(autoencoder.dtype)
    pixels = decode_shard(autoencoder, scaled, exchange, spans)
    return latents[0].cpu(), pixels[0].clamp(-1, 1).float().cpu()
