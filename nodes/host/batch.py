"""Batches inside ComfyUI, on the devices of this machine or on a cluster."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from comfy_execution.graph_utils import ExecutionBlocker

from .batch_cluster import draw_on_cluster
from .batch_devices import draw_on_devices, find_devices
from .batch_inputs import Batch, check_batch
from .folders import CLUSTER


def sample_batch(batch: Batch, choice: str) -> tuple[dict, Any, str]:
    """Return the LATENT of the pictures, their IMAGE where there is a VAE, and a report; `choice` is the widget's.

    Raises InputError as `check_batch` does, for a ControlNet on several devices, and for what a cluster cannot draw;
    ClusterError for one that is not there.
    """
    check_batch(batch)
    started = time.monotonic()
    if choice == CLUSTER:
        results, drawn = draw_on_cluster(batch)
    else:
        results, drawn = draw_on_devices(batch, find_devices(batch.model, choice))
    rest = {k: v for k, v in batch.latent.items() if k not in ("samples", "downscale_ratio_spacial", "batch_index")}
    latents, images = zip(*results, strict=True)
    indices = [index for _ in range(batch.prompts) for index in range(batch.count)]
    out = {**rest, "samples": torch.stack(latents), "batch_index": indices}
    blocked = ExecutionBlocker("SANA Batch Sampler: connect a VAE for IMAGE")
    image = torch.stack(images) if batch.vae is not None else blocked
    return out, image, describe(drawn, time.monotonic() - started)


def describe(drawn: Counter[str], seconds: float) -> str:
    """Return how many pictures were drawn, how fast, and by whom."""
    total = sum(drawn.values())
    by_device = ", ".join(f"{device} {number}" for device, number in sorted(drawn.items()))
    return f"{total} pictures in {seconds:.1f} s, {total / seconds:.2f} a second: {by_device}"
