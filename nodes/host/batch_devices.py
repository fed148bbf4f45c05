"""A batch on the devices of this machine: sana_core's queue over clones of the MODEL, one thread for each device."""

from __future__ import annotations

import contextvars
import copy
import logging
import threading
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.utils
import latent_preview
import torch
from comfy.patcher_extension import WrappersMP

from ...sana_core.batch.batch_size import find_architecture, pictures_that_fit
from ...sana_core.batch.local import Draw, LocalPool
from ...sana_core.batch.loop import run_batch
from ...sana_core.batch.plan import Chunk, default_chunk_size, split_into_chunks
from ...sana_core.batch.queue import Queue
from ...sana_core.errors import InputError
from ...sana_core.latents import DOWNSCALE
from ...sana_core.model_rules import SPRINT
from ...sana_core.polling import Poll
from .batch_inputs import Batch
from .folders import TWO_WORKERS
from .sampling import sample, sample_sprint

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
        logger.warning("SANA Batch Sampler: no device %s here; drawing on %s", choice, model.load_device)
    return [chosen or model.load_device]


def clone_patcher(base: ModelPatcher, device: torch.device, taken: list[torch.nn.Module]) -> ModelPatcher:
    """Return a clone of `base` for `device`, with its patches and with weights that are none of `taken`.

    Weights that an earlier run has loaded are used again; otherwise they are read from the file.
    """
    for known in comfy.model_management.loaded_models():
        is_ours = known.clone_base_uuid == base.clone_base_uuid and known.load_device == device
        if is_ours and all(known.model is not other for other in taken):
            clone = base.clone(model_override=known.get_clone_model_override())
            clone.load_device, clone.hook_backup = known.load_device, known.hook_backup
            return clone
    return base.deepclone_multigpu(new_load_device=device)


def clone_models(model: ModelPatcher, devices: list[torch.device]) -> list[ModelPatcher]:
    """Return a clone of `model` for each of `devices`; the first on the model's own device shares its weights."""
    base = model.clone()
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
    """Return the CONDITIONING of pictures that show the prompts of those `rows`."""
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
    """Return how many pictures of latents of that shape `device` should draw at once; a CPU draws one by one."""
    if device.type == "cpu":
        return 1
    # ComfyUI clears the device of other models
    held = sum(other.loaded_size() for other in comfy.model_management.loaded_models() if other.load_device == device)
    room = comfy.model_management.get_free_memory(device) + held - model.model_size()
    height, width = (side * DOWNSCALE for side in shape[2:])
    path = model.cached_patcher_init[1][0]
    return pictures_that_fit(room, find_architecture(path), width, height, model.model.get_dtype_inference())


class Progress:
    """The node's bar over the steps of all devices, with the latest preview."""

    def __init__(self, model: ModelPatcher, total: int) -> None:
        self.bar = comfy.utils.ProgressBar(total)
        self.previewer = latent_preview.get_previewer(model.load_device, model.model.latent_format)
        self.lock = threading.Lock()
        # in which ComfyUI knows the node; threads have none of their own
        self.context = contextvars.copy_context()

    def step(self, x0: torch.Tensor) -> None:
        """Note one step of the pictures in `x0`."""
        preview = self.previewer.decode_latent_to_preview_image("JPEG", x0) if self.previewer else None
        with self.lock:
            self.context.run(self.bar.update_absolute, self.bar.current + len(x0), None, preview)


def draw_on_devices(
    batch: Batch, devices: list[torch.device]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor | None]], Counter[str]]:
    """Return LATENT rows and IMAGEs (None without a VAE) of the pictures, and how many each device has drawn."""
    model, positive, negative, pictures = batch.model, batch.positive, batch.negative, batch.pictures
    if len(devices) > 1 and any("control" in rest for _, rest in [*positive, *negative]):
        raise InputError("devices: a ControlNet draws on one device; choose default")
    samples = batch.latent["samples"]
    height, width = (side * DOWNSCALE for side in samples.shape[2:])
    queue = Queue(
        split_into_chunks(pictures, batch.chunk or default_chunk_size(width, height, len(pictures), len(devices)))
    )
    largest = [] if batch.chunk else [chunk_that_fits(model, samples.shape, device) for device in devices]
    clones, free = clone_models(model, devices), list(range(len(devices)))
    vaes = {device: clone_vae(batch.vae, device) for device in devices} if batch.vae is not None else {}
    progress = Progress(model, len(pictures) * (len(batch.sigmas) - 1))
    # ComfyUI's list of what is loaded where knows no threads
    loading = threading.Lock()

    def decode(own: comfy.sd.VAE, latent: torch.Tensor, poll: Poll) -> torch.Tensor:
        poll()
        with loading:
            # the bar of the batch is the node's
            return own.decode(latent[None], {"progress": None})[0]

    def prepare(device: torch.device, poll: Poll) -> Draw[tuple[torch.Tensor, torch.Tensor | None]]:
        index = next(i for i in free if devices[i] == device)
        free.remove(index)
        clone = clones[index]
        clone.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, one_at_a_time(loading))
        comfy.model_management.set_torch_device(device)

        def callback(step: int, x0: torch.Tensor, x: torch.Tensor, total: int) -> None:
            poll()
            progress.step(x0)

        def draw_together(part: Chunk) -> torch.Tensor:
            rows = [picture.prompt for picture in part]
            seeds = [picture.seed for picture in part]
            start = {**batch.latent, "samples": samples.repeat(len(part), 1, 1, 1), "batch_index": seeds}
            conds = [pick_prompts(positive, rows), pick_prompts(negative, rows)]
            last = (start, 0, batch.guidance)
            if batch.sampler == SPRINT:
                return sample_sprint(clone, conds[0], *last, batch.sigmas, callback)["samples"]
            return sample(clone, *conds, *last, batch.sampler, batch.sigmas, callback)["samples"]

        def draw(chunk: Chunk) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
            # a CPU gains little from a batch, and one by one the pictures have the same bits in any chunk
            parts = [(picture,) for picture in chunk] if device.type == "cpu" else [chunk]
            # inference mode belongs to the thread
            with torch.inference_mode():
                out = torch.cat([draw_together(part) for part in parts])
                images = [decode(vaes[device], each, poll) if vaes else None for each in out]
            return list(zip(out, images, strict=True))

        return draw

    results: list[Any] = [None] * len(pictures)
    with closing(LocalPool(devices, prepare)) as pool:
        queue.limits.update(zip(pool.inboxes, largest, strict=False))
        for picture, result in run_batch(queue, pool):
            results[picture.number] = result
    return results, queue.drawn


def one_at_a_time(lock: threading.Lock) -> Any:
    """Return a wrapper that lets one thread after another prepare its sampling."""

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return executor(*args, **kwargs)

    return wrapper
