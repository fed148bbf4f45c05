"""LoRAs for SANA as patches of a MODEL and a CLIP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import comfy.lora
import comfy.sd
import torch
from comfy.weight_adapter import WeightAdapterBase

from ....sana_core.checkpoints import find_part, inspect_checkpoint
from ....sana_core.checkpoints.lora import (
    Adapter,
    adapted,
    layers_of,
    listed,
    misfit_error,
    read_adapters,
    reference_note,
    written_names,
)
from ..sampling.guidance import require_sana
from ..sampling.model import SanaModel
from .weights import read

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

PREFIX = "diffusion_model."


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
    """Return ComfyUI's patch of a parameter by `adapter`."""
    return ReadAdapter(set(), (adapter.scale, tuple(adapter.parts), tuple(adapter.parts.values())))


def model_keys(model: torch.nn.Module) -> dict[str, str]:
    """Return {name in a LoRA: weight} for naming schemes that ComfyUI lacks for SANA. Empty for other models."""
    if not isinstance(model, SanaModel):
        return {}
    weights = [name for name, _ in model.diffusion_model.named_parameters() if name.endswith(".weight")]
    return {name: f"{PREFIX}{layer}.weight" for name, layer in written_names(layers_of(weights)).items()}


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
) -> tuple[ModelPatcher, comfy.sd.CLIP | None, str, str]:
    """Return `model` and `clip` with the LoRA at `path`, the number of layers that fit, and the names of others.

    One of the two texts is "".

    They are applied as by the commands, which have no text encoder for the layers that were trained on it. `tensors`
    is the content of the file, if the caller has read it. If None, ComfyUI may map the file.
    """
    transformer = require_sana(model.model).diffusion_model
    checkpoint = find_part(inspect_checkpoint(path), "lora")
    tensors = read(path) if tensors is None else tensors
    shapes, layers = shapes_of(model.model), layers_of(name for name, _ in transformer.named_parameters())
    names = {written: f"{PREFIX}{layer}" for written, layer in written_names(layers).items()}
    if clip is not None:
        keys = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, {}) | clip_keys(clip.cond_stage_model)
        names |= {written: key.removesuffix(".weight") for written, key in keys.items()}
        shapes |= shapes_of(clip.cond_stage_model)
    adapters, misfits, total = read_adapters(checkpoint, tensors, shapes, names)
    patches = {name: patch_of(adapter) for name, adapter in adapters.items()}
    if not patches:
        raise misfit_error(checkpoint.name, total, misfits)
    report = f"{checkpoint.name}: {total - len(misfits)} of {total} layers fit"
    if misfits:
        report += f", not {listed(misfits)}"
    if note := reference_note(checkpoint.name, checkpoint.weights.metadata, transformer.config.reference):
        report += f"; {note}"
    model = model.clone()
    model.add_patches(patches, strength_model)
    if clip is not None:
        clip = clip.clone()
        clip.add_patches(patches, strength_clip)
    return model, clip, *(("", report) if misfits or note else (report, ""))


def shapes_of(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in model.named_parameters(remove_duplicate=False)}
