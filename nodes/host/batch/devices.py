"""Generates the batch of SANA Batch Sampler on devices of this machine.

Each device has its own thread, with its own clone of the MODEL and of the VAE. The threads take chunks of images from
the queue of sana_core.batch.
"""

from __future__ import annotations

import contextvars
import copy
import math
import threading
from collections import Counter
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import comfy.model_management
import comfy.utils
import latent_preview
import torch
from comfy.patcher_extension import WrappersMP

from ....sana_core.batch.batch_size import images_that_fit
from ....sana_core.batch.local import GenerateChunk, LocalPool
from ....sana_core.batch.loop import run_batch
from ....sana_core.batch.plan import Chunk, ImageSpec, Workload, sampled_together
from ....sana_core.batch.queue import Queue
from ....sana_core.decode.devices import device_error
from ....sana_core.errors import InputError, first_line
from ....sana_core.model.known_models import SPRINT, Architecture
from ....sana_core.model.latents import DOWNSCALE
from ....sana_core.runtime.accelerator import is_driver_error, is_out_of_memory, release_memory_of
from ....sana_core.runtime.cancellation import Poll, Polled
from ....sana_core.runtime.checks import check_finite
from ..compat.internals import compile_again
from ..compat.patches import SPLIT, unshared
from ..folders import TWO_WORKERS
from ..loading.controlnet import SanaControlNet, control_on, encode_hints
from ..loading.vae import SanaAutoencoder, decode_loaded, load_for_decode
from ..report import Notes
from ..sampling.core_nodes import BATCH_NOTES
from ..sampling.sampler import Sampling, sample
from .inputs import BatchInputs
from .replicas import clone_patcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import comfy.sd
    from comfy.model_patcher import ModelPatcher

from ....sana_core.runtime.text import get_logger

logger = get_logger(__name__)

# Key of our wrappers in a ModelPatcher.
KEY = "sana_batch"
# Seconds between two polls of a thread that waits for another one.
WAIT = 0.2
# How many seconds the node waits at its end for a thread that still loads. A GPU may hang for ever.
LOADING_PATIENCE = 60.0
# How often a device tries to load a model when CUDA reports errors of other devices.
ATTEMPTS = 4
T = TypeVar("T")


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


def clone_model(model: ModelPatcher, device: torch.device, clones: list[ModelPatcher]) -> ModelPatcher:
    """Return a clone of `model` on `device`, which shares no weights with the other `clones`.

    The first clone on the device of `model` shares the weights of `model`.
    """
    base = model.clone()
    # SANA Split Image makes several devices compute an image together. Here each device computes its own images.
    base.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, SPLIT)
    base.remove_additional_models("multigpu")
    if device == model.load_device and not clones:
        return base
    # The modules in such patches have the weights of one device. torch.compile is repeated per clone.
    if names := ", ".join(sorted(unshared(model, {}) - {"torch.compile"})):
        raise InputError(
            f"model: got a patch that only {model.load_device} can have ({names}); remove it, or choose default in "
            "devices"
        )
    clone = clone_patcher(base, device, [base.model, *(clone.model for clone in clones)])
    compile_again(clone)
    return clone


def vae_for(vae: comfy.sd.VAE, device: torch.device) -> comfy.sd.VAE:
    """Return the VAE that decodes what `device` samples: `vae`, or a clone on `device`."""
    # --cpu-vae and Select VAE Device choose a device, and some loaders cannot load their VAE twice.
    is_placed = vae.device.type == "cpu" or vae.device != comfy.model_management.get_torch_device()
    if vae.device == device or is_placed or vae.patcher.cached_patcher_init is None:
        return vae
    clone = copy.copy(vae)
    clone.patcher = clone_patcher(vae.patcher, device, [vae.first_stage_model])
    clone.first_stage_model, clone.device = clone.patcher.model, device
    # The dtype was chosen for this device.
    clone.vae_dtype = next(clone.first_stage_model.parameters()).dtype
    # With --gpu-only, it would be the first GPU.
    clone.output_device = torch.device("cpu")
    return clone


