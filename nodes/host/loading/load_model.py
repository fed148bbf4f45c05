"""A checkpoint's transformer as ComfyUI's MODEL, and LoRAs as patches of a MODEL and a CLIP."""

from __future__ import annotations

import math
from pathlib import Path

import comfy.lora
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.supported_models_base
import torch
from comfy.patcher_extension import WrappersMP
from comfy.weight_adapter import WeightAdapterBase

from ....sana_core.checkpoints import Checkpoint, find_part, follow, inspect_checkpoint
from ....sana_core.checkpoints.checkpoint import TRANSFORMER_KINDS, Source
from ....sana_core.checkpoints.configs import VIDEO2, hidden_width
from ....sana_core.checkpoints.generation import record_of, shift_of
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
from ....sana_core.model.reference import AUTO, DIFFUSERS
from ....sana_core.runtime.checks import check_name
from ....sana_core.video.latents import token_bytes
from ..compat import CORE_NODES, WEIGHTS, add_lora_names, remember_loader
from ..file_stats import Reloader
from ..sampling.core_nodes import begin
from ..sampling.guidance import add_image_guidance, follow_reference, refuse_unfit_samplers, require_sana
from ..sampling.latents import latent_format
from ..sampling.model import SanaDiffusionModel, SanaModel
from ..sampling.video_model import (
    SanaVideo2DiffusionModel,
    SanaVideoDiffusionModel,
    SanaVideoModel,
    video_format,
)
from .quantise import OFF, check_choice
from .weights import keep_on_device, load_component, read


class SanaConfig(comfy.supported_models_base.BASE):
    """Settings that BaseModel reads."""

    unet_config = {"disable_unet_model_creation": True}
    unet_extra_config = {}
    # ComfyUI uses these prefixes when it saves a checkpoint.
    text_encoder_key_prefix = ["text_encoders."]
    vae_key_prefix = ["vae."]

    def __init__(self, checkpoint: Checkpoint, part: Checkpoint, resolution: int | None, form: str) -> None:
        """`part`: the transformer in `checkpoint`. `form`: the format to quantise its blocks to."""
        embedding = part.headers["patch_embedding.weight" if part.is_video else "patch_embed.proj.weight"]
        inner = embedding.shape[0]
        # FreeU reads model_channels.
        super().__init__({**self.unet_config, "model_channels": inner})
        self.sampling_settings = {"shift": shift_of(checkpoint, resolution, part.reference)}
        self.latent_format = video_format(embedding.shape[1]) if part.is_video else latent_format(checkpoint)
        # Most SANA weights overflow in fp16. Use fp16 only if the file is in fp16.
        half = [torch.float16] if part.dtype == torch.float16 else []
        self.supported_inference_dtypes = [*half, torch.bfloat16, torch.float32]
        # ComfyUI reads the format of each layer itself. It only needs to know that some are quantised.
        self.quant_config = {"mixed_ops": True} if part.quantised or form != OFF else None
        # A line for the user.
        self.text = describe(part, resolution, form)
        # Bytes per token and per byte of dtype: three tensors of the feed-forward's width and ten of the inner width.
        hidden = hidden_width(part.headers)
        cell: float = 6 * hidden + 10 * inner
        if part.is_video:
            cell = token_bytes(inner, hidden, VIDEO2 in part.headers) / math.prod(embedding.shape[2:])
        self.memory_usage_factor = cell / (0.01 * 1024 * 1024)


def describe(part: Checkpoint, resolution: int | None, form: str) -> str:
    """Describe the transformer `part` in one line. `resolution`: the user's choice, or None. `form`: see SanaConfig.

    The line omits the usual: a size from the configuration, a model from the tensors, and the reference of the layout.
    """
    title = record_of(part).title + f" {part.parameters / 1e6:.1f}M" * part.variant.startswith("custom")
    pixels, source = (resolution, "chosen") if resolution else (part.resolution, part.resolution_from)
    parts = [title, f"{pixels} px" if source == "config" else f"{pixels} px ({source})"]
    if part.is_video:
        parts = [f"{title} (assumed from the file's name)" if part.is_assumed else title]
    parts += ["diffusers layout" if part.layout == DIFFUSERS else "NVIDIA's layout"]
    if (part.reference == DIFFUSERS) != (part.layout == DIFFUSERS):
        parts.append("computed as by diffusers" if part.reference == DIFFUSERS else "computed as by NVIDIA's code")
    parts.append(str(part.dtype).removeprefix("torch.") if form == OFF else f"quantised to {form}")
    return ", ".join(parts)


