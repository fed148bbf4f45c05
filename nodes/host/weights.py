"""A recognised component as a module in ComfyUI's operations, filled from its file."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.utils
import torch

from ...sana_core.checkpoints.files import brief, parse_json
from ...sana_core.checkpoints.headers import SAFETENSORS, read_file
from ...sana_core.checkpoints.load import build_module, component_tensors, fill
from ...sana_core.errors import CheckpointError

if TYPE_CHECKING:
    from ...sana_core.checkpoints import CheckpointInfo

QUANTISATION = "_quantization_metadata"  # ComfyUI's key
ADOPTED = (torch.nn.Linear, torch.nn.Conv2d)


def read(file: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return tensors of `file`: those of `names` in memory of their own, or all as ComfyUI reads them.

    With dynamic VRAM it streams the weights of .safetensors files to the card, out of the mapped file.
    """
    is_dynamic = comfy.model_patcher.CoreModelPatcher is not comfy.model_patcher.ModelPatcher
    if is_dynamic and file.suffix.lower() in SAFETENSORS:
        return comfy.utils.load_torch_file(str(file))
    return read_file(file, names)


def load_component(
    info: CheckpointInfo,
    weight_dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
    operations: type,
    resolution: int | None = None,
) -> torch.nn.Module:
    """Return the module of `info`: its Linear and Conv2d layers those of `operations`, with weights of `weight_dtype`.

    ComfyUI casts those layers as it runs them; all other parameters get `compute_dtype` (None: the same). Raises
    CheckpointError for quantised weights in the original layout, whose fused weights cannot be parted under their
    scales, or of a component that runs in other operations; and as sana_core's loaders do.
    """
    if info.quantised and (info.layout == "original" or not is_mixed(operations)):
        raise CheckpointError(
            f"{info.name}: got quantised weights, which are read of transformers and text encoders with "
            "diffusers' names; use the plain file"
        )
    module = build_module(info, resolution)
    tensors = component_tensors(info, read)
    adopted = {name for name, child in module.named_modules() if type(child) in ADOPTED}
    if info.quantised:
        tensors = load_quantised(module, tensors, info, operations)
    wide = compute_dtype or weight_dtype
    fill(module, tensors, info.name, lambda key: weight_dtype if key.rpartition(".")[0] in adopted else wide)
    adopt(module, operations)
    comfy.model_management.archive_model_dtypes(module)
    return module


def load_quantised(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor], info: CheckpointInfo, operations: type
) -> dict[str, torch.Tensor]:
    """Put quantised layers of `operations` into `module` and return the tensors that are left.

    Raises CheckpointError for a format that ComfyUI does not know.
    """
    tensors, _ = comfy.utils.convert_old_quants(dict(tensors), "", metadata=renamed_layers(info))
    for name in {key.removesuffix(".comfy_quant") for key in tensors if key.endswith(".comfy_quant")}:
        own = {key: tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}.")}
        try:
            plain = module.get_submodule(name)
            if not isinstance(plain, torch.nn.Linear):
                raise ValueError(f"a {type(plain).__name__}")
            layer = operations.Linear(plain.in_features, plain.out_features, plain.bias is not None, device="cpu")
            layer.load_state_dict({key.removeprefix(f"{name}."): value for key, value in own.items()}, assign=True)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{info.name}: ComfyUI cannot read the quantised layer {brief(name)} ({brief(error)}); "
                "use the plain file"
            ) from None
        module.set_submodule(name, layer.requires_grad_(False))
    return tensors


def renamed_layers(info: CheckpointInfo) -> dict[str, str]:
    """Return the file's metadata, the layers in its table of formats under the names that the module has.

    Raises CheckpointError for a table that is none.
    """
    metadata = dict(info.weights.metadata)
    if QUANTISATION in metadata:
        names = {origin.name: target for target, origin in info.origins.items()}
        table = parse_json(metadata[QUANTISATION], f"{info.name}: {QUANTISATION}")
        if not isinstance(table.get("layers"), dict):
            raise CheckpointError(f"{info.name}: {QUANTISATION} has no table of layers; use the plain file")
        layers = {
            names[f"{layer}.weight"].removesuffix(".weight"): form
            for layer, form in table["layers"].items()
            if f"{layer}.weight" in names
        }
        metadata[QUANTISATION] = json.dumps({**table, "layers": layers})
    return metadata


def adopt(module: torch.nn.Module, operations: type) -> None:
    """Turn every exact Linear and Conv2d below `module` into that of `operations`, a namespace of comfy.ops.

    Casting, offloading and LoRA patches reach only those. Under dynamic VRAM, ComfyUI ignores patches on plain torch
    layers without a word.
    """
    for child in module.modules():
        if type(child) is torch.nn.Linear:
            child.__class__ = comfy.ops.manual_cast.Linear if is_mixed(operations) else operations.Linear
        elif type(child) is torch.nn.Conv2d:
            child.__class__ = operations.Conv2d


def is_mixed(operations: type) -> bool:
    """Whether `operations` are those for quantised files, whose Linear is no torch.nn.Linear."""
    return not issubclass(operations.Linear, torch.nn.Linear)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 where `device` has it, else fp32: Gemma 2 and DC-AE overflow in fp16."""
    return torch.bfloat16 if comfy.model_management.should_use_bf16(device) else torch.float32
