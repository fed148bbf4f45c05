"""The libraries' layers as layers of ComfyUI, which casts, patches and offloads their weights as they run.

Without that, ComfyUI leaves a layer on the CPU when only a part of the model fits on the GPU, and under dynamic VRAM
ignores its patches without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import comfy.model_patcher
import comfy.ops
import torch
from comfy.patcher_extension import CallbacksMP

from ..compat.patches import KEEP

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from ....sana_core.model.layers import WeightsUse

# The rows of an embedding that the product for logits casts at once.
PART = 2**15
# The most rows that a prompt with its instruction looks up.
LOOKUPS = 1024


class LendingLayer:
    """A layer of ComfyUI that lends its weights to a kernel as it would use them itself (sana_core/model/layers.py)."""

    def with_weights(self, like: torch.Tensor, use: WeightsUse) -> torch.Tensor:
        """Return `use(weight, bias)` of the weights as ComfyUI casts, streams and patches them for the input `like`."""
        comfy.ops.run_every_op()
        # as the layer's own forward asks
        if not (self.comfy_cast_weights or self.weight_function or self.bias_function):
            return use(self.weight, self.bias)
        weight, bias, stream = comfy.ops.cast_bias_weight(self, like, offloadable=True)
        out = use(weight, bias)
        comfy.ops.uncast_bias_weight(self, weight, bias, stream)
        return out


class CastLayer(comfy.ops.CastWeightBiasOp):
    """A layer of a library that takes `weight` and perhaps `bias`, and computes in the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_ready(x):
            return super().forward(x)
        return self.with_weights(x, lambda weight, bias: self.run_with(weight, bias, x))

    def with_weights(self, like: torch.Tensor, use: WeightsUse) -> torch.Tensor:
        """Return `use(weight, bias)` of the weights as the input `like` needs them, cast and patched."""
        if self.is_ready(like):
            return use(self.weight, self.bias)
        weight, bias, stream = comfy.ops.cast_bias_weight(self, like, self.dtype_for(like), offloadable=True)
        out = use(weight, bias)
        comfy.ops.uncast_bias_weight(self, weight, bias, stream)
        return out

    def dtype_for(self, like: torch.Tensor) -> torch.dtype:
        return like.dtype

    def is_ready(self, like: torch.Tensor) -> bool:
        """Whether the weights are where `like` is, as the layer computes with them."""
        is_cast = self.weight.dtype == self.dtype_for(like) and self.weight.device == like.device
        return is_cast and not self.weight_function and not self.bias_function

    def run_with(self, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """Return what the library's layer makes of `x` with other weights than its own."""
        own = self._parameters
        self._parameters = {"weight": weight, "bias": bias}
        try:
            return super().forward(x)
        finally:
            self._parameters = own


class LookupLayer(CastLayer):
    """An embedding that brings over the rows it looks up, instead of all: Gemma 2's has 1.2 GB in bf16.

    It gives them in `compute_dtype`.
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
        """Return the product of `states` [..., C] and the rows [V, C], as a head that shares the weight makes it."""
        weight, stream = self.weight, None
        # dynamic VRAM keeps it on the GPU from one token to the next
        if hasattr(self, "_v") or self.weight_function:
            weight, _, stream = comfy.ops.cast_bias_weight(self, states, weight.dtype, offloadable=True)
        # otherwise a part at a time comes over
        out = [torch.nn.functional.linear(states, part.to(states)) for part in weight.split(PART)]
        comfy.ops.uncast_bias_weight(self, weight, None, stream)
        return torch.cat(out, dim=-1)


class LookupPatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher whose estimates count only the rows that a LookupLayer reads while its weight is on the CPU.

    ComfyUI loads first what needs most memory to run from the CPU, and reserves that memory. For Gemma 2's embedding it
    would reserve the whole weight and a copy in fp32, 3.5 GB.
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
    """Whether the weights of `layer` are nearly all of a model's, and so have the dtype that it is stored in."""
    return type(layer) in (torch.nn.Linear, torch.nn.Conv2d) or isinstance(layer, torch.nn.Embedding)


def adopt(module: torch.nn.Module, operations: type, compute_dtype: torch.dtype) -> None:
    """Turn every layer below `module` that has weights into one of `operations`, a namespace of comfy.ops.

    Linear and Conv2d become its own, and Conv2d lends its weights; any other becomes a CastLayer, whose arithmetic is
    the library's. Parameters of modules that hold other modules stay as they are: see `keep_on_device`.
    """
    # core's tests of a layer's kind are by class and by name
    kinds: dict[type, type] = {torch.nn.Conv2d: type("Conv2d", (LendingLayer, operations.Conv2d), {})}
    for child in module.modules():
        kind = type(child)
        if kind is torch.nn.Linear:
            child.__class__ = comfy.ops.manual_cast.Linear if is_mixed(operations) else operations.Linear
        elif kind is torch.nn.Conv2d:
            child.__class__ = kinds[kind]
        elif child._parameters.get("weight") is not None and not hasattr(child, "comfy_cast_weights"):
            base = LookupLayer if isinstance(child, torch.nn.Embedding) else CastLayer
            if base is LookupLayer:
                # it is for gradients alone, and no row of a table that is looked up already
                child.padding_idx = None
                child.compute_dtype = compute_dtype
            child.__class__ = kinds.setdefault(kind, type(f"Cast{kind.__name__}", (base, kind), {}))
            if not hasattr(child, "bias"):
                child.bias = None


def is_mixed(operations: type) -> bool:
    """Whether `operations` are those for quantised files, whose Linear is no torch.nn.Linear."""
    return not issubclass(operations.Linear, torch.nn.Linear)


def keep_on_device(patcher: ModelPatcher) -> None:
    """Make `patcher` and its clones load what ComfyUI cannot cast, however little of the model fits."""
    patcher.add_callback_with_key(CallbacksMP.ON_LOAD, KEEP, load_rest)


def load_rest(
    patcher: ModelPatcher, device: torch.device, memory: float, force_patch_weights: bool, full_load: bool
) -> None:
    """Move parameters and buffers of all modules that are no layers of ComfyUI to `device`; ComfyUI calls this.

    It does so itself under dynamic VRAM and where all of the model fits.
    """
    if full_load or patcher.is_dynamic():
        return
    for module in patcher.model.modules():
        if not hasattr(module, "comfy_cast_weights") and not getattr(module, "comfy_patched_weights", False):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
                patcher.model.model_loaded_weight_memory += tensor.nbytes