WEIGHT_DTYPES = {
    "default": None,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fn_fast": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def load_model(
    source: Source,
    weight_dtype: str = "default",
    resolution: int | None = None,
    reference: str = AUTO,
    quantise: str = OFF,
    disable_dynamic: bool = False,
) -> comfy.model_patcher.ModelPatcher:
    """Return the MODEL of a checkpoint.

    `weight_dtype` is one of WEIGHT_DTYPES, as in ComfyUI's own loader. `resolution` (pixels) and `reference` override
    the checkpoint. `quantise` is one of quantise.choices().
    """
    check_name("weight_dtype", weight_dtype, WEIGHT_DTYPES)
    checkpoint = inspect_checkpoint(source)
    path = checkpoint.path
    # Before the file is read, so that a later change is noticed.
    reload = Reloader(load_model, path)
    part = follow(find_part(checkpoint, *TRANSFORMER_KINDS), reference)
    check_choice(quantise, weight_dtype, part.quantised)
    config = SanaConfig(checkpoint, part, resolution, quantise)
    is_quantised = config.quant_config is not None
    load_device = comfy.model_management.get_torch_device()
    supported = config.supported_inference_dtypes
    stored = WEIGHT_DTYPES[weight_dtype]
    if stored is None:
        stored = comfy.model_management.unet_dtype(
            load_device, part.parameters, supported, weight_dtype=None if is_quantised else part.dtype
        )
    compute = comfy.model_management.unet_manual_cast(None if is_quantised else stored, load_device, supported)
    config.set_inference_dtype(stored, compute, device=load_device)
    operations = comfy.ops.pick_operations(
        stored, compute, load_device, fp8_optimizations=weight_dtype.endswith("fast"), model_config=config
    )
    transformer = load_component(part, stored, compute, operations, resolution, quantise)
    if any(hasattr(layer, "layout_type") and not layer._full_precision_mm for layer in transformer.modules()):
        config.text += ", rounds the inputs of layers: in a batch or a split image, an image differs slightly"
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    classes = {cls.library: cls for cls in (SanaVideoDiffusionModel, SanaVideo2DiffusionModel)}
    transformer.__class__ = classes.get(type(transformer), SanaDiffusionModel)
    model = (SanaVideoModel if part.is_video else SanaModel)(config, comfy.model_base.ModelType.FLOW)
    model.diffusion_model = transformer
    patcher = patcher_class(model, load_device, comfy.model_management.unet_offload_device())
    remember_loader(patcher, reload, path, weight_dtype, resolution, reference, quantise)
    add_lora_names(model_keys)
    keep_on_device(patcher)
    refuse_unfit_samplers(patcher)
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, CORE_NODES, begin)
    # SANA-Video has a mask for each prompt, so it does not share one.
    if not part.is_video:
        follow_reference(patcher)
        add_image_guidance(patcher)
    return patcher


class ReadAdapter(WeightAdapterBase):
    """An adapter that sana_core has read. ComfyUI calls it for the patched weight, and moves its tuple of tensors."""

    name = "sana"

    def __init__(self, loaded_keys: set[str], weights: tuple[float, tuple[str, ...], tuple[torch.Tensor, ...]]) -> None:
        self.loaded_keys = loaded_keys
        self.weights = weights

    def calculate_weight(self, weight: torch.Tensor, key: str, strength: float, *args, **options):
        scale, parts, tensors = self.weights
        return weight.copy_(adapted(weight, Adapter(dict(zip(parts, tensors, strict=True)), scale), strength))


def model_keys(model: torch.nn.Module) -> dict[str, str]:
    """Return {name in a LoRA: weight} for naming schemes that ComfyUI lacks for SANA. Empty for other models."""
    if not isinstance(model, SanaModel):
        return {}
    weights = [name for name, _ in model.diffusion_model.named_parameters() if name.endswith(".weight")]
    return {name: f"{WEIGHTS}{layer}.weight" for name, layer in written_names(layers_of(weights)).items()}


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
    model: comfy.model_patcher.ModelPatcher,
    clip: comfy.sd.CLIP | None,
    path: Path,
    strength_model: float = 1.0,
    strength_clip: float = 1.0,
    tensors: dict[str, torch.Tensor] | None = None,
) -> tuple[comfy.model_patcher.ModelPatcher, comfy.sd.CLIP | None, str, str]:
    """Return `model` and `clip` with the LoRA at `path`, the number of layers that fit, and the names of others.

    One of the two texts is "".

    They are applied as by the commands, which have no text encoder for the layers that were trained on it. `tensors`
    is the content of the file, if the caller has read it. If None, ComfyUI may map the file.
    """
    transformer = require_sana(model.model).diffusion_model
    checkpoint = find_part(inspect_checkpoint(path), "lora")
    tensors = read(path) if tensors is None else tensors
    shapes, layers = shapes_of(model.model), layers_of(name for name, _ in transformer.named_parameters())
    names = {written: f"{WEIGHTS}{layer}" for written, layer in written_names(layers).items()}
    if clip is not None:
        keys = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, {}) | clip_keys(clip.cond_stage_model)
        names |= {written: key.removesuffix(".weight") for written, key in keys.items()}
        shapes |= shapes_of(clip.cond_stage_model)
    adapters, misfits, total = read_adapters(checkpoint, tensors, shapes, names)
    patches = {
        name: ReadAdapter(set(), (adapter.scale, tuple(adapter.parts), tuple(adapter.parts.values())))
        for name, adapter in adapters.items()
    }
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
