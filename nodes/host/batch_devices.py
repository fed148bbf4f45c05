"""Generates the batch of SANA Batch Sampler on devices of this machine.

Each device has its own thread, with its own clone of the MODEL and of the VAE. The threads take chunks of images from
the queue of sana_core.batch.
"""

from __future__ import annotations

import contextvars
import copy
import logging
import threading
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import comfy.model_management
import comfy.utils
import latent_preview
import torch
from comfy.patcher_extension import WrappersMP

from ...sana_core.batch.batch_size import find_architecture, images_that_fit
from ...sana_core.batch.local import GenerateChunk, LocalPool
from ...sana_core.batch.loop import run_batch
from ...sana_core.batch.plan import Chunk, ImageSpec, Workload, sampled_together
from ...sana_core.batch.queue import Queue
from ...sana_core.errors import InputError
from ...sana_core.model.known_models import SPRINT
from ...sana_core.model.latents import DOWNSCALE
from ...sana_core.runtime.cancellation import Poll, Polled
from .batch_inputs import BatchInputs
from .compat import loaded_from
from .folders import TWO_WORKERS
from .patches import SPLIT
from .replicas import clone_patcher
from .sampling import Sampling, sample
from .vae import SanaAutoencoder, decode_loaded, load_for_decode

if TYPE_CHECKING:
    from collections.abc import Callable

    import comfy.sd
    from comfy.model_patcher import ModelPatcher

logger = logging.getLogger(__name__)

# Key of our wrappers in a ModelPatcher.
KEY = "sana_batch"


def find_devices(model: ModelPatcher, choice: str) -> list[torch.device]:
    """Return the devices for `choice`, the value of the node's `devices` widget.

    Workflows come from other machines, so the node accepts any value. A device that this machine lacks is replaced by
    the device of the model, with a warning. Raises InputError if `choice` is not a string.
    """
    if not isinstance(choice, str):
        raise InputError(f"devices: got {choice!r:.40}, expected a name; choose all or default")
    all_devices = comfy.model_management.get_all_torch_devices()
    if choice == "all":
        # The device of the model comes first, because its weights may be loaded already.
        return sorted(all_devices, key=lambda device: device != model.load_device)
    if choice == TWO_WORKERS and model.load_device.type == "cpu":
        return [model.load_device] * 2
    device = comfy.model_management.resolve_gpu_device_option(choice)
    if device is None and choice != "default":
        logger.warning("SANA Batch Sampler: no device %s here; using %s", choice, model.load_device)
    return [device or model.load_device]


def clone_models(model: ModelPatcher, devices: list[torch.device]) -> list[ModelPatcher]:
    """Return one clone of `model` per device. The first clone on the device of `model` shares its weights."""
    base = model.clone()
    # SANA Split Image makes several devices compute an image together. Here each device computes its own images.
    base.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, SPLIT)
    base.remove_additional_models("multigpu")
    clones: list[ModelPatcher] = []
    for device in devices:
        if device == base.load_device and not clones:
            clones.append(base)
        else:
            clones.append(clone_patcher(base, device, [base.model, *(clone.model for clone in clones)]))
    return clones


def pick_prompts(conditioning: list, prompts: list[int]) -> list:
    """Return the part of a CONDITIONING for images with these prompt numbers, one row per image.

    Images of the same prompt share one row.
    """
    if len(set(prompts)) == 1:
        prompts = prompts[:1]
    picked = []
    for embeds, options in conditioning:
        # An entry with a single row applies to every prompt.
        if len(embeds) > 1:
            options, mask = dict(options), options.get("attention_mask")
            embeds = embeds[prompts]
            if mask is not None:
                options["attention_mask"] = mask[prompts]
        picked.append([embeds, options])
    return picked


def chunk_that_fits(model: ModelPatcher, shape: torch.Size, device: torch.device) -> int:
    """Return how many images with latents of this shape `device` can generate at once."""
    free = comfy.model_management.get_free_memory(device)
    # ComfyUI unloads other models from the device before it samples, so their memory is available too.
    for loaded in comfy.model_management.loaded_models():
        if loaded.load_device == device:
            free += loaded.loaded_size()
    height, width = (side * DOWNSCALE for side in shape[2:])
    architecture = find_architecture(loaded_from(model)[0])
    available = free - model.model_size()
    return images_that_fit(device, available, architecture, width, height, model.model.get_dtype_inference())


# A row of a LATENT, and its IMAGE. The IMAGE is None without a VAE.
Generated = tuple[torch.Tensor, torch.Tensor | None]


class DeviceStats(NamedTuple):
    """What one device has generated."""

    images: int
    # Seconds per image.
    pace: float | None = None
    # The most images that it generated at once.
    together: int = 0


