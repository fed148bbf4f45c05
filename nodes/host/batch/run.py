"""Batches inside ComfyUI, on the devices of this machine or on a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping

import comfy.model_management
import torch
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image

from ....sana_core.model.known_models import SPRINT
from ..bars import BLUE, Bar, draw_bars
from ..folders import CLUSTER, one_gpu_note
from ..report import show_on_running_node
from ..sampling.core_nodes import unfit
from ..sampling.sampler import SEED
from .cluster_batch import sample_on_cluster
from .devices import DeviceStats, find_devices, sample_on_devices
from .inputs import BatchInputs, check_batch

# Pixels for the text behind the longest bar.
TEXT_WIDTH = 360


def sample_batch(batch: BatchInputs, choice: str) -> tuple[dict, torch.Tensor | ExecutionBlocker, str]:
    """Return the LATENT of the images, their IMAGE if there is a VAE, and a report. `choice` is the widget's value.

    If several devices have generated images, the node shows a chart of them in place of the last preview.

    Raises InputError for a latent that is not of SANA or has several images, another VAE, too many images, and inputs
    that a cluster does not support. Raises ClusterError if the cluster cannot be reached.
    """
    batch = check_batch(batch)
    started = time.monotonic()
    if choice == CLUSTER:
        rows, generated = sample_on_cluster(batch)
        results = dict(zip(batch.images, rows, strict=True))
        stats = {worker: DeviceStats(number) for worker, number in generated.items()}
        bar_total = len(batch.images)
        notes = cluster_notes(batch)
    else:
        results, stats, notes = sample_on_devices(batch, find_devices(batch.model, choice))
        bar_total = len(batch.images) * (len(batch.sigmas) - 1)
    replaced = ("samples", "batch_index")
    other_entries = {name: value for name, value in batch.latent.items() if name not in replaced}
    latents, images = zip(*results.values(), strict=True)
    indices = [image.number % batch.count for image in results]
    # The results are in RAM. With --gpu-only, other nodes expect them on the first GPU.
    device = comfy.model_management.intermediate_device()
    out = {**other_entries, "samples": torch.stack(latents).to(device), "batch_index": indices, SEED: batch.seed}
    blocked = ExecutionBlocker("SANA Batch Sampler: connect a VAE for IMAGE")
    image = torch.stack(images).to(device) if batch.vae is not None else blocked
    if choice == "all":
        notes = [one_gpu_note(), *notes]
    text = describe(stats, time.monotonic() - started)
    if len(stats) > 1:
        show_on_running_node(draw_stats(text.partition(": ")[0], stats), bar_total)
    return out, image, "\n".join(filter(None, [text, *notes]))


def cluster_notes(batch: BatchInputs) -> list[str]:
    """Return lines for the user about the size, and about inputs that have no effect. The machines do not send any."""
    notes = [batch.model.model.size_note(batch.latent["samples"].shape)]
    for field, conditioning in (("positive", batch.positive), ("negative", batch.negative)):
        for embeds, options in conditioning:
            notes += unfit(field, {**options, "cross_attn": embeds}, batch.sampler == SPRINT)
    return list(dict.fromkeys(notes))


def describe(stats: Mapping[str, DeviceStats], seconds: float) -> str:
    """Return a text with the number of images, their rate, and the images of each device."""
    total = sum(device_stats.images for device_stats in stats.values())
    by_device = ", ".join(f"{device} {device_stats.images}" for device, device_stats in sorted(stats.items()))
    return f"{total} images in {seconds:.1f} s, {total / seconds:.2f} a second: {by_device}"


def draw_stats(title: str, stats: Mapping[str, DeviceStats]) -> Image.Image:
    """Return a chart with a bar for each device: its images, and if known the time per image and how many at once."""
    bars = []
    for device, device_stats in sorted(stats.items()):
        text = f"{device_stats.images}"
        if device_stats.pace is not None:
            text += f", {device_stats.pace:.2f} s each, {device_stats.together} at once"
        bars.append(Bar(device, ((device_stats.images, BLUE),), text))
    return draw_bars(title, bars, right=TEXT_WIDTH)
