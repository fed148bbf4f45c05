"""An adapter that begins where a file's stands, be it of this package or of another trainer, in the usual dialects."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints import CheckpointInfo, find_part, inspect_checkpoint
from ..checkpoints.files import brief, parse_json, read_json
from ..checkpoints.headers import read_file
from ..checkpoints.schemas import check_ranks
from ..errors import InputError
from .adapters import MAGNITUDE, SCALED, adapter_layers, layer_names, parts_of
from .settings import TARGETS, Method

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

Tensors = dict[str, torch.Tensor]

BOTH = Method(targets="both")
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


def begin_at(transformer: SanaTransformer2DModel, method: Method) -> None:
    """Give the adapter that `add_adapter` put on `transformer` the weights in the file `method.start`.

    Its effect is that of the file: where the file's alpha, which stands beside its tensors or in PEFT's settings,
    scales otherwise than `method`, the weights make up for it. Raises InputError where kind, rank or targets of
    `method` are not the file's, with what they should be, and CheckpointError, MissingFileError or ReadError for what
    is no LoRA.
    """
    info = find_part(inspect_checkpoint(method.start), "lora")
    names = [name for name, _ in transformer.named_modules() if re.fullmatch(layer_names(BOTH), name)]
    found = by_layer(read_file(info.path), names, info.name)
    check_kind(found, method.kind, info.name)
    layers = adapter_layers(transformer)
    check_targets(found.keys(), layers.keys(), names, method.targets, info.name)
    settings = peft_settings(info)
    for name, layer in layers.items():
        own = parts_of(layer, data=False)
        check_parts(found[name], own, f"{info.name}: {name}")
        scale = file_scale(found[name], settings) / method.scale
        for part, parameter in own.items():
            factor = scale if part in SCALED else 1.0
            parameter.data.copy_((found[name][part].float() * factor).reshape(parameter.shape))


def by_layer(tensors: Mapping[str, torch.Tensor], names: Collection[str], file: str) -> dict[str, Tensors]:
    """Return {layer: {part: tensor}} of a LoRA's `tensors`, `names` being the layers that it may have.

    Raises InputError for a tensor that belongs to no layer, or is of no kind that is trained.
    """
    known = {prefix + name: name for name in names for prefix in DOTTED}
    known |= {prefix + name.replace(".", "_"): name for name in names for prefix in FLAT}
    found: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        match = PART.search(key)
        layer = known.get(key[: match.start()]) if match else None
        if match is None or layer is None:
            raise InputError(f"{file}: got {brief(key)}, which no adapter here has; begin without start")
        found.setdefault(layer, {})[SAME.get(match[1], match[1])] = tensor
    for parts in found.values():
        if MAGNITUDE in parts:
            # the same for ComfyUI, see `core_magnitudes`
            parts.pop("dora_scale", None)
    return found


def check_kind(found: Mapping[str, Tensors], kind: str, file: str) -> None:
    """Raise InputError unless the file's adapter is of that `kind`."""
    parts = {part for tensors in found.values() for part in tensors}
    if "dora_scale" in parts:
        raise InputError(
            f"{file}: got a DoRA with dora_scale alone, expected lora_magnitude_vector; begin without start"
        )
    got = "lokr" if any(part.startswith("lokr") for part in parts) else "dora" if MAGNITUDE in parts else "lora"
    if got != kind:
        raise InputError(f"{file}: got a {got}, but method.kind is {kind}; set kind to {got}")


def check_targets(
    found: Collection[str], trained: Collection[str], names: Collection[str], targets: str, file: str
) -> None:
    """Raise InputError unless the file has just the layers that are `trained`."""
    if set(found) == set(trained):
        return
    for fitting in TARGETS:
        if set(found) == {name for name in names if re.fullmatch(layer_names(Method(targets=fitting)), name)}:
            raise InputError(f"{file}: its layers are of targets {fitting}, but method.targets is {targets}; set it so")
    first = min(set(found) ^ set(trained))
    where = "missing" if first in trained else "more than is trained"
    raise InputError(f"{file}: its layers are of no targets, {first} is {where}; begin without start")


def check_parts(found: Tensors, own: Mapping[str, torch.Tensor], name: str) -> None:
    """Raise InputError unless the file's tensors of a layer have the shapes of its adapter."""
    for part in sorted(own.keys() | found.keys() - {"alpha"}):
        if part not in found or part not in own:
            raise InputError(f"{name}: {part} is {'missing' if part in own else 'too much'}; begin without start")
        got, expected = (list(tensor.shape) for tensor in (found[part], own[part]))
        if squeezed(got) == squeezed(expected):
            continue
        rank = 1 if part == "lora_B" else 0
        ranked = part in ("lora_A", "lora_B") and len(got) == len(expected)
        if ranked and squeezed(got[:rank] + got[rank + 1 :]) == squeezed(expected[:rank] + expected[rank + 1 :]):
            raise InputError(
                f"{name}: got rank {got[rank]}, but method.rank is {expected[rank]}; set rank to {got[rank]}"
            )
        raise InputError(f"{name}: got {part} of {got}, expected {expected}; choose a LoRA of this model")


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
            raise InputError(
                f"{info.name}: got a LoRA with {pattern}, expected one rank and alpha; begin without start"
            )
    return {key: settings.get(f"transformer.{key}") for key in ("r", "lora_alpha", "use_rslora")}


def file_scale(found: Tensors, settings: Mapping[str, Any]) -> float:
    """Return what the file's programs multiply a layer's adapter by."""
    if "lora_A" not in found:
        return 1.0
    rank = len(found["lora_A"])
    if "alpha" in found:
        return float(found["alpha"]) / rank
    if settings["lora_alpha"] is None:
        return 1.0
    return float(settings["lora_alpha"]) / (math.sqrt(rank) if settings["use_rslora"] else rank)
