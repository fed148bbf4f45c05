"""Batches inside ComfyUI, on the devices of this machine or on a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping

import comfy.model_management
import torch
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image

from ...sana_core.model.known_models import size_note
from .bars import BLUE, Bar, draw_bars
from .batch_cluster import generate_on_cluster
from .batch_devices import DeviceStats, find_devices, generate_on_devices
from .batch_inputs import BatchInputs, check_batch
from .folders import CLUSTER
from .model import image_pixels
from .report import show_on_running_node
from .sampling import SEED, resolution_of

# pixels behind the longest bar
WORDS = 360


def sample_batch(batch: BatchInputs, choice: str) -> tuple[dict, torch.Tensor | ExecutionBlocker, str]:
    """Return the LATENT of the images, their IMAGE where there is a VAE, and a report; `choice` is the widget's.

    Where several devices have generated, a chart of their images takes the place of the last preview.

    Raises InputError for a latent that is not one of SANA's or not of one image, another VAE, too many images, and what
    a cluster cannot generate; ClusterError for a cluster that is not there.
    """
    check_batch(batch)
    started = time.monotonic()
    if choice == CLUSTER:
        rows, generated = generate_on_cluster(batch)
        results = dict(zip(batch.images, rows, strict=True))
        stats = {worker: DeviceStats(number) for worker, number in generated.items()}
        bar_total = len(batch.images)
    else:
        results, stats = generate_on_devices(batch, find_devices(batch.model, choice))
        bar_total = len(batch.images) * (len(batch.sigmas) - 1)
    rest = {k: v for k, v in batch.latent.items() if k not in ("samples", "downscale_ratio_spacial", "batch_index")}
    latents, images = zip(*results.values(), strict=True)
    indices = [image.number % batch.count for image in results]
    # The results are in RAM, from whichever device they came. With --gpu-only, nodes expect them on the first GPU.
    device = comfy.model_management.intermediate_device()
    out = {**rest, "samples": torch.stack(latents).to(device), "batch_index": indices, SEED: batch.seed}
    blocked = ExecutionBlocker("SANA Batch Sampler: connect a VAE for IMAGE")
    image = torch.stack(images).to(device) if batch.vae is not None else blocked
    note = size_note(*image_pixels(batch.latent["samples"]), resolution_of(batch.model))
    text = describe(stats, time.monotonic() - started)
    if len(stats) > 1:
        show_on_running_node(draw_stats(text.partition(": ")[0], stats), bar_total)
    return out, image, "\n".join([text, note] if note else [text])


def describe(stats: Mapping[str, DeviceStats], seconds: float) -> str:
    """Return how many images were generated, how fast, and by whom."""
    total = sum(own.images for own in stats.values())
    by_device = ", ".join(f"{device} {own.images}" for device, own in sorted(stats.items()))
    return f"{total} images in {seconds:.1f} s, {total / seconds:.2f} a second: {by_device}"


def draw_stats(title: str, stats: Mapping[str, DeviceStats]) -> Image.Image:
    """Return a bar for each device: its images, and where it is known its time for one and how many at once."""
    bars = []
    for device, own in sorted(stats.items()):
        words = f"{own.images}"
        if own.pace is not None:
            words += f", {own.pace:.2f} s each, {own.together} at once"
        bars.append(Bar(device, ((own.images, BLUE),), words))
    return draw_bars(title, bars, right=WORDS)
