"""Batches inside ComfyUI, on the devices of this machine or on a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import NamedTuple

import comfy.model_management
import torch
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image

from ....sana_core.batch.plan import ImageSpec, Workload, samples_one_by_one
from ....sana_core.engine.body import pack_texts
from ....sana_core.engine.local import ThreadWorker
from ....sana_core.engine.loop import Run
from ....sana_core.engine.process import kill_left_out, processes
from ....sana_core.errors import SanaError
from ....sana_core.model.known_models import SPRINT
from ....sana_core.model.latents import DOWNSCALE
from ....sana_core.runtime.cancellation import LIMITS
from ....sana_core.runtime.text import Json
from ..bars import BLUE, Bar, draw_bars
from ..compat.patches import unshared
from ..folders import CLUSTER, one_gpu_note
from ..report import Notes, show_on_running_node
from ..sampling.core_nodes import unfit
from ..sampling.sampler import SEED
from .cluster import sample_on_cluster
from .devices import CanvasBody, clear_device, find_devices, with_controls
from .job import PROCESS, BatchInputs, check_batch, describe_job, encode_batch_hints, packed_weights
from .results import Results, Row

# Pixels for the text behind the longest bar.
TEXT_WIDTH = 360
# How many seconds the node waits at its end for a thread that still loads. A GPU may hang for ever.
LOADING_PATIENCE = 60.0


class DeviceStats(NamedTuple):
    """What one device has generated."""

    images: int
    # Seconds per image.
    pace: float | None = None
    # The most images that it generated at once.
    together: int = 0


def sample_batch(batch: BatchInputs, choice: str) -> tuple[dict, torch.Tensor | ExecutionBlocker, str]:
    """Return the LATENT of the images, their IMAGE if there is a VAE, and a report. `choice` is the widget's value.

    If several devices have generated images, the node shows a chart of them in place of the last preview.
    """
    batch = check_batch(batch)
    started, notes = time.monotonic(), Notes()
    if choice == CLUSTER:
        for line in cluster_notes(batch):
            notes.add(line)
        rows, generated = sample_on_cluster(batch, notes)
        stats = {worker: DeviceStats(number) for worker, number in generated.items()}
        bar_total = len(batch.images)
    else:
        rows, stats = sample_on_devices(batch, find_devices(batch.model, choice), notes)
        bar_total = len(batch.images) * (len(batch.sigmas) - 1)
    replaced = ("samples", "batch_index")
    other_entries = {name: value for name, value in batch.latent.items() if name not in replaced}
    latents, images = zip(*rows.values(), strict=True)
    indices = [batch.first_index + image.number % batch.count for image in rows]
    # The results are in RAM. With --gpu-only, other nodes expect them on the first GPU.
    device = comfy.model_management.intermediate_device()
    out = {**other_entries, "samples": torch.stack(latents).to(device), "batch_index": indices, SEED: batch.seed}
    blocked = ExecutionBlocker("SANA Batch Sampler: connect a VAE for IMAGE")
    image = torch.stack(images).to(device) if batch.vae is not None else blocked
    one_gpu = one_gpu_note() if choice == "all" else ""
    text = describe(stats, time.monotonic() - started)
    if len(stats) > 1:
        show_on_running_node(draw_stats(text.partition(": ")[0], stats), bar_total)
    return out, image, "\n".join(filter(None, [text, one_gpu, *notes.lines]))


def sample_on_devices(
    batch: BatchInputs, devices: list[torch.device], notes: Notes
) -> tuple[dict[ImageSpec, Row], dict[str, DeviceStats]]:
    """Return the rows of the images, and the statistics by worker. Adds lines for the user to `notes`.

    The MODEL's own device works in a thread of this process, each other one in a process. A MODEL that another process
    cannot load is used on its own device alone.
    """
    own_device = batch.model.load_device
    # Only this thread may call it, because it clears the user's interrupt.
    cancel = comfy.model_management.throw_exception_if_processing_interrupted
    hints = encode_batch_hints(batch)
    # The thread needs no description.
    job: Json = {}
    texts: dict[int | None, object] = dict.fromkeys([None, *range(batch.prompts)])
    if devices != [own_device]:
        try:
            described, encoded = describe_job(batch, hints, PROCESS)
            job = described.pack()
            texts = pack_texts(*encoded)
        except SanaError as error:
            notes.add(f"only {own_device} generates, because of {error}")
            devices = [own_device]
    # Held while ComfyUI loads and unloads models in the thread.
    loading = threading.Lock()
    threads = []
    if devices[0] == own_device:
        body = partial(CanvasBody, with_controls(batch, hints), notes, loading)
        threads.append(ThreadWorker(str(own_device), own_device, body))
    for device in set(devices) - {own_device}:
        clear_device(device)
    height, width = (side * DOWNSCALE for side in batch.latent["samples"].shape[2:])
    chunks = Workload((), batch.images, batch.chunk or None).split(width, height, len(devices))
    is_compiled = "torch.compile" in unshared(batch.model, {})
    results = Results(batch, len(batch.images) * (len(batch.sigmas) - 1))
    with processes().borrow(devices, len(threads)) as borrowed:
        run = Run(
            job,
            chunks,
            [*threads, *borrowed],
            range(batch.prompts),
            texts,
            changed=packed_weights(batch.model, loading),
            on_step=results.on_step,
            on_left_out=kill_left_out,
            limits=LIMITS.compiled() if is_compiled else LIMITS,
        )
        try:
            with closing(run.images(cancel)) as images:
                for image, content in images:
                    results.add(image, content)
        finally:
            # The run waits for its thread for a limited time. A load that takes longer still changes ComfyUI's list.
            if loading.acquire(timeout=LOADING_PATIENCE):
                loading.release()
    stats = {}
    for worker, seat in run.seats.items():
        together = min(seat.together, 1) if samples_one_by_one(worker.device) else seat.together
        stats[worker.name] = DeviceStats(run.finished[worker.name], seat.pace, together)
    return results.finish(notes), stats


def cluster_notes(batch: BatchInputs) -> list[str]:
    """Return lines for the user about the size, and about inputs that have no effect. The machines do not send any."""
    notes = [batch.model.model.size_note(batch.latent["samples"].shape)]
    for field, conditioning in (("positive", batch.positive), ("negative", batch.negative)):
        for embeds, options in conditioning:
            notes += unfit(field, {**options, "cross_attn": embeds}, batch.sampler == SPRINT)
    return list(filter(None, notes))


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
