"""The adapter in a LoRA's file: LoRA, DoRA or LoKr of this package or of another trainer, in the usual dialects."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .checkpoints import CheckpointInfo, find_part, inspect_checkpoint
from .checkpoints.files import brief, parse_json, read_json
from .checkpoints.headers import read_file
from .checkpoints.load import check_finite
from .checkpoints.schemas import check_ranks
from .errors import InputError
from .reference import RULES

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

Tensors = dict[str, torch.Tensor]

MAGNITUDE = "lora_magnitude_vector"
# what stands before a module's name: diffusers', PEFT's, nothing, ComfyUI's; and before one with underscores for its
# dots: kohya's, OneTrainer's, SimpleTuner's
DOTTED = ("transformer.", "base_model.model.", "transformer.base_model.model.", "", "diffusion_model.")
FLAT = ("lora_unet_", "lora_transformer_", "lycoris_")
# of a tensor's name, the part of an adapter, without the name that PEFT gives to an adapter in memory
PART = re.compile(
    rf"\.(lora_A|lora_B|lora_down|lora_up|{MAGNITUDE}|lokr_w[12](?:_[ab])?|alpha|dora_scale)(?:\.default)?(?:\.weight)?$"
)
SAME = {"lora_down": "lora_A", "lora_up": "lora_B"}
# diffusers' name of PEFT's settings in the file's metadata, and PEFT's own file of them beside its weights
IN_FILE, BESIDE = "lora_adapter_metadata", ("adapter_model.safetensors", "adapter_config.json")


@torch.no_grad()
def merge_loras(transformer: SanaTransformer2DModel, loras: Sequence[tuple[str, float]]) -> None:
    """Add the adapters of `loras`, pairs of a file and its strength, to the weights of `transformer`.

    On the meta device only names and shapes are checked. Raises InputError for a tensor that belongs to no layer of the
    model or does not fit it, CheckpointError, MissingFileError or ReadError for what is no LoRA.
    """
    layers = {
        name: module
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
    }
    for file, strength in loras:
        info = find_part(inspect_checkpoint(file), "lora")
        settings = peft_settings(info)
        for name, parts in by_layer(read_file(info.path), layers, info.name).items():
            weight, scale = layers[name].weight, file_scale(parts, settings)
            check_fits(weight, parts, f"{info.name}: {name}")
            weight.copy_(adapted(weight, parts, scale, strength))


def reference_note(info: CheckpointInfo, reference: str) -> str:
    """Return a line for the user where the LoRA `info` was trained by this package on a model of another reference."""
    trained = info.weights.metadata.get("reference")
    if trained not in RULES or trained == reference:
        return ""
    return (
        f"{info.name}: trained with reference {trained}, but the model follows {reference}, which draws others; "
        f"choose {trained}"
    )


def dora_scale(weight: torch.Tensor, parts: Tensors, scale: float = 1.0) -> torch.Tensor:
    """Return what ComfyUI wants of a DoRA of PEFT's `parts` on `weight`, float32 on the CPU, shaped like its rows.

    PEFT's weight is m (W + BA) / |W + BA|, by rows. ComfyUI computes s (W + BA) / (|W| + eps) (weight_decompose in
    comfy/weight_adapter/base.py), so its s is m (|W| + eps) / |W + BA|.
    """
    flat = weight.detach().float().cpu().flatten(1)
    up, down = (parts[part].float().cpu().flatten(1) for part in ("lora_B", "lora_A"))
    norms = flat.norm(dim=1) + torch.finfo(torch.float32).eps
    found = parts[MAGNITUDE].float().cpu().flatten() * norms / (flat + scale * (up @ down)).norm(dim=1)
    return found.reshape(-1, *[1] * (weight.ndim - 1)).contiguous()


def check_fits(weight: torch.Tensor, parts: Tensors, name: str) -> None:
    """Raise InputError unless the `parts` of an adapter fit `weight`; without numbers, which take no memory."""
    try:
        adapted(weight.to("meta"), parts)
    except (KeyError, RuntimeError):
        got = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in sorted(parts.items()))
        raise InputError(
            f"{name}: got {brief(got)}, expected parts for a weight {list(weight.shape)}; choose a LoRA of this model"
        ) from None


def adapted(weight: torch.Tensor, parts: Tensors, scale: float = 1.0, strength: float = 1.0) -> torch.Tensor:
    """Return `weight` with the adapter of its `parts`, in float32 and in the order of ComfyUI's operations, so that
    weights in float32 are the same to the bit.

    That is W + strength * scale * BA for LoRA, the Kronecker product in the place of BA for LoKr, and for DoRA (Liu et
    al., 2024) the rows of W + scale * BA brought to the file's magnitudes (comfy/weight_adapter/base.py,
    weight_decompose).
    """
    weight = weight.float()
    parts = {part: tensor.to(weight.device, torch.float32) for part, tensor in parts.items()}
    delta = product_of(parts).reshape(weight.shape)
    if not parts.keys() & {"dora_scale", MAGNITUDE}:
        return weight + strength * scale * delta
    changed = weight + delta * scale
    # kohya's and ComfyUI's magnitudes are factors of the weight's own, PEFT's those of the result
    of, magnitude = (weight, parts["dora_scale"]) if "dora_scale" in parts else (changed, parts[MAGNITUDE])
    norms = of.flatten(1).norm(dim=1) + torch.finfo(torch.float32).eps
    changed = changed * (magnitude.reshape(norms.shape) / norms).reshape(-1, *[1] * (weight.ndim - 1))
    return changed if strength == 1.0 else weight + strength * (changed - weight)


def product_of(parts: Tensors) -> torch.Tensor:
    """Return the product of a LoRA's two matrices, or the Kronecker product of a LoKr's, each of which may come as the
    product of two. Raises KeyError for one that is missing."""
    if "lora_A" in parts:
        return parts["lora_B"].flatten(1) @ parts["lora_A"].flatten(1)
    first, second = (
        parts[name] if name in parts else parts[f"{name}_a"].flatten(1) @ parts[f"{name}_b"].flatten(1)
        for name in ("lokr_w1", "lokr_w2")
    )
    return torch.kron(first.flatten(1), second.flatten(1))


def by_layer(tensors: Mapping[str, torch.Tensor], names: Collection[str], file: str) -> dict[str, Tensors]:
    """Return {layer: {part: tensor}} of a LoRA's `tensors`, `names` being the layers that it may have.

    Raises InputError for a tensor that belongs to no layer, is of no kind that is trained, or empty, and
    CheckpointError for one that is not finite.
    """
    known = {prefix + name: name for name in names for prefix in DOTTED}
    known |= {prefix + name.replace(".", "_"): name for name in names for prefix in FLAT}
    found: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        match = PART.search(key)
        layer = known.get(key[: match.start()]) if match else None
        if match is None or layer is None:
            raise InputError(
                f"{file}: got {brief(key)}, which is no part of a LoRA, DoRA or LoKr of a layer; choose another"
            )
        check_finite(file, key, tensor)
        if not tensor.numel() or match[1] == "alpha" and tensor.numel() > 1:
            wanted = "one number" if match[1] == "alpha" else "numbers"
            raise InputError(f"{file}: got {brief(key)} {list(tensor.shape)}, expected {wanted}; choose another")
        found.setdefault(layer, {})[SAME.get(match[1], match[1])] = tensor
    return found


def squeezed(shape: list[int]) -> list[int]:
    """Return a shape without the ones at its end: 1x1 convolutions are linear layers elsewhere."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def peft_settings(info: CheckpointInfo) -> dict[str, Any]:
    """Return r, lora_alpha and use_rslora as PEFT wrote them into the file or beside it, as far as it did.

    Raises CheckpointError for settings that are not PEFT's.
    """
    beside = info.path.with_name(BESIDE[1])
    if info.path.name == BESIDE[0] and beside.is_file():
        settings = {f"transformer.{key}": value for key, value in read_json(beside).items()}
    else:
        settings = parse_json(info.weights.metadata.get(IN_FILE, "{}"), f"{info.name}: {IN_FILE}")
    check_ranks(info.name, settings)
    for pattern in ("alpha_pattern", "rank_pattern"):
        if settings.get(f"transformer.{pattern}"):
            raise InputError(f"{info.name}: got a LoRA with {pattern}, expected one rank and alpha; choose another")
    return {key: settings.get(f"transformer.{key}") for key in ("r", "lora_alpha", "use_rslora")}


def file_scale(found: Tensors, settings: Mapping[str, Any]) -> float:
    """Return what the file's programs multiply a layer's adapter by; a LoKr of two whole matrices has no rank."""
    factor = next((found[part] for part in ("lora_A", "lokr_w2_b", "lokr_w1_b") if part in found), None)
    if factor is None:
        return 1.0
    rank = len(factor)
    if "alpha" in found:
        return float(found["alpha"]) / rank
    if settings["lora_alpha"] is None:
        return 1.0
    return float(settings["lora_alpha"]) / (math.sqrt(rank) if settings["use_rslora"] else rank)
