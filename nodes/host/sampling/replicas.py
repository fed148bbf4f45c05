"""Replicas of a MODEL or a VAE: the same weights once more, on another device.

    module of the MODEL   cuda:0  <- the loader's ModelPatcher and its clones
        | list
    replica               cuda:1  <- a ModelPatcher with weights of its own, and clones of it with LoRAs and settings

ComfyUI lists each loaded module with a weak reference to the ModelPatcher that loaded it. When that patcher dies, the
entry continues with the patcher's `parent` and with the parent's device. So the parent of a clone here is the replica,
which has the same weights and the same device, and the replica has no parent. The module of the MODEL holds its
replicas. Later runs use them again, ComfyUI can unload them at any time, and they are freed together with the MODEL.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from comfy.patcher_extension import CallbacksMP

from ..compat.internals import is_half_unloaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from comfy.model_patcher import ModelPatcher

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
