"""The devices of SANA Batch Sampler, and the work of the MODEL's own device.

That device works in a thread of this process, because only this process has the patches of other packs. Each further
device has a process of its own, see sana_core/engine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import comfy.model_management
import latent_preview
import torch
from comfy.patcher_extension import WrappersMP

from ....sana_core.batch.batch_size import images_that_fit
from ....sana_core.batch.plan import Chunk, ImageSpec, sampled_together
from ....sana_core.engine.body import ALIVE, PREVIEW
from ....sana_core.errors import InputError
from ....sana_core.memory import count_passes
from ....sana_core.model.known_models import SPRINT, model_of
from ....sana_core.model.latents import DOWNSCALE
from ....sana_core.runtime.accelerator import is_driver_error
from ....sana_core.runtime.cancellation import Poll, Polled
from ....sana_core.runtime.text import get_logger
from ..compat import SPLIT
from ..folders import TWO_WORKERS
from ..loading.controlnet import SanaControlNet, control_on
from ..loading.vae import SanaAutoencoder, decode_loaded, load_for_decode
from ..report import Notes
from ..sampling.core_nodes import BATCH_NOTES
from ..sampling.sampler import Sampling, sample

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from .job import BatchInputs

logger = get_logger(__name__)

# Key of our wrappers in a ModelPatcher.
KEY = "sana_batch"
# Seconds between two polls of an interrupted thread.
WAIT = 0.05


def find_devices(model: ModelPatcher, choice: str) -> list[torch.device]:
    """Return the devices for `choice`, the value of the node's `devices` widget.

    Workflows come from other machines, so the node accepts any value. A device that this machine lacks is replaced by
    the device of the model, with a warning.
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


def clear_device(device: torch.device) -> None:
    """Unload the models that ComfyUI has loaded on `device`, whose memory a process needs."""
    try:
        comfy.model_management.free_memory(1e30, device)
    except RuntimeError as error:
        if not is_driver_error(error):
            raise
        # The process finds out whether it can use the device.
        logger.warning("SANA Batch Sampler: cannot unload the models on %s: %.200s", device, error)


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


def with_controls(batch: BatchInputs, hints: dict[int, torch.Tensor]) -> BatchInputs:
    """Return `batch` with copies of its ControlNets, which are on the MODEL's device and have their `hints`."""
    # ComfyUI computes prompts with the same object in one batch.
    copies: dict[int, SanaControlNet] = {}

    def replace(conditioning: list) -> list:
        replaced = []
        for embeds, options in conditioning:
            control = options.get("control")
            if control is not None:
                if id(control) not in copies:
                    copies[id(control)] = control_on(control, batch.model.load_device, hints)
                options = {**options, "control": copies[id(control)]}
            replaced.append([embeds, options])
        return replaced

    return batch._replace(positive=replace(batch.positive), negative=replace(batch.negative))


def listed_models() -> list[ModelPatcher]:
    """Return the patchers that ComfyUI lists as loaded. Other packs may leave entries without a patcher."""
    return [loaded for loaded in comfy.model_management.loaded_models() if getattr(loaded, "model", None) is not None]


def chunk_that_fits(model: ModelPatcher, shape: torch.Size, device: torch.device) -> int:
    """Return how many images with latents of this shape `device` can generate at once."""
    free = comfy.model_management.get_free_memory(device)
    # ComfyUI unloads other models from the device before it samples, so their memory is available too.
    for loaded in listed_models():
        if loaded.load_device == device:
            free += loaded.loaded_size()
    height, width = (side * DOWNSCALE for side in shape[2:])
    architecture = model_of(model.model.diffusion_model.config).architecture
    available, dtype = free - model.model_size(), model.model.get_dtype_inference()
    most_passes = count_passes(None, True, (0.0, 0.5), architecture.edits)
    return images_that_fit(device, available, architecture, width, height, dtype, passes=most_passes)


