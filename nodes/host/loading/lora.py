"""LoRAs for SANA as patches of a MODEL and a CLIP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import comfy.lora
import comfy.sd
import torch

from ....sana_core.checkpoints import find_part, inspect_checkpoint
from ....sana_core.checkpoints.lora import (
    layer_weights,
    listed,
    misfit_error,
    read_adapters,
    reference_note,
    written_names,
)
from ....sana_core.runtime.text import get_logger
from ..sampling.guidance import require_sana
from ..sampling.model import SanaModel
from .adapters import fitting_patches, patch_of
from .weights import read

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

logger = get_logger(__name__)
PREFIX = "diffusion_model."


def model_keys(model: torch.nn.Module) -> dict[str, str]:
    """Return {name in a LoRA: weight} for naming schemes that ComfyUI lacks for SANA. Empty for other models."""
    if not isinstance(model, SanaModel):
        return {}
    names = written_names(layer_weights(model.diffusion_model))
    return {name: f"{PREFIX}{layer}.weight" for name, layer in names.items()}


def clip_keys(text_model) -> dict[str, str]:
    """Return {name in a LoRA of PEFT: weight} of Gemma 2."""
    inner = "gemma2_2b.transformer.model."
    keys = {}
    for weight in text_model.state_dict():
        if weight.startswith(inner) and weight.endswith(".weight"):
            name = weight.removeprefix(inner).removesuffix(".weight")
            keys.update({f"text_encoder.{name}": weight, f"text_encoder.model.{name}": weight})
    return keys


def apply_lora(
    model: ModelPatcher,
    clip: comfy.sd.CLIP | None,
    path: Path,
    strength_model: float = 1.0,
    strength_clip: float = 1.0,
    tensors: dict[str, torch.Tensor] | None = None,
) -> tuple[ModelPatcher, comfy.sd.CLIP | None, str]:
    """Return `model` and `clip` with the LoRA at `path`, and a text with the number of layers that fit.

    Adapters that sana_core reads are applied as by the commands. ComfyUI applies the text encoder's layers and other
    kinds of adapters. `tensors` is the content of the file, if the caller has read it. If None, ComfyUI may map the
    file.
    """
    transformer = require_sana(model.model).diffusion_model
    checkpoint = find_part(inspect_checkpoint(path), "lora")
    weights = layer_weights(transformer)
    tensors = read(path) if tensors is None else tensors
    adapters, other_layers, misfits = read_adapters(
        checkpoint, tensors, {name: weight.shape for name, weight in weights.items()}
    )
    total = len(adapters) + len(other_layers) + len(misfits)
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    shapes = shapes_of(model.model)
    if clip is not None:
        keys = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, keys)
        keys.update(clip_keys(clip.cond_stage_model))
        shapes.update(shapes_of(clip.cond_stage_model))
    patches = {f"{PREFIX}{layer}.weight": patch_of(adapter) for layer, adapter in adapters.items()}
    misfits |= fitting_patches(other_layers, keys, shapes, patches)
    if not patches:
        raise misfit_error(checkpoint.name, total, misfits)
    report = f"{checkpoint.name}: {total - len(misfits)} of {total} layers fit"
    if misfits:
        report += f", not {listed(misfits)}"
        logger.warning(report)
    if note := reference_note(checkpoint.name, checkpoint.weights.metadata, transformer.config.reference):
        logger.warning(note)
        report += f"; {note}"
    model = model.clone()
    model.add_patches(patches, strength_model)
    if clip is not None:
        clip = clip.clone()
        clip.add_patches(patches, strength_clip)
    return model, clip, report


def shapes_of(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in model.named_parameters(remove_duplicate=False)}
