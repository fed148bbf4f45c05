"""A batch on the devices of this machine: sana_core's queue over clones of the MODEL, one thread for each device."""

from __future__ import annotations

import contextvars
import copy
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import comfy.model_management
import comfy.utils
import latent_preview
import torch
from comfy.patcher_extension import WrappersMP

from ...sana_core.batch.batch_size import find_architecture, images_that_fit
from ...sana_core.batch.best import Rounds
from ...sana_core.batch.local import GenerateChunk, LocalPool
from ...sana_core.batch.loop import run_batch
from ...sana_core.batch.plan import Chunk, ImageSpec, Workload, sampled_together
from ...sana_core.batch.queue import Queue
from ...sana_core.errors import InputError
from ...sana_core.model.known_models import SPRINT
from ...sana_core.model.latents import DOWNSCALE
from ...sana_core.runtime.cancellation import Poll, Polled
from ...sana_core.sampling.trail import WHOLE, Draft, Trail
from .batch_inputs import BatchInputs, count_steps, find_looks, look_at, note_look, trail_of
from .compat import loaded_from
from .folders import TWO_WORKERS
from .patches import SPLIT
from .sampling import Sampling, sample
from .vae import SanaAutoencoder, decode_loaded, load_for_decode

if TYPE_CHECKING:
    import comfy.sd
    from comfy.model_patcher import ModelPatcher

logger = logging.getLogger(__name__)

KEY = "sana_batch"


def find_devices(model: ModelPatcher, choice: str) -> list[torch.device]:
    """Return the devices of that name in `list_devices`; one that is not here gives the model's own, with a log.

    Raises InputError for what is no name, which reaches it as the node takes any: workflows come from other machines.
    """
    if not isinstance(choice, str):
        raise InputError(f"devices: got {choice!r:.40}, expected a name; choose all or default")
    everything = comfy.model_management.get_all_torch_devices()
    if choice == "all":
        # the model's own first: its weights may be there already
        return sorted(everything, key=lambda device: device != model.load_device)
    if choice == TWO_WORKERS and model.load_device.type == "cpu":
        return [model.load_device] * 2
    chosen = comfy.model_management.resolve_gpu_device_option(choice)
    if chosen is None and choice != "default":
        logger.warning("SANA Batch Sampler: no device %s here; using %s", choice, model.load_device)
    return [chosen or model.load_device]


def clone_patcher(base: ModelPatcher, device: torch.device, taken: list[torch.nn.Module]) -> ModelPatcher:
    """Return a clone of `base` for `device`, with its patches and with weights that are none of `taken`.

    Weights that an earlier run has loaded are used again; otherwise they are read from the file.
    """
    for known in comfy.model_management.loaded_models():
        is_ours = known.clone_base_uuid == base.clone_base_uuid and known.load_device == device
        if is_ours and all(known.model is not other for other in taken):
            return with_weights_of(base, known)
    return base.deepclone_multigpu(new_load_device=device)


def with_weights_of(patcher: ModelPatcher, other: ModelPatcher) -> ModelPatcher:
    """Return a clone of `patcher`, with its LoRAs and settings, that has the weights and the device of `other`."""
    clone = patcher.clone(model_override=other.get_clone_model_override())
    clone.load_device, clone.hook_backup = other.load_device, other.hook_backup
    clone.remove_additional_models("multigpu")
    return clone


def clone_models(model: ModelPatcher, devices: list[torch.device]) -> list[ModelPatcher]:
    """Return a clone of `model` for each of `devices`; the first on the model's own device shares its weights."""
    base = model.clone()
    # of an image that several devices share, each generates its own here
    base.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, SPLIT)
    base.remove_additional_models("multigpu")
    clones: list[ModelPatcher] = []
    for device in devices:
        if device == base.load_device and not clones:
            clones.append(base)
        else:
            clones.append(clone_patcher(base, device, [base.model, *(clone.model for clone in clones)]))
    return clones


def clone_vae(vae: comfy.sd.VAE, device: torch.device) -> comfy.sd.VAE:
    """Return `vae` for that device: itself, or a copy with weights of its own."""
    if vae.device == device:
        return vae
    moved = copy.copy(vae)
    moved.patcher = clone_patcher(vae.patcher, device, [vae.first_stage_model])
    moved.first_stage_model, moved.device = moved.patcher.model, device
    return moved


