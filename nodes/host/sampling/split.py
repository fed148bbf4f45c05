"""SANA Split Image: several devices of this machine compute each call of a MODEL together, with any sampler.

The node notes the other devices at the MODEL. When sampling begins, each of them gets a replica of the MODEL with its
present patches, and ComfyUI loads the replicas together with the MODEL. The call of the model finds the devices in its
options.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING

import comfy.model_management
import torch
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

from ....sana_core.errors import InputError, first_line
from ....sana_core.model.forward import shard_velocity, velocity
from ....sana_core.model.row_shards import Shard, check_rows, check_splittable
from ....sana_core.runtime.accelerator import is_driver_error, is_out_of_memory, release_memory_of
from ....sana_core.split.devices import Split
from ....sana_core.split.speed import relative_speeds
from ..batch.replicas import clone_patcher
from ..compat.patches import SPLIT, unshared
from ..folders import TWO_WORKERS, one_gpu_note
from .guidance import require_images
from .model import image_pixels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from comfy.model_patcher import ModelPatcher

    from .prompts import PromptBatch

logger = logging.getLogger(__name__)

# Below this many pixels a step may be too short, because Python launches for one device after another.
WORTHWHILE = 2048 * 2048


def sharing_devices(model: ModelPatcher, choice: str) -> list[torch.device]:
    """Return the devices that `choice` names, the model's own first; only that where this machine has no others.

    Raises InputError for what is no name: the node takes any, for workflows come from other machines.
    """
    if not isinstance(choice, str):
        raise InputError(f"devices: got {choice!r:.40}, expected a name; choose all")
    own = model.load_device
    if own.type == "cpu":
        return [own] * (2 if choice == TWO_WORKERS else 1)
    devices = sorted(comfy.model_management.get_all_torch_devices(), key=lambda device: device != own)
    count = choice.removeprefix("gpu x ")
    return devices[: int(count)] if count.isdecimal() else devices


def split_model(model: ModelPatcher, choice: str) -> tuple[ModelPatcher, str]:
    """Return a copy of `model` that the devices of that name compute together, and what to say of it.

    Raises InputError for a MODEL that is not SANA's.
    """
    check_splittable("model", require_images(model.model).diffusion_model)
    patched = model.clone()
    patched.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, SPLIT)
    patched.remove_attachments(SPLIT)
    devices = sharing_devices(patched, choice)
    if len(devices) < 2:
        note = one_gpu_note() or "this machine has no other to share it with"
        return patched, f"one device, {devices[0]}, computes the image: {note}"
    patched.set_attachments(SPLIT, devices[1:])
    patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, SPLIT, share_sampling)
    return patched, f"{len(devices)} devices share each image: {', '.join(map(str, devices))}"


def share_sampling(executor, noise: torch.Tensor, *args, **kwargs):
    """What ComfyUI calls around a sampling: load the replicas with the MODEL, and tell its calls who shares them.

    Raises InputError, before anything is loaded, for fewer rows than devices and for patches that replicas cannot have.
    """
    guider = executor.class_obj
    patcher = guider.model_patcher
    other_devices = patcher.get_attachment(SPLIT)
    refuse_unshared(patcher, guider.conds)
    check_rows(noise.shape[2], len(other_devices) + 1)
    pixels = image_pixels(noise)
    if math.prod(pixels) < WORTHWHILE:
        few = "SANA Split Image: %d x %d pixels are few; one device may generate them as fast as several"
        logger.warning(few, *pixels)
    # whom ComfyUI hands conditionings to: MODEL and the clones of MultiGPU CFG Split, which share out the other devices
    heads = [patcher, *patcher.get_additional_models_with_key("multigpu")]
    taken = {head.load_device for head in heads[1:]}
    free: list[ModelPatcher] = []
    for device in other_devices:
        if device not in taken:
            free.append(clone_patcher(patcher, device, [patcher.model, *(replica.model for replica in free)]))
    # with what this conditioning asks for ComfyUI loads them, and cleans up
    positive = guider.conds["positive"][0]
    positive["additional_models"] = [*positive.get("additional_models", []), *free]
    shares = {head.load_device: free[i :: len(heads)] for i, head in enumerate(heads)}
    groups = {device: Group(replicas, device) for device, replicas in shares.items() if replicas}
    guider.model_options["transformer_options"][SPLIT] = groups

    def prepare_sampling(executor, model: ModelPatcher, shape: torch.Size, conds: dict, *args, **kwargs):
        failures: list[Exception] = []
        try:
            return executor(model, shape, conds, *args, **kwargs)
        except Exception as error:
            if not (free and (is_out_of_memory(error) or is_driver_error(error))):
                raise
            failures.append(error)
        error = release_memory_of(failures.pop())
        logger.warning("SANA Split Image: cannot load the model on all devices (%s); one computes", first_line(error))
        groups.clear()
        for cond in conds["positive"]:
            if "additional_models" in cond:
                cond["additional_models"] = [added for added in cond["additional_models"] if added not in free]
        return executor(model, shape, conds, *args, **kwargs)

    add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, SPLIT, prepare_sampling, guider.model_options, True)
    for replica in free:
        replica.pre_run()
    return executor(noise, *args, **kwargs)


def refuse_unshared(model: ModelPatcher, conds: dict) -> None:
    """Raise InputError for patches that replace parts of the one model, which other devices cannot have."""
    if found := ", ".join(sorted(unshared(model, conds))):
        raise InputError(
            f"model: got a patch that devices cannot share an image with ({found}); remove it, or SANA Split Image"
        )


class Group:
    """Who computes the calls that `head` gets: its own model first, then the replicas' on other devices."""

    def __init__(self, replicas: list[ModelPatcher], head: torch.device) -> None:
        self.replicas = replicas
        self.devices = [head, *(replica.load_device for replica in replicas)]
        self.split: Split | None = None

    def velocity(
        self,
        transformer: torch.nn.Module,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        prompt: PromptBatch,
        guidance: torch.Tensor | None,
        control: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """Return the velocity at `x` as `forward.velocity` does, computed by all of the group; cancel is polled."""
        transformers = [transformer, *(replica.model.diffusion_model for replica in self.replicas)]
        # A GPU without bf16 computes in another dtype than the first one.
        dtypes = [x.dtype, *(replica.model.get_dtype_inference() for replica in self.replicas)]
        if self.split is None:
            self.split = Split(self.devices, relative_speeds(self.devices, transformers))

        def work(shard: Shard) -> torch.Tensor:
            member_transformer = transformers[shard.member]
            shard = shard._replace(x=shard.x.to(dtypes[shard.member]))
            # Only the shape, the dtype and the device of this tensor are used.
            like = shard.x.new_empty(1).expand(x.shape)
            constants, perturbation = prompt.constants(member_transformer, like)
            forward = partial(velocity, member_transformer)
            return shard_velocity(forward, shard, timesteps, constants, guidance, perturbation, control)

        poll = comfy.model_management.throw_exception_if_processing_interrupted
        return self.split.run(x, work, len(prompt.prompts), poll)
