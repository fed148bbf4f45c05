"""LoRAs as ComfyUI's patches: what sana_core reads, and of the rest what ComfyUI can really apply.

That is tried on weights that have a shape and no numbers: what it cannot apply it only logs, in the midst of sampling,
and goes on without it.
"""

from __future__ import annotations

from collections.abc import Mapping

import comfy.lora
import torch
from comfy.weight_adapter import WeightAdapterBase

from ....sana_core.checkpoints.lora import TWICE, Adapter, adapted

UNREADABLE = "its tensors are not those of a LoRA that ComfyUI reads"


class ReadAdapter(WeightAdapterBase):
    """An adapter as sana_core reads it. ComfyUI asks it for the weight, and moves tensors in tuples to devices."""

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
    """Add what ComfyUI can apply of a LoRA to `patches`, by weight, and return {layer that does not fit whole: why}.

    `keys` are the weights by the layers' names and `shapes` those of the weights. Why is empty for an unknown name. A
    layer is applied whole or not at all, and of two for the same weight the first: ComfyUI would forget one of them.
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
            found = comfy.lora.load_lora(as_wide(tensors, shapes[keys[name]]), {name: keys[name]}, log_missing=False)
        except (KeyError, RuntimeError):  # a part is missing, or alpha is no number
            found = {}
        fits = all(key in shapes and can_apply(patch, shapes[key]) for key, patch in found.items())
        if not found:
            misfits[name] = UNREADABLE
        elif not fits:
            got = " and ".join(str(list(tensor.shape)) for tensor in tensors.values() if tensor.shape)
            misfits[name] = f"got {got}, expected {list(shapes[keys[name]])}"
        elif patches.keys() & found.keys():
            misfits[name] = TWICE
        else:
            patches.update(found)
    return misfits


def as_wide(tensors: dict[str, torch.Tensor], shape: torch.Size) -> dict[str, torch.Tensor]:
    """Return `tensors` with the difference of a 1x1 convolution as a Linear layer has it, or the other way round."""
    return {
        key: tensor.reshape(shape) if key.endswith(".diff") and squeezed(tensor.shape) == squeezed(shape) else tensor
        for key, tensor in tensors.items()
    }


def squeezed(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of a weight, of a 1x1 convolution that of the same product of matrices."""
    return tuple(shape[:2] if shape[2:] == (1, 1) else shape)


def can_apply(patch: object, shape: torch.Size) -> bool:
    """Whether ComfyUI can apply `patch` to a weight of that shape."""
    # prompts run in inference mode, whose tensors have no version
    with torch.inference_mode(False):
        weight = torch.empty(shape, device="meta", dtype=torch.float32)
        try:
            if isinstance(patch, WeightAdapterBase) and patch.calculate_shape("") not in (None, tuple(shape)):
                return False  # it would make the weight larger, and the layer has no use for that
            patched = comfy.lora.calculate_weight([(1.0, without_numbers(patch), 1.0, None, None)], weight, "")
        except Exception:  # each kind of adapter raises what its arithmetic raises
            return False
        # it writes into the weight, or swallows its error and leaves the weight as it was
        return patched is weight and weight._version > 0


def without_numbers(patch: object) -> object:
    """Return a copy of `patch` whose tensors have no numbers, without limits, which ask for some, and new shapes."""
    if isinstance(patch, WeightAdapterBase):
        return type(patch)(patch.loaded_keys, without_numbers(patch.weights))
    if isinstance(patch, tuple):
        return tuple(map(without_numbers, patch))
    if isinstance(patch, torch.Tensor):
        return torch.empty(patch.shape, device="meta", dtype=torch.float32)
    return {float: 0.0, list: None}.get(type(patch), patch)