def pick_prompts(conditioning: list, rows: list[int]) -> list:
    """Return the CONDITIONING of images that show the prompts of those `rows`."""
    if len(set(rows)) == 1:
        rows = rows[:1]
    picked = []
    for embeds, rest in conditioning:
        if len(embeds) > 1:
            rest, mask = dict(rest), rest.get("attention_mask")
            embeds = embeds[rows]
            if mask is not None:
                rest["attention_mask"] = mask[rows]
        picked.append([embeds, rest])
    return picked


def chunk_that_fits(model: ModelPatcher, shape: torch.Size, device: torch.device) -> int:
    """Return how many images of latents of that shape `device` should generate at once."""
    # ComfyUI clears the device of other models
    held = sum(other.loaded_size() for other in comfy.model_management.loaded_models() if other.load_device == device)
    room = comfy.model_management.get_free_memory(device) + held - model.model_size()
    height, width = (side * DOWNSCALE for side in shape[2:])
    path = loaded_from(model)[0]
    return images_that_fit(device, room, find_architecture(path), width, height, model.model.get_dtype_inference())


class StepBar:
    """The node's bar over the steps of all devices, with the latest preview."""

    def __init__(self, total: int) -> None:
        self.bar = comfy.utils.ProgressBar(total)
        self.lock = threading.Lock()
        # in which ComfyUI knows the node; threads have none of their own
        self.context = contextvars.copy_context()

    def step(self, x0: torch.Tensor, previewer: latent_preview.LatentPreviewer | None) -> None:
        """Note one step of the images in `x0`."""
        preview = previewer.decode_latent_to_preview_image("JPEG", x0) if previewer else None
        with self.lock:
            self.context.run(self.bar.update_absolute, self.bar.current + len(x0), None, preview)


Generated = tuple[torch.Tensor, torch.Tensor | None]  # row of a LATENT, and IMAGE where there is a VAE


class DeviceStats(NamedTuple):
    """What one device has generated: images, seconds for each, and how many it generated at once at most."""

    images: int
    pace: float | None = None
    together: int = 0


class DeviceGeneration:
    """What the threads of a batch share: a clone of the MODEL and of the VAE for each device, and the progress."""

    def __init__(self, batch: BatchInputs, devices: list[torch.device], steps: int) -> None:
        self.batch = batch
        # each thread takes one of its device
        self.clones = list(zip(devices, clone_models(batch.model, devices), strict=True))
        self.vaes = {device: clone_vae(batch.vae, device) for device in devices} if batch.vae is not None else {}
        self.progress = StepBar(steps)
        self.round = WHOLE
        # images that each device generated at once at most
        self.together: Counter[torch.device] = Counter()
        # ComfyUI's list of what is loaded where knows no threads
        self.loading = threading.Lock()

    @property
    def done(self) -> int:
        """How many steps all images of the round have already."""
        return len(next(iter(self.round.past.values()), ()))

    def prepare(self, device: torch.device, poll: Poll) -> GenerateChunk[Generated | Draft]:
        """Return what generates a chunk on `device`, for one thread."""
        index = next(i for i, (free, _) in enumerate(self.clones) if free == device)
        _, clone = self.clones.pop(index)
        clone.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, one_at_a_time(self.loading, poll))
        # a step of a CPU takes seconds; a compiled one is a single call
        if device.type == "cpu" and not clone.wrappers.get(WrappersMP.APPLY_MODEL):
            clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, polled(poll))
        comfy.model_management.set_torch_device(device)
        # its factors, or TAESANA's weights, move to the device of what they are shown
        previewer = latent_preview.get_previewer(device, clone.model.latent_format)

        def callback(step: int, x0: torch.Tensor, x: torch.Tensor, total: int) -> None:
            poll()
            # the steps of earlier rounds are told again
            if step >= self.done:
                self.progress.step(x0, previewer)

        def generate(chunk: Chunk) -> list[Generated | Draft]:
            parts, own = sampled_together(chunk, device), self.round
            if own.past and chunk[0].number not in own.past:
                # a copy that is late by a round: others have generated all of it, and nobody will look at it
                return [(torch.empty(0), None)] * len(chunk)
            # inference mode belongs to the thread
            with torch.inference_mode():
                generated = [each for part in parts for each in self.generate_part(device, clone, part, callback, poll)]
            self.together[device] = max(self.together[device], *map(len, parts))
            return generated

        return generate

    def generate_part(
        self, device: torch.device, clone: ModelPatcher, part: Chunk, callback: Callable, poll: Poll
    ) -> Sequence[Generated | Draft]:
        """Return the latents of `part`, and with a VAE its images; of a round that ends early the Drafts."""
        trail = trail_of(self.batch, part, self.round)
        out = self.sample(clone, part, callback, trail)
        if self.round.until is None:
            return [(each, self.decode(device, each, poll) if self.vaes else None) for each in out]
        positive = pick_prompts(self.batch.positive, [image.prompt for image in part])
        latent_out = clone.model.process_latent_out
        return look_at(self.batch, trail, positive, lambda x0: self.decode(device, latent_out(x0), poll))

    def sample(self, clone: ModelPatcher, part: Chunk, callback: Callable, trail: Trail) -> torch.Tensor:
        """Return the latents of `part`, sampled as one batch on from its `trail`."""
        batch = self.batch
        rows = [image.prompt for image in part]
        samples = batch.latent["samples"].repeat(len(part), 1, 1, 1)
        start = {**batch.latent, "samples": samples, "batch_index": [image.seed for image in part]}
        sampling = Sampling(batch.sampler, batch.sigmas[: trail.until + 1], batch.guidance, trail=trail)
        positive = pick_prompts(batch.positive, rows)
        # a SANA-Sprint model has no negative prompt
        negative = positive if batch.sampler == SPRINT else pick_prompts(batch.negative, rows)
        return sample(clone, positive, negative, start, sampling, callback)["samples"]

    def decode(self, device: torch.device, latent: torch.Tensor, poll: Poll) -> torch.Tensor:
        poll()
        own = self.vaes[device]
        if not isinstance(own.first_stage_model, SanaAutoencoder):
            with self.loading:
                return own.decode(latent[None])[0]
        with self.loading:
            load_for_decode(own, latent[None].shape)
        return decode_loaded(own, latent[None], poll)[0]


