"""From prompts to pictures in one call, without a host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .batch.draw import Settings
from .batch.local import draw_local
from .batch.plan import batch_pictures


def generate(
    prompts: list[str],
    checkpoint: str | Path,
    seed: int = 0,
    count: int = 1,
    steps: int | None = None,
    guidance: float | None = None,
    width: int = 1024,
    height: int = 1024,
    negative_prompt: str = "",
    sampler: str | None = None,
    pag_scale: float = 0.0,
    pag_blocks: str = "",
    guidance_interval: tuple[float, float] = (0.0, 1.0),
    compiled: bool = False,
    dtype: str = "float32",
    devices: Sequence[str | torch.device] | None = None,
    cluster: str | None = None,
    chunk: int | None = None,
    reference: str = "auto",
) -> torch.Tensor:
    """Return pictures [len(prompts) * count, 3, height, width] in [-1, 1], float32 on the CPU.

    Picture i of each prompt uses seed + i, so it is the same alone and in a batch. Steps, guidance and sampler are
    without a value those of the model: 20, 4.5 and "flow_dpmpp_2m", or SANA-Sprint's. Perturbed attention of
    `pag_scale` acts in `pag_blocks`, like "8"; guidance acts from the first share of `guidance_interval` of the
    sampling to the second. All of `devices` draw, `chunk` pictures at once each: without a value every accelerator of
    this machine, or its CPU, and as many pictures as suit it. `cluster` is the address of a Ray cluster, or "auto",
    whose GPUs draw instead. `reference` is whose arithmetic is followed where NVIDIA's code and diffusers' differ:
    "nvidia", "diffusers", or with "auto" that of the checkpoint's layout. Raises InputError for a size that is no
    multiple of 32, numbers out of range, or a checkpoint that cannot be loaded; a prompt of more than 300 tokens is
    cut, with a warning in the log.
    """
    settings = Settings(
        width,
        height,
        steps,
        guidance,
        negative_prompt,
        sampler,
        pag_scale,
        pag_blocks,
        guidance_interval,
        dtype,
        compiled,
        reference,
    )
    pictures = batch_pictures(len(prompts), count, seed)
    if cluster is not None:
        from .batch.cluster import draw_on_cluster

        drawn = draw_on_cluster(prompts, checkpoint, settings, pictures, cluster, chunk)
    else:
        drawn = draw_local(prompts, checkpoint, settings, pictures, devices, chunk)
    # made when the first picture is there, for mistakes in sizes are found before
    out = torch.empty(0)
    for picture, pixels in drawn:
        if not len(out):
            out = torch.empty(len(pictures), *pixels.shape)
        out[picture.number] = pixels
    return out
