"""LoRAs as ComfyUI's patches: adapters that sana_core reads, and other adapters that ComfyUI can apply.

Whether ComfyUI can apply an adapter is tried on meta tensors. Without this check, ComfyUI would only log an error
during sampling, and continue without the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping

import comfy.lora
import torch
from comfy.weight_adapter import WeightAdapterBase

from ....sana_core.checkpoints.lora import TWICE, Adapter, adapted

UNREADABLE = "its tensors are not those of a LoRA that ComfyUI reads"


class ReadAdapter(WeightAdapterBase):
    """An adapter that sana_core has read. ComfyUI calls it for the patched weight, and moves its tuple of tensors."""

    name = "sana"

    def __init__(self, loaded_keys: set[str], weights: tuple[float, tuple[str, ...], tuple[torch.Tensor, ...]]) -> None:
        self.loaded_keys = loaded_keys
        self.weights = weights

    def calculate_weight(self, weight: torch.Tensor, key: str, strength: float, *args, **options):
        scale, parts, tensors = self.weights
        return weight.copy_(adapted(weight, Adapter(dict(zip(parts, tensors, strict=True)), scale), strength))


def patch_of(adapter: Adapter) -> ReadAdapter:
    """Return ComfyUI's patch of a weight by `adapter`."""
    return ReadAdapter(set(), (adapter.scale, tuple(adapter.parts), tuple(adapter.parts.values())))


def fitting_patches(
    layers: Mapping[str, dict[str, torch.Tensor]],
    keys: Mapping[str, str],
    shapes: Mapping[str, torch.Size],
    patches: dict[str, object],
) -> dict[str, str]:
    """Add the layers of a LoRA that ComfyUI can apply to `patches`. Returns {layer that does not fit: reason}.

    `keys` is {layer: weight} and `shapes` is {weight: shape}. The reason is empty for an unknown layer. A layer is
    applied completely or not at all. If two layers have the same weight, only the first is applied, because ComfyUI
    would forget one of them without a message.
    """
    misfits = {}
    for name, tensors in layers.items():
        if name not in keys:
            misfits[name] = ""
            continue
        if not all(tensor.numel() for tensor in tensors.values()):
            misfits[name] = UNREADABLE
            continue
        try:
            loaded = comfy.lora.load_lora(as_wide(tensors, shapes[keys[name]]), {name: keys[name]}, log_missing=False)
        except (KeyError, RuntimeError):  # A part is missing, or alpha is not a single number.
            loaded = {}
        fits = all(key in shapes and can_apply(patch, shapes[key]) for key, patch in loaded.items())
        if not loaded:
            misfits[name] = UNREADABLE
        elif not fits:
            got = " and ".join(str(list(tensor.shape)) for tensor in tensors.values() if tensor.shape)
            misfits[name] = f"got {got}, expected {list(shapes[keys[name]])}"
        elif patches.keys() & loaded.keys():
            misfits[name] = TWICE
        else:
            patches.update(loaded)
    return misfits


def as_wide(tensors: dict[str, torch.Tensor], shape: torch.Size) -> dict[str, torch.Tensor]:
    """Return `tensors` with `.diff` reshaped to `shape`, if one is a 1x1 convolution and the other a Linear."""
    return {
        key: tensor.reshape(shape) if key.endswith(".diff") and squeezed(tensor.shape) == squeezed(shape) else tensor
        for key, tensor in tensors.items()
    }


def squeezed(shape: torch.Size) -> tuple[int, ...]:
    """Return `shape` without the kernel size of a 1x1 convolution."""
    return tuple(shape[:2] if shape[2:] == (1, 1) else shape)


def can_apply(patch: object, shape: torch.Size) -> bool:
    """Whether ComfyUI can apply `patch` to a weight of that shape."""
    # ComfyUI runs nodes in inference mode, but tensors of inference mode have no `_version`.
    with torch.inference_mode(False):
        weight = torch.empty(shape, device="meta", dtype=torch.float32)
        try:
            if isinstance(patch, WeightAdapterBase) and patch.calculate_shape("") not in (None, tuple(shape)):
                # It would enlarge the weight, which the layer does not support.
                return False
            patched = comfy.lora.calculate_weight([(1.0, without_numbers(patch), 1.0, None, None)], weight, "")
        except Exception:  # The kinds of adapters raise different errors.
            return False
        # ComfyUI writes into the weight. If it catches an error, the weight is unchanged.
        return patched is weight and weight._version > 0


def without_numbers(patch: object) -> object:
    """Return a copy of `patch` with meta tensors, with every float 0, and without lists such as new shapes."""
    if isinstance(patch, WeightAdapterBase):
        return type(patch)(patch.loaded_keys, without_numbers(patch.weights))
    if isinstance(patch, tuple):
        return tuple(map(without_numbers, patch))
    if isinstance(patch, torch.Tensor):
        return torch.empty(patch.shape, device="meta", dtype=torch.float32)
    return {float: 0.0, list: None}.get(type(patch), patch)
