"""Builds a recognised component with layers that ComfyUI casts, patches and offloads, and fills it from its file.

With the layers of diffusers and transformers, ComfyUI would leave a layer on the CPU if only a part of the model fits
on the GPU. With dynamic VRAM it would ignore the patches of the layer without a message.

Also the configuration that is saved with a component, and the dtype of components that overflow in fp16.
"""

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
from comfy.patcher_extension import CallbacksMP

from ....sana_core.checkpoints.checkpoint import CHECKPOINT_KINDS, FP8_FILE, Checkpoint
from ....sana_core.checkpoints.detect import SAVED_CONFIG
from ....sana_core.checkpoints.headers import SAFETENSORS, exact_half, read_file
from ....sana_core.checkpoints.load import build_module, check_names, component_tensors, fill_module
from ....sana_core.checkpoints.quantised import dequantised, layer_tensors, quantised_layers
from ....sana_core.runtime.cancellation import Polled
from ....sana_core.runtime.text import Json
from ..compat import KEEP
from .quantise import OFF, fill_quantised, is_product, linear_like, quantise

if TYPE_CHECKING:
    from ....sana_core.model.layers import WeightsUse

# The rows of an embedding that the product for logits casts at once.
PART = 2**15
# The most rows that a prompt with its instruction looks up.
LOOKUPS = 1024


class LendingLayer:
    """A layer of ComfyUI that lends its cast and patched weights to a kernel. See sana_core/model/layers.py."""

    def with_weights(self, like: torch.Tensor, use: WeightsUse) -> torch.Tensor:
        """Return `use(weight, bias)` for the weights that ComfyUI casts, streams and patches for the input `like`."""
        comfy.ops.run_every_op()
        # ComfyUI's forward of the layer has the same condition.
        if not (self.comfy_cast_weights or self.weight_function or self.bias_function):
            return use(self.weight, self.bias)
        weight, bias, stream = comfy.ops.cast_bias_weight(self, like, offloadable=True)
        out = use(weight, bias)
        comfy.ops.uncast_bias_weight(self, weight, bias, stream)
        return out


class Fp8Layer(comfy.ops.fp8_ops.Linear):
    """ComfyUI's Linear with fp8 products clamps its input in place to 448. This one leaves the input unchanged."""

    def forward_comfy_cast_weights(self, x: torch.Tensor) -> torch.Tensor:
        # ComfyUI multiplies other weights and inputs of more dimensions in the dtype of the input.
        multiplies_fp8 = self.weight.dtype == torch.float8_e4m3fn and x.ndim < 4
        return super().forward_comfy_cast_weights(x.clone() if multiplies_fp8 else x)


class CastLayer(comfy.ops.CastWeightBiasOp):
    """A layer of a library with a `weight`, and perhaps a `bias`, that computes in the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_ready(x):
            return super().forward(x)
        return self.with_weights(x, lambda weight, bias: self.run_with(weight, bias, x))

    def with_weights(self, like: torch.Tensor, use: WeightsUse) -> torch.Tensor:
        if self.is_ready(like):
            return use(self.weight, self.bias)
        weight, bias, stream = comfy.ops.cast_bias_weight(self, like, self.dtype_for(like), offloadable=True)
        out = use(weight, bias)
        comfy.ops.uncast_bias_weight(self, weight, bias, stream)
        return out

    def dtype_for(self, like: torch.Tensor) -> torch.dtype:
        return like.dtype

    def is_ready(self, like: torch.Tensor) -> bool:
        """Whether the weights need no cast, no patch and no move for the input `like`."""
        is_cast = self.weight.dtype == self.dtype_for(like) and self.weight.device == like.device
        return is_cast and not self.weight_function and not self.bias_function

    def run_with(self, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """Run the library's forward with these weights in place of the parameters."""
        parameters = self._parameters
        self._parameters = {"weight": weight, "bias": bias}
        try:
            return super().forward(x)
        finally:
            self._parameters = parameters


class LookupLayer(CastLayer):
    """An embedding that moves only the requested rows to the GPU. Gemma 2's embedding has 1.2 GB in bf16.

    Its output has `compute_dtype`.
    """

    compute_dtype: torch.dtype

    def dtype_for(self, like: torch.Tensor) -> torch.dtype:
        return self.compute_dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        patched = self.weight_function or getattr(self, "weight_lowvram_function", None)
        if self.is_ready(ids) or patched:
            return super().forward(ids)
        rows = torch.nn.functional.embedding(ids.flatten().to(self.weight.device), self.weight)
        places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        return self.run_with(rows.to(device=ids.device, dtype=self.compute_dtype), None, places)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] of `states` [..., C]. The output head shares this weight [V, C]."""
        weight, stream = self.weight, None
        # With dynamic VRAM, the weight stays on the GPU between tokens.
        if hasattr(self, "_v") or self.weight_function:
            weight, _, stream = comfy.ops.cast_bias_weight(self, states, weight.dtype, offloadable=True)
        # Otherwise, one part after another is moved to the GPU.
        out = [torch.nn.functional.linear(states, part.to(states)) for part in weight.split(PART)]
        comfy.ops.uncast_bias_weight(self, weight, None, stream)
        return torch.cat(out, dim=-1)


class LookupPatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher whose estimates count only the rows that a LookupLayer reads while its weight is on the CPU.

    ComfyUI first loads the modules that would need the most memory to run from the CPU, and reserves that memory. For
    Gemma 2's embedding it would reserve the whole weight and a copy in fp32, 3.5 GB.
    """

    def _load_list(self, *args, **options):
        """Return ComfyUI's rows (bytes to run the module from the CPU, ..., name, module, parameters)."""
        rows = []
        for offload_bytes, *row in super()._load_list(*args, **options):
            name, module = row[-3], row[-2]
            # With patches, the whole weight is cast. A head that shares the weight casts PART rows of it, which fit in
            # the memory that ComfyUI always leaves for activations.
            if isinstance(module, LookupLayer) and f"{name}.weight" not in self.patches:
                width = module.weight.shape[1]
                rows_bytes = LOOKUPS * width * (module.weight.dtype.itemsize + module.compute_dtype.itemsize)
                offload_bytes = min(offload_bytes, rows_bytes)
            rows.append((offload_bytes, *row))
        return rows