class CanvasBody:
    """The MODEL's own device, with whatever patches the MODEL has. See Body for the methods that the loop calls.

    The ControlNets of `batch` are on that device already. `loading` is held while ComfyUI loads and unloads models.

    Nothing but the thread refers to the body, so that its clone of the MODEL is freed at the end of the thread and
    without Python's collector. ComfyUI's list of loaded models then continues with the clone's parent, the MODEL.
    """

    def __init__(
        self,
        batch: BatchInputs,
        notes: Notes,
        loading: threading.Lock,
        device: str,
        post: Callable[..., None],
        poll: Poll,
    ) -> None:
        posted = time.monotonic()

        def stay_alive() -> None:
            nonlocal posted
            poll()
            if time.monotonic() - posted > ALIVE:
                posted = time.monotonic()
                post("alive")

        self.batch, self.loading, self.post, self.poll = batch, loading, post, stay_alive
        self.device, self.model = batch.model.load_device, batch.model.clone()
        # SANA Split Image makes several devices compute an image together. Here each device computes its own images.
        self.model.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, SPLIT)
        self.model.remove_additional_models("multigpu")
        self.model.model_options["transformer_options"][BATCH_NOTES] = notes

        def prepare_sampling(executor: Any, model: ModelPatcher, *args: Any, **kwargs: Any) -> Any:
            poll()
            post("loading")
            # A poll inside would leave a model half on the CPU that ComfyUI still lists as loaded.
            with loading:
                try:
                    prepared = executor(model, *args, **kwargs)
                    poll()
                except BaseException:
                    # Some LoRAs may be merged into the weights already, although ComfyUI does not list the model as
                    # loaded yet. detach() takes them out. Weights of a listed model stay for the next run.
                    if all(loaded.model is not model.model for loaded in listed_models()):
                        model.detach()
                    raise
                return prepared

        def apply_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
            with Polled(stay_alive):
                return executor(*args, **kwargs)

        self.model.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, prepare_sampling)
        # A step takes seconds on a CPU, so it can be cancelled while it runs. A compiled model has a wrapper already,
        # and cannot be interrupted because it is a single call.
        if self.device.type == "cpu" and not self.model.wrappers.get(WrappersMP.APPLY_MODEL):
            self.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, apply_model)
        comfy.model_management.set_torch_device(self.device)
        # A previewer moves its weights to the device of the latents, so no other thread may use this one.
        self.previewer = latent_preview.get_previewer(self.device, self.model.model.latent_format)
        self.previewed = 0.0

    def begin(self, job: object) -> bool:
        """Return False: the MODEL has all of its weights."""
        return False

    def load(self) -> int | None:
        """Return how many images the device has memory for at once. ComfyUI loads the MODEL when it samples."""
        if self.batch.chunk:
            return None
        return chunk_that_fits(self.model, self.batch.latent["samples"].shape, self.device)

    def generate(self, images: Sequence[tuple[int, int, int]], *inputs: object) -> None:
        """Post the images of a chunk, each as soon as it is decoded."""
        chunk = tuple(ImageSpec(*image) for image in images)
        # Inference mode is set per thread.
        with self.interruptible(), torch.inference_mode():
            for part in sampled_together(chunk, self.device):
                # Results go to RAM: with --gpu-only they are on the GPU.
                for image, row in zip(part, self.sample(part).cpu(), strict=True):
                    pixels = None if self.batch.vae is None else self.decode(row).cpu()
                    self.post("image", image.number, (row, pixels))

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A context in which ComfyUI may interrupt this thread.

        All of ComfyUI's layers look for the user's interrupt, and clear it. It is set again for the node's thread,
        which then cancels the run.
        """
        try:
            yield
        except comfy.model_management.InterruptProcessingException:
            comfy.model_management.interrupt_current_processing()
            while True:
                self.poll()
                time.sleep(WAIT)

    def sample(self, part: Chunk) -> torch.Tensor:
        batch, prompts = self.batch, [image.prompt for image in part]
        positive = pick_prompts(batch.positive, prompts)
        # SANA-Sprint models have no negative prompt.
        negative = positive if batch.sampler == SPRINT else pick_prompts(batch.negative, prompts)
        latent = {
            **batch.latent,
            "samples": batch.latent["samples"].repeat(len(part), 1, 1, 1),
            "batch_index": [image.seed for image in part],
        }
        numbers = [image.number for image in part]

        def callback(step: int, x0: torch.Tensor, x: torch.Tensor, total: int) -> None:
            self.poll()
            preview, now = None, time.monotonic()
            if self.previewer and now - self.previewed >= PREVIEW:
                self.previewed, preview = now, self.previewer.decode_latent_to_preview_image("JPEG", x0)
            self.post("step", step, float(batch.sigmas[step]), preview, numbers)

        sampling = Sampling(batch.sampler, batch.sigmas, batch.guidance)
        return sample(self.model, positive, negative, latent, sampling, callback)["samples"]

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Return the IMAGE of one row of a LATENT, a black one for NaN."""
        self.poll()
        vae = self.batch.vae
        shape = [side * DOWNSCALE for side in latent.shape[1:]] + [3]
        if not latent.isfinite().all():
            return torch.zeros(shape)
        if not isinstance(vae.first_stage_model, SanaAutoencoder):
            # The decode of other VAEs loads the model itself.
            with self.loading:
                return vae.decode(latent[None])[0]
        with self.loading:
            load_for_decode(vae, latent[None].shape)
        with comfy.model_management.cuda_device_context(vae.device):
            try:
                return decode_loaded(vae, latent[None], self.poll)[0]
            except InputError:
                # The decoder has overflowed. The image is reported, and the other images continue.
                return torch.full(shape, math.nan)
