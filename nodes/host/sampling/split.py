"""SANA Split Image: several devices of this machine compute each call of a MODEL together, with any sampler.

The node stores the other devices as an attachment of the MODEL. When sampling begins, each of them gets a replica of
the MODEL with its current patches, and ComfyUI loads the replicas together with the MODEL. The model's forward finds
the devices in transformer_options.

A replica has the weights of a MODEL or a ControlNet once more, on another device:

    module of the MODEL   cuda:0  <- the loader's ModelPatcher and its clones
        | list
    replica               cuda:1  <- a ModelPatcher with weights of its own, and clones of it with LoRAs and settings

ComfyUI lists each loaded module with a weak reference to the ModelPatcher that loaded it. When that patcher dies, the
entry continues with the patcher's `parent` and with the parent's device. So the parent of a clone here is the replica,
which has the same weights and the same device, and the replica has no parent. The module of the MODEL holds its
replicas. Later runs use them again, ComfyUI can unload them at any time, and they are freed together with the MODEL.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import comfy.model_management
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP, add_wrapper_with_key

from ....sana_core.errors import InputError, first_line
from ....sana_core.model.forward import shard_velocity, velocity
from ....sana_core.model.row_shards import Shard, check_rows, check_splittable
from ....sana_core.runtime.accelerator import is_driver_error, is_out_of_memory, release_memory_of
from ....sana_core.runtime.device_team import DeviceThreads
from ....sana_core.runtime.text import get_logger
from ....sana_core.split.generate import Split, relative_speeds
from ..compat import SPLIT, is_half_unloaded, unshared
from ..folders import TWO_WORKERS, one_gpu_note
from .guidance import require_images
from .model import image_pixels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from comfy.model_patcher import ModelPatcher

    from .model import PromptBatch

# The attribute of a module that holds its replicas, and the key of our callback in their clones.
REPLICAS = "sana_replicas"


def clone_patcher(base: ModelPatcher, device: torch.device, used_modules: Sequence[torch.nn.Module]) -> ModelPatcher:
    """Return a clone of `base` on `device`, with its patches, but with weights that are not in `used_modules`.

    An earlier run's replica is used again, unless an error has left it between loaded and unloaded. Otherwise the
    weights are read from the file, in dtypes for `device`.
    """
    if not hasattr(base.model, REPLICAS):
        setattr(base.model, REPLICAS, [])
    replicas: list[ModelPatcher] = getattr(base.model, REPLICAS)
    # Another thread may be loading the replica of another device, which looks half unloaded until it is loaded.
    replicas[:] = [
        replica for replica in replicas if replica.load_device != device or not is_half_unloaded(replica.model)
    ]
    for replica in replicas:
        if replica.load_device == device and all(replica.model is not module for module in used_modules):
            return with_weights_of(base, replica)
    # The loader chooses dtypes for the current device. ComfyUI also unloads all weights of `base` from it.
    current = torch.get_device_module(device).device(device) if device.index is not None else nullcontext()
    with current:
        replica = base.deepclone_multigpu(new_load_device=device)
    replica.parent = None
    if base.offload_device == base.load_device:
        # With --highvram, unloaded weights stay on their device.
        replica.offload_device = device
    replicas.append(replica)
    return with_weights_of(base, replica)


def with_weights_of(patcher: ModelPatcher, replica: ModelPatcher) -> ModelPatcher:
    """Return a clone of `patcher`, with its LoRAs and settings, but with the weights and the devices of `replica`."""
    clone = patcher.clone(model_override=replica.get_clone_model_override())
    clone.parent = replica
    clone.load_device, clone.offload_device = replica.load_device, replica.offload_device
    clone.hook_backup = replica.hook_backup
    clone.remove_additional_models("multigpu")
    clone.add_callback_with_key(CallbacksMP.ON_LOAD, REPLICAS, partial(remember_patches, replica))
    return clone


def remember_patches(replica: ModelPatcher, loaded: ModelPatcher, *_: object) -> None:
    """Give `replica` the patches that `loaded` has merged into their weights.

    ComfyUI may unload a part of the weights through the replica when `loaded` is gone. It then adds the replica's
    patches to that part again, and a later clone with the same `patches_uuid` uses the weights as they are.
    """
    replica.patches, replica.patches_uuid = loaded.patches, loaded.patches_uuid


logger = get_logger(__name__)

# Below this many pixels a step may be too short, because Python launches for one device after another.
WORTHWHILE = 2048 * 2048


def sharing_devices(model: ModelPatcher, choice: str) -> list[torch.device]:
    """Return the devices for `choice`, the device of the model first. It may be the only one of this machine.

    Workflows come from other machines, so any name is accepted.
    """
    if not isinstance(choice, str):
        raise InputError(f"devices: got {choice!r:.40}, expected a name; choose all")
    model_device = model.load_device
    if model_device.type == "cpu":
        return [model_device] * (2 if choice == TWO_WORKERS else 1)
    devices = sorted(comfy.model_management.get_all_torch_devices(), key=lambda device: device != model_device)
    count = choice.removeprefix("gpu x ")
    return devices[: int(count)] if count.isdecimal() else devices


def split_model(model: ModelPatcher, choice: str) -> tuple[ModelPatcher, str]:
    """Return a copy of `model` that several devices compute together, and a text for the user about the devices."""
    check_splittable("model", require_images(model.model).diffusion_model)
    patched = model.clone()
    patched.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, SPLIT)
    patched.remove_attachments(SPLIT)
    devices = sharing_devices(patched, choice)
    if len(devices) < 2:
        note = one_gpu_note() or "this machine has no other to share it with"
        return patched, f"one device, {devices[0]}, computes the image: {note}"
    # The threads stay for further images, as long as there is a MODEL with this attachment.
    patched.set_attachments(SPLIT, (devices[1:], DeviceThreads()))
    patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, SPLIT, share_sampling)
    return patched, f"{len(devices)} devices share each image: {', '.join(map(str, devices))}"


def share_sampling(executor, noise: torch.Tensor, *args, **kwargs):
    """Sample with replicas on the other devices. ComfyUI calls this wrapper around a sampling."""
    guider = executor.class_obj
    patcher = guider.model_patcher
    other_devices, threads = patcher.get_attachment(SPLIT)
    if names := ", ".join(sorted(unshared(patcher, guider.conds))):
        raise InputError(
            f"model: got a patch that devices cannot share an image with ({names}); remove it, or SANA Split Image"
        )
    check_rows(noise.shape[2], len(other_devices) + 1)
    pixels = image_pixels(noise)
    if math.prod(pixels) < WORTHWHILE:
        few = "SANA Split Image: %d x %d pixels are few; one device may generate them as fast as several"
        logger.warning(few, *pixels)
    # ComfyUI calls MODEL and the clones of MultiGPU CFG Split with conditionings. They divide the other devices.
    heads = [patcher, *patcher.get_additional_models_with_key("multigpu")]
    clone_devices = {head.load_device for head in heads[1:]}
    free: list[ModelPatcher] = []
    for device in other_devices:
        if device not in clone_devices:
            free.append(clone_patcher(patcher, device, [patcher.model, *(replica.model for replica in free)]))
    # ComfyUI loads the additional models of a conditioning, and cleans up after them.
    positive = guider.conds["positive"][0]
    positive["additional_models"] = [*positive.get("additional_models", []), *free]
    shares = {head.load_device: free[i :: len(heads)] for i, head in enumerate(heads)}
    groups = {
        head.load_device: Group(head, shares[head.load_device], threads) for head in heads if shares[head.load_device]
    }
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


class Group:
    """The devices that compute the calls of `head` together: first its own device, then the replicas' devices.

    `threads` also computed earlier samplings.
    """

    def __init__(self, head: ModelPatcher, replicas: list[ModelPatcher], threads: DeviceThreads) -> None:
        self.head, self.replicas, self.threads = head, replicas, threads
        self.devices = [head.load_device, *(replica.load_device for replica in replicas)]
        self.split: Split | None = None

    def has_weights_of(self, transformer: torch.nn.Module, prompt: PromptBatch) -> bool:
        """Whether the call is of `head`. A node of another pack may call a second model in the same sampling."""
        return transformer is self.head.model.diffusion_model and prompt.weights in (None, self.head.patches_uuid)

    def velocity(
        self,
        transformer: torch.nn.Module,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        prompt: PromptBatch,
        guidance: torch.Tensor | None,
        control: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """Return the velocity at `x` as `forward.velocity` does, computed by the whole group. Cancel is polled."""
        transformers = [transformer, *(replica.model.diffusion_model for replica in self.replicas)]
        # A GPU without bf16 computes in another dtype than the first one.
        dtypes = [x.dtype, *(replica.model.get_dtype_inference() for replica in self.replicas)]
        if self.split is None:
            self.split = Split(self.devices, relative_speeds(self.devices, transformers), self.threads)

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