def in_ram(conditioning: list) -> list:
    """Return a CONDITIONING on the CPU. With --gpu-only it is on a GPU, which may fail while other GPUs sample."""
    moved = []
    for embeds, options in conditioning:
        mask = options.get("attention_mask")
        moved.append([embeds.cpu(), options if mask is None else {**options, "attention_mask": mask.cpu()}])
    return moved


def with_controls(conditioning: list, controls: Mapping[int, SanaControlNet]) -> list:
    """Return a CONDITIONING with ControlNets replaced by `controls`, by the id of the ControlNet that is replaced."""
    return [
        [embeds, {**options, "control": controls[id(options["control"])]} if "control" in options else options]
        for embeds, options in conditioning
    ]


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


def listed_models() -> list[ModelPatcher]:
    """Return the patchers that ComfyUI lists as loaded. Other packs may leave entries without a patcher."""
    return [loaded for loaded in comfy.model_management.loaded_models() if getattr(loaded, "model", None) is not None]


def is_listed(model: ModelPatcher) -> bool:
    """Whether ComfyUI lists the weights of `model` as loaded, by whichever clone."""
    return any(loaded.model is model.model for loaded in listed_models())


def chunk_that_fits(model: ModelPatcher, shape: torch.Size, device: torch.device) -> int:
    """Return how many images with latents of this shape `device` can generate at once."""
    free = comfy.model_management.get_free_memory(device)
    # ComfyUI unloads other models from the device before it samples, so their memory is available too.
    for loaded in listed_models():
        if loaded.load_device == device:
            free += loaded.loaded_size()
    height, width = (side * DOWNSCALE for side in shape[2:])
    config = model.model.diffusion_model.config
    width_of_model = config.num_attention_heads * config.attention_head_dim
    architecture = Architecture(width_of_model, config.num_layers, config.qk_norm is not None, config.guidance_embeds)
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


class DeviceWorker(NamedTuple):
    """What one thread of the batch uses."""

    device: torch.device
    # A clone of the MODEL on `device`.
    model: ModelPatcher
    # CONDITIONING with ControlNets of this thread.
    positive: list
    negative: list
    # A clone of the VAE on `device`, or the VAE itself.
    vae: comfy.sd.VAE | None
    # The most images at once that fit into the free memory. None: the user has chosen a number.
    limit: int | None


@contextmanager
def held(lock: threading.Lock, poll: Poll) -> Iterator[None]:
    """A context in which this thread holds `lock`. While it waits, `poll` may raise."""
    while not lock.acquire(timeout=WAIT):
        poll()
    try:
        yield
    finally:
        lock.release()


def load_on(device: torch.device, load: Callable[[], T]) -> T:
    """Return `load()`, which lets ComfyUI load a model on `device`, and is called again after errors of other devices.

    After it has unloaded a model, ComfyUI empties the caches of all GPUs. CUDA then answers with the error of a broken
    one.
    """
    failures: list[BaseException] = []
    for _ in range(ATTEMPTS):
        try:
            return load()
        except RuntimeError as error:
            if not is_driver_error(error) or device_error(device) is not None:
                raise
            failures.append(error.with_traceback(None))
    raise failures.pop()


