"""From prompts to pictures in one call, without a host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .batch.draw import Settings
from .batch.local import draw_local
from .batch.plan import batch_pictures


def generate(
    prompts: list[str],
    checkpoint: str | Path,
    seed: int = 0,
    count: int = 1,
    devices: Sequence[str | torch.device] | None = None,
    cluster: str | None = None,
    chunk: int | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Return pictures [len(prompts) * count, 3, height, width] in [-1, 1], float32 on the CPU.

    Picture i of each prompt uses seed + i, so it is the same alone and in a batch. All of `devices` draw, `chunk`
    pictures at once each; None stands for every accelerator of this machine, or its CPU, and for as many pictures as
    suit it. `cluster` is the address of a Ray cluster, or "auto", whose GPUs draw instead.

    `settings` are the fields of `sana_core.batch.draw.Settings`: width, height, steps, guidance, negative_prompt,
    sampler, pag_scale, pag_blocks, guidance_interval, dtype, compiled, reference. Raises InputError for a size that is
    not a multiple of 32 and numbers out of range, CheckpointError, MissingFileError or ReadError for a checkpoint that
    cannot be loaded. A prompt of more than 300 tokens is cut, with a warning in the log.
    """
    how = Settings(**settings)
    pictures = batch_pictures(len(prompts), count, seed)
    if cluster is not None:
        from .batch.cluster import draw_on_cluster

        drawn = draw_on_cluster(prompts, checkpoint, how, pictures, cluster, chunk)
    else:
        drawn = draw_local(prompts, checkpoint, how, pictures, devices, chunk)
    # made when the first picture is there, for mistakes in sizes are found before
    out = torch.empty(0)
    for picture, pixels in drawn:
        if not len(out):
            out = torch.empty(len(pictures), *pixels.shape)
        out[picture.number] = pixels
    return out