class DeviceGeneration:
    """The clones of the MODEL and of the VAE for all devices of a batch, and the progress bar of the node."""

    def __init__(self, batch: BatchInputs, devices: list[torch.device]) -> None:
        self.batch = batch
        # The clones that no thread has taken yet.
        self.clones = list(zip(devices, clone_models(batch.model, devices), strict=True))
        self.vaes: dict[torch.device, comfy.sd.VAE] = {}
        if batch.vae is not None:
            for device in devices:
                vae = batch.vae
                if vae.device != device:
                    vae = copy.copy(batch.vae)
                    vae.patcher = clone_patcher(batch.vae.patcher, device, [batch.vae.first_stage_model])
                    vae.first_stage_model, vae.device = vae.patcher.model, device
                self.vaes[device] = vae
        # The most images that each device generated at once.
        self.together: Counter[torch.device] = Counter()
        # ComfyUI's list of loaded models is not thread-safe.
        self.loading_lock = threading.Lock()
        self.bar = comfy.utils.ProgressBar(len(batch.images) * (len(batch.sigmas) - 1))
        self.bar_lock = threading.Lock()
        # ComfyUI finds the running node through context variables, which new threads do not inherit.
        self.node_context = contextvars.copy_context()

    def prepare(self, device: torch.device, poll: Poll) -> GenerateChunk[Generated]:
        """Return the function that generates chunks on `device`. LocalPool calls this once in each thread."""
        free_devices = [free_device for free_device, _ in self.clones]
        _, clone = self.clones.pop(free_devices.index(device))

        def prepare_sampling(executor, model: ModelPatcher, *args, **kwargs):
            with self.loading_lock:
                try:
                    with Polled(poll):
                        return executor(model, *args, **kwargs)
                except BaseException:
                    # Some LoRAs may be merged into the weights already, although ComfyUI does not list the model as
                    # loaded yet. detach() takes them out.
                    model.detach()
                    raise

        clone.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, prepare_sampling)

        def apply_model(executor, *args, **kwargs):
            with Polled(poll):
                return executor(*args, **kwargs)

        # A step takes seconds on a CPU, so it can be cancelled while it runs. A compiled model has a wrapper already,
        # and cannot be interrupted because it is a single call.
        if device.type == "cpu" and not clone.wrappers.get(WrappersMP.APPLY_MODEL):
            clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, apply_model)
        comfy.model_management.set_torch_device(device)
        # Each thread has its own previewer, because a previewer moves its weights to the device of the latents.
        previewer = latent_preview.get_previewer(device, clone.model.latent_format)

        def callback(step: int, x0: torch.Tensor, x: torch.Tensor, total: int) -> None:
            poll()
            preview = previewer.decode_latent_to_preview_image("JPEG", x0) if previewer else None
            with self.bar_lock:
                self.node_context.run(self.bar.update_absolute, self.bar.current + len(x0), None, preview)

        def generate(chunk: Chunk) -> list[Generated]:
            parts = sampled_together(chunk, device)
            results: list[Generated] = []
            # Inference mode is set per thread.
            with torch.inference_mode():
                for part in parts:
                    results += self.generate_part(device, clone, part, callback, poll)
            self.together[device] = max(self.together[device], *map(len, parts))
            return results

        return generate

    def generate_part(
        self, device: torch.device, clone: ModelPatcher, part: Chunk, callback: Callable, poll: Poll
    ) -> list[Generated]:
        """Sample the images of `part` as one batch, then decode them one by one if there is a VAE."""
        batch = self.batch
        prompts = [image.prompt for image in part]
        positive = pick_prompts(batch.positive, prompts)
        # SANA-Sprint models have no negative prompt.
        negative = positive if batch.sampler == SPRINT else pick_prompts(batch.negative, prompts)
        latent = {
            **batch.latent,
            "samples": batch.latent["samples"].repeat(len(part), 1, 1, 1),
            "batch_index": [image.seed for image in part],
        }
        sampling = Sampling(batch.sampler, batch.sigmas, batch.guidance)
        samples = sample(clone, positive, negative, latent, sampling, callback)["samples"]
        return [(row, self.decode(device, row, poll) if self.vaes else None) for row in samples]

    def decode(self, device: torch.device, latent: torch.Tensor, poll: Poll) -> torch.Tensor:
        """Return the IMAGE of one row of a LATENT."""
        poll()
        vae = self.vaes[device]
        if isinstance(vae.first_stage_model, SanaAutoencoder):
            with self.loading_lock:
                load_for_decode(vae, latent[None].shape)
            # Without the lock, so that devices decode at the same time.
            return decode_loaded(vae, latent[None], poll)[0]
        # The decode of other VAEs loads the model itself.
        with self.loading_lock:
            return vae.decode(latent[None])[0]


def generate_on_devices(
    batch: BatchInputs, devices: list[torch.device]
) -> tuple[dict[ImageSpec, Generated], dict[str, DeviceStats]]:
    """Return the results by image, and the statistics by worker.

    Raises InputError for a ControlNet on several devices.
    """
    if len(devices) > 1 and any("control" in options for _, options in [*batch.positive, *batch.negative]):
        raise InputError("devices: a ControlNet works on one device; choose default")
    shape = batch.latent["samples"].shape
    height, width = (side * DOWNSCALE for side in shape[2:])
    limits = [] if batch.chunk else [chunk_that_fits(batch.model, shape, device) for device in devices]
    cancel = comfy.model_management.throw_exception_if_processing_interrupted
    with Polled(cancel):
        generation = DeviceGeneration(batch, devices)
    workload = Workload((), batch.images, batch.chunk or None)
    queue = Queue(workload.split(width, height, len(devices)))
    results: dict[ImageSpec, Generated] = {}
    with closing(LocalPool(devices, generation.prepare, cancel)) as pool:
        # The pool forgets a worker that fails, so its device is looked up now.
        device_of_worker = dict(zip(pool.threads, devices, strict=True))
        queue.limits.update(zip(device_of_worker, limits, strict=False))
        for image, result in run_batch(queue, pool):
            results[image] = result
    stats = {
        worker: DeviceStats(queue.finished[worker], queue.pace.get(worker), generation.together[device])
        for worker, device in device_of_worker.items()
    }
    return dict(sorted(results.items())), stats