class DeviceGeneration:
    """The workers of a batch, and the progress bar of the node."""

    def __init__(self, batch: BatchInputs, devices: list[torch.device]) -> None:
        self.batch = batch
        conditionings = [in_ram(batch.positive), in_ram(batch.negative)]
        controls = [options["control"] for part in conditionings for _, options in part if "control" in options]
        hints = encode_hints(controls, batch.model, batch.latent["samples"].shape)
        self.latent = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.latent.items()
        }
        # One for all images, because `begin` would create one for each sampling.
        self.shared_notes = Notes()
        # The workers that no thread has taken yet.
        self.workers: list[DeviceWorker] = []
        for device in devices:
            failure = self.add_worker(device, conditionings, controls, hints)
            if failure is not None:
                logger.error("SANA Batch Sampler: %s is left out: %s", device, first_line(failure))
                release_memory_of(failure, device)
        if not self.workers:
            raise failure
        # While threads of other devices decode on the device of a VAE that they share, nobody else uses that device.
        # ComfyUI would unload its MODEL for the VAE, and each decode plans with all of the free memory.
        self.device_locks: dict[torch.device, threading.Lock] = {}
        sharing = [worker for worker in self.workers if worker.vae is batch.vae is not None]
        if len(sharing) > 1 and any(worker.device != batch.vae.device for worker in sharing):
            self.device_locks[batch.vae.device] = threading.Lock()
        # The most images that each device generated at once.
        self.together: Counter[torch.device] = Counter()
        # ComfyUI's list of loaded models is not thread-safe.
        self.loading_lock = threading.Lock()
        self.bar = comfy.utils.ProgressBar(len(batch.images) * (len(batch.sigmas) - 1))
        self.bar_lock = threading.Lock()
        # ComfyUI finds the running node through context variables, which new threads do not inherit.
        self.node_context = contextvars.copy_context()

    @contextmanager
    def loading(self, poll: Poll) -> Iterator[None]:
        """Hold the lock while ComfyUI loads and unloads models.

        `poll` must not raise inside: it would leave a model half on the CPU that ComfyUI still lists as loaded.
        """
        with held(self.loading_lock, poll):
            poll()
            yield

    @property
    def notes(self) -> list[str]:
        """Lines for the user about inputs that have no effect, and about the size."""
        return self.shared_notes.lines

    def add_worker(
        self, device: torch.device, conditionings: list[list], controls: list, hints: dict[int, torch.Tensor]
    ) -> Exception | None:
        """Append the worker of `device`. Returns the error if its driver fails, or memory runs out."""
        batch = self.batch
        try:
            model = clone_model(batch.model, device, [worker.model for worker in self.workers])
            model.model_options["transformer_options"][BATCH_NOTES] = self.shared_notes
            copies = {id(control): control_on(control, device, hints) for control in controls}
            positive, negative = (with_controls(conditioning, copies) for conditioning in conditionings)
            vae = None if batch.vae is None else vae_for(batch.vae, device)
            limit = None if batch.chunk else chunk_that_fits(model, batch.latent["samples"].shape, device)
        except Exception as error:
            if not (is_out_of_memory(error) or is_driver_error(error)):
                raise
            return error
        self.workers.append(DeviceWorker(device, model, positive, negative, vae, limit))
        return None

    def prepare(self, device: torch.device, poll: Poll) -> GenerateChunk[Generated]:
        """Return the function that generates chunks on `device`. LocalPool calls this once in each thread."""
        worker = self.workers.pop([worker.device for worker in self.workers].index(device))
        clone = worker.model

        def prepare_sampling(executor, model: ModelPatcher, *args, **kwargs):
            with self.loading(poll):
                try:
                    prepared = load_on(device, partial(executor, model, *args, **kwargs))
                except BaseException:
                    # Some LoRAs may be merged into the weights already, although ComfyUI does not list the model as
                    # loaded yet. detach() takes them out. Weights of a listed model stay for the next run.
                    if not is_listed(model):
                        model.detach()
                    raise
                poll()
                return prepared

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
                    results += self.generate_part(worker, part, callback, poll)
            self.together[device] = max(self.together[device], *map(len, parts))
            return results

        return generate

    def generate_part(self, worker: DeviceWorker, part: Chunk, callback: Callable, poll: Poll) -> list[Generated]:
        """Sample the images of `part` as one batch, then decode them one by one if there is a VAE."""
        batch = self.batch
        prompts = [image.prompt for image in part]
        positive = pick_prompts(worker.positive, prompts)
        # SANA-Sprint models have no negative prompt.
        negative = positive if batch.sampler == SPRINT else pick_prompts(worker.negative, prompts)
        latent = {
            **self.latent,
            "samples": self.latent["samples"].repeat(len(part), 1, 1, 1),
            "batch_index": [image.seed for image in part],
        }
        sampling = Sampling(batch.sampler, batch.sigmas, batch.guidance)
        with self.using(worker.device, poll) if worker.device.type != "cpu" else nullcontext():
            samples = sample(worker.model, positive, negative, latent, sampling, callback)["samples"]
        # Results go to RAM: with --gpu-only they are on the GPU of the thread, which may fail later.
        samples = samples.cpu()
        return [(row, None if worker.vae is None else self.decode(worker, row, poll).cpu()) for row in samples]

    def using(self, device: torch.device, poll: Poll) -> AbstractContextManager[None]:
        """Return a context in which this thread alone uses `device`, if other threads decode there."""
        lock = self.device_locks.get(device)
        return nullcontext() if lock is None else held(lock, poll)

    def decode(self, worker: DeviceWorker, latent: torch.Tensor, poll: Poll) -> torch.Tensor:
        """Return the IMAGE of one row of a LATENT, a black one for NaN."""
        poll()
        vae = worker.vae
        if not latent.isfinite().all():
            return torch.zeros(*(side * DOWNSCALE for side in latent.shape[1:]), 3)
        with self.using(vae.device, poll):
            if not isinstance(vae.first_stage_model, SanaAutoencoder):
                # The decode of other VAEs loads the model itself.
                with self.loading(poll):
                    return vae.decode(latent[None])[0]
            with self.loading(poll):
                load_on(vae.device, partial(load_for_decode, vae, latent[None].shape))
            # Without the loading lock, so that devices decode at the same time.
            with comfy.model_management.cuda_device_context(vae.device):
                try:
                    return decode_loaded(vae, latent[None], poll)[0]
                except InputError:
                    # The decoder has overflowed. `warn_of_nan` reports the image, and the other images continue.
                    return torch.full([side * DOWNSCALE for side in latent.shape[1:]] + [3], math.nan)


