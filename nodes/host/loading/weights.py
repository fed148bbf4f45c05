"""Build a recognised component with ComfyUI's operations, fill it from its file, and describe it for saving."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.quant_ops
import comfy.utils
import torch

from ....sana_core.checkpoints.checkpoint import CHECKPOINT_KINDS, FP8_FILE
from ....sana_core.checkpoints.detect import SAVED_CONFIG
from ....sana_core.checkpoints.headers import SAFETENSORS, exact_half, read_file
from ....sana_core.checkpoints.load import build_module, check_names, component_tensors, fill_module
from ....sana_core.checkpoints.quantised import dequantised, layer_tensors, quantised_layers
from ....sana_core.runtime.cancellation import Polled
from ....sana_core.runtime.text import Json
from .layers import adopt, is_mixed, is_stored
from .quantise import OFF, fill_quantised, is_product, linear_like, quantise

if TYPE_CHECKING:
    from ....sana_core.checkpoints import Checkpoint


def read(
    file: Path, names: Collection[str] | None = None, half: bool = False, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of `file` as `read_file` does.

    With dynamic VRAM, ComfyUI maps .safetensors files and streams weights from the mapped file to the GPU. The result
    then has all tensors of the file, even if `names` are fewer, and `dtype` has no effect.
    """
    is_dynamic = comfy.model_patcher.CoreModelPatcher is not comfy.model_patcher.ModelPatcher
    if is_dynamic and file.suffix.lower() in SAFETENSORS:
        tensors = comfy.utils.load_torch_file(str(file))
        return {name: exact_half(tensor) for name, tensor in tensors.items()} if half else tensors
    return read_file(file, names, half, dtype)


def load_component(
    checkpoint: Checkpoint,
    weight_dtype: torch.dtype | None,
    compute_dtype: torch.dtype | None,
    operations: type,
    resolution: int | None = None,
    form: str = OFF,
) -> torch.nn.Module:
    """Return the module of `checkpoint`, with layers of `operations`, which ComfyUI casts when they run.

    Linear, Conv2d and Embedding have weights of `weight_dtype` (None: bf16 if it represents the file's weights exactly,
    else the file's dtype). Everything else has `compute_dtype` (None: the same). The blocks of a transformer are
    quantised to `form`, one of quantise.FORMATS.
    """
    with Polled(comfy.model_management.throw_exception_if_processing_interrupted):
        layers = quantised_layers(checkpoint)
        module = build_module(checkpoint, resolution)
        tensors = component_tensors(checkpoint, read if weight_dtype else partial(read, half=True))
        tensors.pop(FP8_FILE, None)
        stored = {name for name, child in module.named_modules() if is_stored(child)}
        check_names(checkpoint.name, "unexpected", layers.keys() - stored)
        for name, stated in layers.items():
            fill_layer(module, tensors, name, stated, operations)
        wide = compute_dtype or weight_dtype
        fill_module(
            module, tensors, checkpoint.name, lambda key: weight_dtype if key.rpartition(".")[0] in stored else wide
        )
        if form != OFF:
            quantise(module, form, operations, comfy.model_management.get_torch_device())
        adopt(module, operations, wide)
        comfy.model_management.archive_model_dtypes(module)
    return module


def fill_layer(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor], name: str, form: Json, operations: type
) -> None:
    """Put a quantised layer of `operations` into `module`, or its dequantised weight into `tensors`.

    ComfyUI computes in its formats with products of matrices alone, and has one scale for all rows in fp8.
    """
    plain, parts, bias = module.get_submodule(name), layer_tensors(tensors, name), f"{name}.bias"
    is_fp8, algorithm = form["format"].startswith("float8"), comfy.quant_ops.QUANT_ALGOS.get(form["format"])
    scales_rows = is_fp8 and parts["weight_scale"].numel() > 1
    scales_inputs = "pre_quant_scale" in parts and (
        algorithm is None or "pre_quant_scale" not in algorithm["parameters"]
    )
    has_bias = plain._parameters.get("bias") is not None
    is_ready = is_mixed(operations) and is_product(plain) and (bias in tensors or not has_bias)
    if algorithm is None or scales_rows or scales_inputs or not is_ready:
        tensors[f"{name}.weight"] = dequantised(form, parts, plain.weight.shape)
        return
    if is_fp8:
        parts["weight_scale"] = parts["weight_scale"].float().reshape(())
    if "input_scale" not in algorithm["parameters"]:
        parts.pop("input_scale", None)
    if has_bias:
        parts["bias"] = tensors.pop(bias)
    parts["comfy_quant"] = torch.tensor(list(json.dumps(form).encode()), dtype=torch.uint8)
    module.set_submodule(name, fill_quantised(linear_like(plain, operations), parts))


def config_tensor(kind: str, config: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the configuration of a component as a tensor in its state dict. `kind` is a key of CHECKPOINT_KINDS.

    ComfyUI's nodes for saving write tensors, but no metadata of a pack. So the configuration becomes a tensor of
    bytes, like the tokenizers of ComfyUI's own text encoders.
    """
    fields = {key: value for key, value in config.items() if key != "_name_or_path"}
    class_name = CHECKPOINT_KINDS[kind].classes[0]
    named = {"architectures": [class_name]} if kind == "text_encoder" else {"_class_name": class_name}
    content = json.dumps({**fields, **named}).encode()
    return {SAVED_CONFIG: torch.frombuffer(bytearray(content), dtype=torch.uint8)}


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 if `device` has it, else fp32. Gemma 2 and DC-AE overflow in fp16."""
    return torch.bfloat16 if comfy.model_management.should_use_bf16(device) else torch.float32