def is_stored(layer: torch.nn.Module) -> bool:
    """Whether `layer` is of a kind that has nearly all weights of a model. Such layers keep the dtype for storage."""
    return type(layer) in (torch.nn.Linear, torch.nn.Conv2d) or isinstance(layer, torch.nn.Embedding)


def adopt(module: torch.nn.Module, operations: type, compute_dtype: torch.dtype) -> None:
    """Replace the class of every layer below `module` that has weights. `operations` is a namespace of comfy.ops.

    Linear and Conv2d get the classes of `operations`, and Conv2d also lends its weights. All other layers become a
    CastLayer, which computes as the library does. Parameters outside of such layers do not change. See
    `keep_on_device`.
    """
    # ComfyUI tests the kind of a layer by its class and by the name of the class.
    kinds: dict[type, type] = {torch.nn.Conv2d: type("Conv2d", (LendingLayer, operations.Conv2d), {})}
    linear = comfy.ops.manual_cast.Linear if is_mixed(operations) else operations.Linear
    linear = Fp8Layer if linear is comfy.ops.fp8_ops.Linear else linear
    for child in module.modules():
        kind = type(child)
        if kind is torch.nn.Linear:
            child.__class__ = linear
        elif kind is torch.nn.Conv2d:
            child.__class__ = kinds[kind]
        elif child._parameters.get("weight") is not None and not hasattr(child, "comfy_cast_weights"):
            base = LookupLayer if isinstance(child, torch.nn.Embedding) else CastLayer
            if base is LookupLayer:
                # padding_idx matters only for gradients, and is no valid index of a table of the requested rows.
                child.padding_idx = None
                child.compute_dtype = compute_dtype
            child.__class__ = kinds.setdefault(kind, type(f"Cast{kind.__name__}", (base, kind), {}))
            if not hasattr(child, "bias"):
                child.bias = None


def is_mixed(operations: type) -> bool:
    """Whether `operations` are for quantised files. Their Linear is not a torch.nn.Linear."""
    return not issubclass(operations.Linear, torch.nn.Linear)


def keep_on_device(patcher: comfy.model_patcher.ModelPatcher) -> None:
    """Make `patcher` and its clones load all weights that ComfyUI cannot cast, even if little of the model fits."""
    patcher.add_callback_with_key(CallbacksMP.ON_LOAD, KEEP, load_rest)


def load_rest(
    patcher: comfy.model_patcher.ModelPatcher,
    device: torch.device,
    memory: float,
    force_patch_weights: bool,
    full_load: bool,
) -> None:
    """Move parameters and buffers of all modules that are not ComfyUI's layers to `device`. ComfyUI calls this.

    With dynamic VRAM, or if the whole model fits, ComfyUI does this itself.
    """
    if full_load or patcher.is_dynamic():
        return
    for module in patcher.model.modules():
        if not hasattr(module, "comfy_cast_weights") and not getattr(module, "comfy_patched_weights", False):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
                patcher.model.model_loaded_weight_memory += tensor.nbytes


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
    module: torch.nn.Module, tensors: dict[str, torch.Tensor], name: str, stated: Json, operations: type
) -> None:
    """Put a quantised layer of `operations` into `module`, or its dequantised weight into `tensors`.

    ComfyUI computes in its formats with products of matrices alone, and has one scale for all rows in fp8.
    """
    plain, parts, bias = module.get_submodule(name), layer_tensors(tensors, name), f"{name}.bias"
    is_fp8, algorithm = stated["format"].startswith("float8"), comfy.quant_ops.QUANT_ALGOS.get(stated["format"])
    scales_rows = is_fp8 and parts["weight_scale"].numel() > 1
    scales_inputs = "pre_quant_scale" in parts and (
        algorithm is None or "pre_quant_scale" not in algorithm["parameters"]
    )
    has_bias = plain._parameters.get("bias") is not None
    is_ready = is_mixed(operations) and is_product(plain) and (bias in tensors or not has_bias)
    if algorithm is None or scales_rows or scales_inputs or not is_ready:
        tensors[f"{name}.weight"] = dequantised(stated, parts, plain.weight.shape)
        return
    if is_fp8:
        parts["weight_scale"] = parts["weight_scale"].float().reshape(())
    if "input_scale" not in algorithm["parameters"]:
        parts.pop("input_scale", None)
    if has_bias:
        parts["bias"] = tensors.pop(bias)
    parts["comfy_quant"] = torch.tensor(list(json.dumps(stated).encode()), dtype=torch.uint8)
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