def sample_on_devices(
    batch: BatchInputs, devices: list[torch.device]
) -> tuple[dict[ImageSpec, Generated], dict[str, DeviceStats], list[str]]:
    """Return the results by image, the statistics by worker, and lines for the user."""
    height, width = (side * DOWNSCALE for side in batch.latent["samples"].shape[2:])
    cancel = comfy.model_management.throw_exception_if_processing_interrupted
    # This loads and unloads models, so it is not polled as a whole. Reading a file polls.
    generation = DeviceGeneration(batch, devices)
    # Without the devices that cannot take part.
    devices = [worker.device for worker in generation.workers]
    limits = [worker.limit for worker in generation.workers if worker.limit is not None]
    workload = Workload((), batch.images, batch.chunk or None)
    queue = Queue(workload.split(width, height, len(devices)))
    results: dict[ImageSpec, Generated] = {}
    try:
        with closing(LocalPool(devices, generation.prepare, cancel)) as pool:
            # The pool forgets a worker that fails, so its device is looked up now.
            device_of_worker = dict(zip(pool.threads, devices, strict=True))
            queue.limits.update(zip(device_of_worker, limits, strict=False))
            for image, result in run_batch(queue, pool):
                results[image] = result
    finally:
        # The pool waits for its threads for a limited time. A load that takes longer still changes ComfyUI's list.
        if generation.loading_lock.acquire(timeout=LOADING_PATIENCE):
            generation.loading_lock.release()
    results = dict(sorted(results.items()))
    warn_of_nan(results)
    stats = {
        worker: DeviceStats(queue.finished[worker], queue.pace.get(worker), generation.together[device])
        for worker, device in device_of_worker.items()
    }
    return results, stats, generation.notes


def warn_of_nan(results: Mapping[ImageSpec, Generated]) -> None:
    """Log which images of a batch have NaN. Raises InputError if all have, because then no image is worth keeping."""
    errors: dict[ImageSpec, InputError] = {}
    for image, (latent, pixels) in results.items():
        try:
            check_finite("samples", latent[None])
            if pixels is not None:
                check_finite("image", pixels[None])
        except InputError as error:
            errors[image] = error
    if len(errors) == len(results):
        raise next(iter(errors.values()))
    for image, error in errors.items():
        logger.warning(
            "SANA Batch Sampler: image %d of prompt %d (seed %d): %s", image.number, image.prompt, image.seed, error
        )
