"""Batches inside ComfyUI, on the devices of this machine or on the Ray cluster of the server's operator."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import comfy.model_management
import comfy.utils
import latent_preview
import torch
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image
from server import PromptServer

from ....sana_core.batch.plan import (
    FailedImage,
    Generated,
    ImageSpec,
    Progress,
    WorkerReport,
    Workload,
    samples_one_by_one,
)
from ....sana_core.checkpoints import inspect_checkpoint
from ....sana_core.checkpoints.fingerprint import fingerprint
from ....sana_core.cluster.batch import generate_with
from ....sana_core.cluster.connection import ClusterSettings
from ....sana_core.cluster.session import ClusterRun, Session
from ....sana_core.engine.body import PREVIEW, pack_texts, unpack
from ....sana_core.engine.local import ThreadWorker
from ....sana_core.engine.loop import Run
from ....sana_core.engine.process import kill_left_out, processes
from ....sana_core.errors import InputError, SanaError
from ....sana_core.model.known_models import SPRINT
from ....sana_core.model.latents import DOWNSCALE
from ....sana_core.runtime.checks import check_finite
from ....sana_core.runtime.limits import LIMITS
from ....sana_core.runtime.text import Json, get_logger
from ..charts import BLUE, Bar, draw_bars
from ..compat import unshared
from ..folders import CLUSTER, configured_cluster, one_gpu_note
from ..report import Notes, progress_under_running_node, show_on_running_node, status_under_running_node
from ..sampling.core_nodes import unfit
from ..sampling.sampler import SEED
from .devices import CanvasBody, clear_device, find_devices, with_controls
from .job import (
    CLUSTER_READER,
    PROCESS_READER,
    BatchInputs,
    changed_weights,
    check_batch,
    describe_job,
    encode_batch_hints,
    packed_weights,
)

logger = get_logger(__name__)

# A row of a LATENT, and its IMAGE [H, W, 3]. The IMAGE is None without a VAE.
Row = tuple[torch.Tensor, torch.Tensor | None]


class Results:
    """The finished images of `batch`. `total` is the length of the progress bar."""

    def __init__(self, batch: BatchInputs, total: int) -> None:
        self.model = batch.model.model
        self.rows: dict[ImageSpec, Row] = {}
        self.failures: dict[ImageSpec, str] = {}
        self.bar = comfy.utils.ProgressBar(total)
        self.previewer = latent_preview.get_previewer(torch.device("cpu"), self.model.latent_format)
        # When the next preview may be shown.
        self.next_preview = 0.0

    def on_step(self, worker: object, step: int, sigma: float, preview: Any, images: list[int]) -> None:
        """Show that a worker has computed a step of `images`. `preview` is an image, or packed latents."""
        now = time.monotonic()
        if preview is not None and now < self.next_preview:
            preview = None
        elif preview is not None:
            if not isinstance(preview[0], str):
                preview = self.preview(unpack(preview))
            # A decoder of previews may be slow on the CPU. It gets a quarter of this thread's time.
            self.next_preview = now + max(PREVIEW, 4 * (time.monotonic() - now))
        self.advance(len(images), preview)

    def preview(self, latents: torch.Tensor) -> tuple | None:
        return self.previewer.decode_latent_to_preview_image("JPEG", latents) if self.previewer else None

    def advance(self, count: int, preview: tuple | None) -> None:
        self.bar.update_absolute(self.bar.current + count, None, preview)

    def add(self, image: ImageSpec, content: Any) -> None:
        """Add an image: a Row, a FailedImage, or the arrays of another process."""
        if isinstance(content, FailedImage):
            self.failures[image] = content.reason
            return
        latent, pixels = content
        if isinstance(latent, torch.Tensor):
            self.rows[image] = latent, pixels
        else:
            row = self.model.process_latent_out(torch.from_numpy(latent.copy()))
            if pixels is not None:
                # [3, H, W] in [-1, 1] becomes [H, W, 3] in [0, 1].
                pixels = ((torch.from_numpy(pixels.copy()) + 1) / 2).movedim(0, -1)
            self.rows[image] = row.to(comfy.model_management.intermediate_dtype()), pixels
        try:
            check_finite("samples", self.rows[image][0][None])
            if pixels is not None:
                check_finite("image", pixels[None])
        except InputError as error:
            self.failures[image] = str(error)

    def finish(self, notes: Notes) -> dict[ImageSpec, Row]:
        """Return the rows in the order of the images. An image that failed is black, and named in `notes`."""
        texts = {
            image: f"image {image.number + 1} (seed {image.seed}): {self.failures[image]}" for image in self.failures
        }
        good = [row for image, row in self.rows.items() if image not in texts]
        if not good:
            first = texts[min(texts)]
            raise InputError(f"model: all {len(texts)} images failed ({first}); choose another weight_dtype or model")
        if texts:
            notes.add(f"{len(texts)} of {len(self.rows | texts)} images failed and are black; {texts[min(texts)]}")
        for image in texts:
            logger.warning("SANA Batch Sampler: %s", texts[image])
            latent, pixels = self.rows.get(image, (torch.zeros_like(good[0][0]), None))
            self.rows[image] = latent, None if good[0][1] is None else torch.zeros_like(good[0][1])
        return dict(sorted(self.rows.items()))


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
    text = describe_stats(stats, time.monotonic() - started)
    if len(stats) > 1:
        show_on_running_node(draw_stats(text.partition(": ")[0], stats), bar_total)
    return out, image, "\n".join(filter(None, [text, one_gpu, *notes.lines]))


# How many seconds the node waits at its end for a thread that still loads. A GPU may hang for ever.
LOADING_PATIENCE = 60.0


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
            described, encoded = describe_job(batch, hints, PROCESS_READER)
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


# The attribute of the PromptServer that has the session.
SESSION = "sana_cluster_session"


def session_on(cluster: ClusterSettings) -> Session:
    """Return the session on `cluster`. It is an attribute of the server, because it outlives graphs."""
    server = PromptServer.instance
    session: Session | None = getattr(server, SESSION, None)
    if session is not None and session.cluster != cluster:
        session.leave()
        session = None
    if session is None or session.lost:
        session = Session(cluster)
        setattr(server, SESSION, session)
    return session


def sample_on_cluster(batch: BatchInputs, notes: Notes) -> tuple[dict[ImageSpec, Row], Counter[str]]:
    """Return the rows of the images, and the number of images of each machine. Adds lines for the user to `notes`.

    A machine loads the file that MODEL came from, and receives encoded prompts and the weights that LoRAs have changed.
    Workers stay for the next run, if it has the same MODEL.
    """
    cluster, poll = configured_cluster(), comfy.model_management.throw_exception_if_processing_interrupted
    if cluster is None:
        raise InputError("devices: this server has no cluster; its operator can add one, see docs/cluster.md")
    job, encoded = describe_job(batch, encode_batch_hints(batch), CLUSTER_READER)
    files = filter(None, (job.transformer, job.autoencoder, *(control.path for control in job.controls)))
    # The first time, this reads the whole files.
    weights = {path: fingerprint(inspect_checkpoint(path), lambda *progress: poll()) for path in files}
    job = job._replace(weights=weights, previews=False)
    workload = Workload(range(batch.prompts), batch.images, batch.chunk or None, encoded=encoded)
    results, report, session = Results(batch, len(batch.images)), WorkerReport(), session_on(cluster)
    progress, show = Progress(len(batch.images)), progress_under_running_node()
    settings = job.settings
    models = (job.transformer, job.autoencoder, repr(weights), job.resolution, settings.dtype, settings.reference)
    key = (*models, batch.model.patches_uuid)

    def changed() -> dict[str, torch.Tensor]:
        # The workers end when MODEL is freed.
        weakref.finalize(batch.model.model, session.forget, key)
        return dict(changed_weights(batch.model))

    def work(run: ClusterRun) -> Generator[Generated, None, None]:
        return generate_with(run, job, workload, report)

    with closing(session.run(key, changed, work, poll, status_under_running_node())) as generated:
        for image, content in generated:
            results.add(image, content)
            latent = None if isinstance(content, FailedImage) else torch.from_numpy(content[0].copy())[None]
            results.advance(1, None if latent is None else results.preview(latent))
            progress.step()
            show(progress.describe(len(report.ready)))
    machines: Counter[str] = Counter()
    for worker, number in report.finished.items():
        machines[report.machines[worker]] += number
    return results.finish(notes), machines


def cluster_notes(batch: BatchInputs) -> list[str]:
    """Return lines for the user about the size, and about inputs that have no effect. The machines do not send any."""
    notes = [batch.model.model.size_note(batch.latent["samples"].shape)]
    for field, conditioning in (("positive", batch.positive), ("negative", batch.negative)):
        for embeds, options in conditioning:
            notes += unfit(field, {**options, "cross_attn": embeds}, batch.sampler == SPRINT)
    return list(filter(None, notes))


def describe_stats(stats: Mapping[str, DeviceStats], seconds: float) -> str:
    total = sum(device_stats.images for device_stats in stats.values())
    by_device = ", ".join(f"{device} {device_stats.images}" for device, device_stats in sorted(stats.items()))
    return f"{total} images in {seconds:.1f} s, {total / seconds:.2f} a second: {by_device}"


# Pixels for the text behind the longest bar.
TEXT_WIDTH = 360


def draw_stats(title: str, stats: Mapping[str, DeviceStats]) -> Image.Image:
    """Return a chart with a bar for each device: its images, and if known the time per image and how many at once."""
    bars = []
    for device, device_stats in sorted(stats.items()):
        text = f"{device_stats.images}"
        if device_stats.pace is not None:
            text += f", {device_stats.pace:.2f} s each, {device_stats.together} at once"
        bars.append(Bar(device, ((device_stats.images, BLUE),), text))
    return draw_bars(title, bars, right=TEXT_WIDTH)