def generate_on_devices(
    batch: BatchInputs, devices: list[torch.device]
) -> tuple[dict[ImageSpec, Generated], dict[str, DeviceStats]]:
    """Return LATENT rows and IMAGEs (None without a VAE) of the images, and what each worker has generated, by its
    name.

    Raises InputError for a ControlNet on several devices, and as `find_looks` does.
    """
    if len(devices) > 1 and any("control" in rest for _, rest in [*batch.positive, *batch.negative]):
        raise InputError("devices: a ControlNet works on one device; choose default")
    shape = batch.latent["samples"].shape
    height, width = (side * DOWNSCALE for side in shape[2:])
    looks, queue = find_looks(batch), Queue()
    workload, scorer = Workload((), batch.images, batch.chunk or None), batch.early.scorer.name if batch.early else ""
    rounds = Rounds(workload, batch.count, looks, math.prod(shape[2:]), scorer)
    fitting = [] if batch.chunk else [chunk_that_fits(batch.model, shape, device) for device in devices]
    cancel = comfy.model_management.throw_exception_if_processing_interrupted
    with Polled(cancel):
        generation = DeviceGeneration(batch, devices, count_steps(batch, looks))
    results: dict[ImageSpec, Generated] = {}
    with closing(LocalPool(devices, generation.prepare, cancel)) as pool:
        queue.limits.update(zip(pool.inboxes, fitting, strict=False))
        for workload in rounds.workloads():
            generation.round = workload.round
            queue.add(workload.split(width, height, len(devices)))
            for image, result in [(rounds.drafts[image.number], each) for image, each in run_batch(queue, pool)]:
                if isinstance(result, Draft):
                    note_look(rounds, batch, image, result)
                else:
                    results[image] = result
    names = zip(pool.threads, devices, strict=True)
    stats = {
        name: DeviceStats(queue.finished[name], queue.pace.get(name), generation.together[device])
        for name, device in names
    }
    return dict(sorted(results.items())), stats


def one_at_a_time(lock: threading.Lock, poll: Poll) -> Callable:
    """Return a wrapper that lets one thread after another prepare its sampling; `poll` ends that by raising."""

    def wrapper(executor, model: ModelPatcher, *args, **kwargs):
        with lock:
            try:
                with Polled(poll):
                    return executor(model, *args, **kwargs)
            except BaseException:
                # the LoRAs that are in the weights by now, of which ComfyUI does not know yet
                model.detach()
                raise

    return wrapper


def polled(poll: Poll) -> Callable:
    """Return a wrapper that lets `poll` end a step in its midst, by raising."""

    def wrapper(executor, *args, **kwargs):
        with Polled(poll):
            return executor(*args, **kwargs)

    return wrapper
