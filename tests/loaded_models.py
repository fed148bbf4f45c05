"""ComfyUI's list of loaded models: an empty one for a time, and a comparison with where the tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def empty_model_list() -> Iterator[None]:
    """Give ComfyUI an empty list of loaded models in the block.

    A model that dies removes itself from the list in place. The earlier list may have dead models after the block,
    and ComfyUI fails on those.
    """
    import comfy.model_management as management

    earlier = management.current_loaded_models
    management.current_loaded_models = []
    try:
        yield
    finally:
        management.current_loaded_models = earlier
        management.cleanup_models()


def misplaced() -> list[str]:
    """Return a line for each tensor that is not on the device in ComfyUI's list."""
    import comfy.model_management as management

    faults = []
    for entry in management.current_loaded_models:
        if entry.model is None:
            faults.append(f"{entry.real_model()}: listed without a patcher")
            continue
        model, device = entry.model.model, entry.device
        name = type(model).__name__
        if entry.model.is_dynamic():
            continue
        if model.device != device:
            faults.append(f"{name}: listed on {device}, and notes {model.device} itself")
        for path, module in model.named_modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                # A layer that ComfyUI casts may stay on the CPU, if the model is partly loaded.
                stays = model.model_lowvram and hasattr(module, "comfy_cast_weights")
                if tensor.device != device and not (stays and tensor.device.type == "cpu"):
                    faults.append(f"{name}.{path}: on {tensor.device}, listed on {device}")
                    break
        # ComfyUI counts the tensors that a file has.
        loaded = sum(tensor.nbytes for tensor in model.state_dict().values() if tensor.device == device)
        if device.type != "cpu" and not model.model_lowvram and loaded != entry.model.loaded_size():
            faults.append(f"{name}: {loaded} bytes on {device}, listed {entry.model.loaded_size()}")
    return faults


def listed_bytes(device: torch.device) -> int:
    """Return the bytes on `device` of all models in ComfyUI's list."""
    import comfy.model_management as management

    tensors = {}
    for entry in management.current_loaded_models:
        if entry.model is not None:
            for tensor in (*entry.model.model.parameters(), *entry.model.model.buffers()):
                if tensor.device == device:
                    tensors[id(tensor)] = tensor.nbytes
    return sum(tensors.values())
