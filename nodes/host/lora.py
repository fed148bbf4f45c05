"""LoRA on SANA: whose names fit which weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import comfy.lora
import comfy.sd
import comfy.utils
import torch

from ...sana_core.checkpoints import CheckpointInfo, find_part, inspect_checkpoint
from ...sana_core.checkpoints.files import brief, parse_json
from ...sana_core.checkpoints.schemas import check_ranks
from ...sana_core.errors import CheckpointError, InputError
from ...sana_core.lora import MAGNITUDE, PART, dora_scale, file_scale, reference_note
from .adapters import LEAF, fitting_patches, split_layers
from .model import SanaModel
from .weights import read

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

logger = logging.getLogger(__name__)
# diffusers' name of PEFT's settings in the file's metadata
PEFT_SETTINGS = "lora_adapter_metadata"
# of the layers that do not fit, and characters of them all
SHOWN, LONGEST = 3, 240


def model_keys(model: torch.nn.Module) -> dict[str, str]:
    """Return {name in a LoRA: weight} in the dialects that ComfyUI does not know of SANA by itself; else nothing.

    diffusers and PEFT write transformer. or base_model.model. before the module's name, or nothing; OneTrainer and
    SimpleTuner's LyCORIS write it with underscores.
    """
    if not isinstance(model, SanaModel):
        return {}
    prefix, suffix = "diffusion_model.", ".weight"
    keys = {}
    for weight in model.state_dict():
        if weight.startswith(prefix) and weight.endswith(suffix):
            name = weight.removeprefix(prefix).removesuffix(suffix)
            flat = name.replace(".", "_")
            dotted = (name, f"transformer.{name}", f"base_model.model.{name}", f"transformer.base_model.model.{name}")
            keys.update(dict.fromkeys((*dotted, f"lora_transformer_{flat}", f"lycoris_{flat}"), weight))
    return keys


def clip_keys(text_model) -> dict[str, str]:
    """Return {name in a LoRA: weight} of Gemma 2 as PEFT writes it."""
    inner = "gemma2_2b.transformer.model."
    keys = {}
    for weight in text_model.state_dict():
        if weight.startswith(inner) and weight.endswith(".weight"):
            name = weight.removeprefix(inner).removesuffix(".weight")
            keys.update({f"text_encoder.{name}": weight, f"text_encoder.model.{name}": weight})
    return keys


def apply_lora(
    model: ModelPatcher, clip: comfy.sd.CLIP | None, path: Path, strength_model: float, strength_clip: float
) -> tuple[ModelPatcher, comfy.sd.CLIP | None, str]:
    """Return `model` and `clip` with the LoRA at `path`, and how much of it fits.

    Raises InputError for a MODEL that is not SANA's, CheckpointError for a file that is no LoRA, and for a LoRA of
    which nothing fits.
    """
    if not isinstance(model.model, SanaModel):
        raise InputError(f"model: got {type(model.model).__name__}, expected a SANA model; use SANA Loader")
    info = find_part(inspect_checkpoint(path), "lora")
    lora = with_alpha(read(path), info)
    model, clip, report = add_lora(model, clip, lora, info.name, strength_model, strength_clip)
    if note := reference_note(info, model.model.diffusion_model.config.reference):
        logger.warning(note)
        report += f"; {note}"
    return model, clip, report


def add_lora(
    model: ModelPatcher,
    clip: comfy.sd.CLIP | None,
    lora: dict[str, torch.Tensor],
    name: str,
    strength_model: float = 1.0,
    strength_clip: float = 1.0,
) -> tuple[ModelPatcher, comfy.sd.CLIP | None, str]:
    """Return `model` and `clip` with the tensors `lora` of the file `name` on them, and how much of it fits.

    Raises CheckpointError for a LoRA of which nothing fits.
    """
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    shapes = shapes_of(model.model)
    if clip is not None:
        keys = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, keys)
        keys.update(clip_keys(clip.cond_stage_model))
        shapes.update(shapes_of(clip.cond_stage_model))
    layers = {name: with_scale(tensors, model, keys.get(name)) for name, tensors in split_layers(lora).items()}
    patches, misfits = fitting_patches(layers, keys, shapes)
    total = len(layers)
    if not patches:
        raise CheckpointError(
            f"{name}: none of its {total} layers fit this model, among them {listed(misfits)}; "
            "choose a LoRA trained on this SANA"
        )
    report = f"{name}: {total - len(misfits)} of {total} layers fit"
    if misfits:
        report += f", not {listed(misfits)}" + (" and others" if len(misfits) > SHOWN else "")
        logger.warning(report)
    model = model.clone()
    model.add_patches(patches, strength_model)
    if clip is not None:
        clip = clip.clone()
        clip.add_patches(patches, strength_clip)
    return model, clip, report


def with_scale(tensors: dict[str, torch.Tensor], model: ModelPatcher, key: str | None) -> dict[str, torch.Tensor]:
    """Return the `tensors` of a layer with what ComfyUI reads of a DoRA, where PEFT alone has written them."""
    matches = {name: match[1] for name in tensors if (match := PART.search(name))}
    parts = {part: tensors[name] for name, part in matches.items()}
    if key is None or "dora_scale" in parts or not {MAGNITUDE, "lora_A", "lora_B"} <= parts.keys():
        return tensors
    weight = comfy.utils.get_attr(model.model, key)
    try:
        scale = dora_scale(weight, parts, file_scale(parts, {"lora_alpha": None}))
    except RuntimeError:  # of shapes that do not fit, as a scale neither
        scale = parts[MAGNITUDE]
    # all names have the same beginning
    return {**tensors, LEAF.sub("", next(iter(tensors))) + ".dora_scale": scale}


def shapes_of(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in model.named_parameters(remove_duplicate=False)}


def listed(misfits: dict[str, str]) -> str:
    """Return the first of the layers that do not fit, each with what is wrong where its name is known."""
    shown = [f"{name} ({why})" if why else name for name, why in sorted(misfits.items())[:SHOWN]]
    return brief(", ".join(shown), LONGEST)


def with_alpha(lora: dict, info: CheckpointInfo) -> dict:
    """Return `lora` with the alpha that PEFT keeps in the file's metadata, where it is not the rank.

    Raises CheckpointError for metadata that are not PEFT's.
    """
    name = f"{info.name}: {PEFT_SETTINGS}"
    settings = parse_json(info.weights.metadata.get(PEFT_SETTINGS, "{}"), name)
    check_ranks(name, settings)
    alpha, rank = settings.get("transformer.lora_alpha"), settings.get("transformer.r")
    if alpha is None or alpha == rank:
        return lora
    return {**{f"{layer}.alpha": torch.tensor(float(alpha)) for layer in split_layers(lora)}, **lora}
