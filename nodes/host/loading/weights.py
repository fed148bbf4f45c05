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
import comfy.utils
import torch

from ....sana_core.checkpoints.detect import SAVED_CONFIG
from ....sana_core.checkpoints.files import parse_json
from ....sana_core.checkpoints.headers import SAFETENSORS, exact_half, read_file
from ....sana_core.checkpoints.kinds import CHECKPOINT_KINDS
from ....sana_core.checkpoints.load import build_module, component_tensors, fill_module
from ....sana_core.errors import CheckpointError
from ....sana_core.runtime.cancellation import Polled
from ....sana_core.runtime.text import brief
from .layers import adopt, is_mixed, is_stored
from .quantise import OFF, fill_quantised, is_product, linear_like, quantise

if TYPE_CHECKING:
    from ....sana_core.checkpoints import Checkpoint

# ComfyUI's key in the metadata of quantised files.
QUANTISATION = "_quantization_metadata"


def read(file: Path, names: Collection[str] | None = None, half: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of `file` as `read_file` does.

    With dynamic VRAM, ComfyUI maps .safetensors files and streams weights from the mapped file to the GPU. The result
    then has all tensors of the file, even if `names` are fewer.
    """
    is_dynamic = comfy.model_patcher.CoreModelPatcher is not comfy.model_patcher.ModelPatcher
    if is_dynamic and file.suffix.lower() in SAFETENSORS:
        tensors = comfy.utils.load_torch_file(str(file))
        return {name: exact_half(tensor) for name, tensor in tensors.items()} if half else tensors
    return read_file(file, names, half)


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
    if checkpoint.quantised and (checkpoint.layout == "original" or not is_mixed(operations)):
        raise CheckpointError(
            f"{checkpoint.name}: got quantised weights, which are read of transformers and text encoders with "
            "diffusers' names; use the plain file"
        )
    with Polled(comfy.model_management.throw_exception_if_processing_interrupted):
        module = build_module(checkpoint, resolution)
        tensors = component_tensors(checkpoint, read if weight_dtype else partial(read, half=True))
        stored = {name for name, child in module.named_modules() if is_stored(child)}
        if checkpoint.quantised:
            tensors = load_quantised(module, tensors, checkpoint, operations)
        wide = compute_dtype or weight_dtype
        fill_module(
            module, tensors, checkpoint.name, lambda key: weight_dtype if key.rpartition(".")[0] in stored else wide
        )
        if form != OFF:
            quantise(module, form, operations, comfy.model_management.get_torch_device())
        adopt(module, operations, wide)
        comfy.model_management.archive_model_dtypes(module)
    return module


def load_quantised(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor], checkpoint: Checkpoint, operations: type
) -> dict[str, torch.Tensor]:
    """Put quantised layers of `operations` into `module` and return the other tensors.

    An embedding is dequantised, because ComfyUI computes with products of matrices alone in quantised formats.
    """
    tensors, _ = comfy.utils.convert_old_quants(dict(tensors), "", metadata=renamed_layers(checkpoint))
    for name in {key.removesuffix(".comfy_quant") for key in tensors if key.endswith(".comfy_quant")}:
        layer_tensors = {key: tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}.")}
        try:
            plain = module.get_submodule(name)
            layer_tensors = {key.removeprefix(f"{name}."): value for key, value in layer_tensors.items()}
            if isinstance(plain, torch.nn.Embedding):
                table = operations.Linear(plain.embedding_dim, plain.num_embeddings, bias=False, device="cpu")
                # Formats with blocks of scales pad the rows and the columns.
                weight = fill_quantised(table, layer_tensors).weight.dequantize()
                tensors[f"{name}.weight"] = weight[: plain.num_embeddings, : plain.embedding_dim]
                continue
            if not is_product(plain):
                raise ValueError(f"a {type(plain).__name__}")
            layer = fill_quantised(linear_like(plain, operations), layer_tensors)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{checkpoint.name}: ComfyUI cannot read the quantised layer {brief(name)} ({brief(error)}); "
                "use the plain file"
            ) from None
        module.set_submodule(name, layer)
    return tensors


def renamed_layers(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the file's metadata, with the module's names for the layers in its table of formats."""
    metadata = dict(checkpoint.weights.metadata)
    if QUANTISATION in metadata:
        names = {origin.name: target for target, origin in checkpoint.origins.items()}
        table = parse_json(metadata[QUANTISATION], f"{checkpoint.name}: {QUANTISATION}")
        if not isinstance(table.get("layers"), dict):
            raise CheckpointError(f"{checkpoint.name}: {QUANTISATION} has no table of layers; use the plain file")
        layers = {
            names[f"{layer}.weight"].removesuffix(".weight"): form
            for layer, form in table["layers"].items()
            if f"{layer}.weight" in names
        }
        metadata[QUANTISATION] = json.dumps({**table, "layers": layers})
    return metadata


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
