"""ComfyUI with pretended GPUs: released models without values, on fake cuda devices.

torch's FakeTensorMode carries shapes, dtypes and devices and raises where devices mix. ComfyUI's load, unload and cast
run as on a GPU. This module replaces ComfyUI's calls of torch.cuda and comfy_aimdo.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from fake_accelerator import FAKE
from loaded_models import empty_model_list
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CARD = torch.device("cuda", 0)
GB = 10**9
# `int(...)` of a tensor without values gives this: the tokens of the longest prompt.
TOKENS = 300


class Numbers(TorchDispatchMode):
    """Gives values to reads of tensors without values: prompts of 300 tokens, some of them padding."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return {torch.bool: False}.get(args[0].dtype, TOKENS)
        return func(*args, **(kwargs or {}))


class PagedMemory:
    """What comfy_aimdo's ModelVBAR does: addresses for weights, and pages behind as many as `room` bytes hold."""

    room = 10**12

    def __init__(self, size, device):
        self.device, self.offset, self.faulted, self.copied = torch.device("cuda", device), 0, {}, 0

    def alloc(self, size):
        self.offset += size
        return (self, self.offset - size, size)

    def fault(self, address, size):
        if address not in self.faulted and self.loaded_size() + size > self.room:
            return None
        self.faulted[address] = size
        return address

    def loaded_size(self):
        return sum(self.faulted.values())

    def free_memory(self, size):
        freed = 0
        while self.faulted and freed < size:
            freed += self.faulted.popitem()[1]
        return freed

    def prioritize(self):
        pass


class HostBuffer:
    """What comfy_aimdo's HostBuffer is while no memory is pinned."""

    def __init__(self, *sizes):
        self.size = 0


def pack(name):
    """The pack's module of that name; ComfyUI imports the pack under a name of its own."""
    root = next(key for key in sys.modules if key.endswith("nodes-1"))
    return importlib.import_module(f"{root}.{name}")


@contextmanager
def fake_card(monkeypatch, free=80 * GB, total=None, state="NORMAL_VRAM", dynamic=False, major=8, evictable=0):
    """ComfyUI on one GPU of compute capability `major` with `free` bytes. Loaded models reduce the free bytes."""
    import comfy.cli_args
    import comfy.memory_management
    import comfy.model_management as management
    import comfy.model_patcher
    import comfy_aimdo.host_buffer
    import comfy_aimdo.model_vbar
    import comfy_aimdo.torch

    def free_memory(device=None, torch_free_too=False):
        held = sum(model.loaded_size() for model in management.loaded_models() if model.load_device.type == "cuda")
        remaining = max(0, free - held) if (device or CARD).type == "cuda" else 10**12
        return (remaining, 0) if torch_free_too else remaining

    card = SimpleNamespace(major=major, minor=0, name="fake", total_memory=total or free)
    with empty_model_list(), monkeypatch.context() as patch:
        patch.setattr(management, "cpu_state", management.CPUState.GPU)
        patch.setattr(management, "vram_state", management.VRAMState[state])
        patch.setattr(management, "lowvram_available", True)
        patch.setattr(management, "get_free_memory", free_memory)
        patch.setattr(management, "get_total_memory", lambda device=None, torch_total_too=False: total or free)
        patch.setattr(management, "LORA_COMPUTE_DTYPES", {})
        patch.setattr(torch.cuda, "current_device", lambda: CARD.index)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: card)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: major >= 8)
        for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated"):
            patch.setattr(torch.cuda, name, lambda device=None: 0)
        if dynamic:
            patch.setattr(comfy.memory_management, "aimdo_enabled", True)
            patch.setattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcherDynamic)
            patch.setattr(comfy.cli_args.args, "disable_pinned_memory", True)
            patch.setattr(comfy_aimdo.host_buffer, "HostBuffer", HostBuffer)
            patch.setattr(comfy_aimdo.model_vbar, "ModelVBAR", PagedMemory)
            patch.setattr(comfy_aimdo.model_vbar, "vbar_fault", lambda address: address[0].fault(*address[1:]))
            patch.setattr(comfy_aimdo.model_vbar, "vbar_unpin", lambda address: None)
            patch.setattr(
                comfy_aimdo.model_vbar, "vbar_signature_compare", lambda one, other: one is not None and one == other
            )
            patch.setattr(comfy_aimdo.model_vbar, "vbars_analyze", lambda device=None: evictable)
            patch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", page)
        yield patch


class Streams:
    """Two streams for copies, as ComfyUI has on NVIDIA's GPUs. Counts waits and copies of weights.

    `waits`: {"compute": waits of the computing stream for a copy, "copy": the other direction}. `copies` are calls, and
    `moved` their bytes. Copy number `fail_at` fails.
    """

    def __init__(self, patch):
        import comfy.model_management as management

        self.reset()
        compute, gather = self.stream("compute"), management.cast_to_gathered

        def cast_to_gathered(tensors, out, **options):
            self.copies += 1
            if self.copies == self.fail_at:
                raise torch.OutOfMemoryError
            self.moved += (options["r2"] if out is None else out).nbytes
            return gather(tensors, out, **options | {"stream": None})

        patch.setattr(management, "NUM_STREAMS", 2)
        patch.setattr(management, "STREAMS", {})
        patch.setattr(management, "stream_counters", {})
        patch.setattr(management, "get_aimdo_cast_buffer", lambda stream, device: CastBuffer())
        patch.setattr(management, "cast_to_gathered", cast_to_gathered)
        patch.setattr(torch.cuda, "Stream", lambda **options: self.stream("copy"))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: compute)

    def reset(self):
        self.waits, self.copies, self.moved, self.fail_at = Counter(), 0, 0, 0

    def stream(self, name):
        return SimpleNamespace(wait_stream=lambda other: self.waits.update([name]))


class CastBuffer:
    """What comfy_aimdo's VRAMBuffer is: memory for weights that have no pages."""

    def size(self):
        return 0

    def get(self, size, offset=0):
        return (self, offset, size)


def page(address, device):
    """The bytes at an address of comfy_aimdo."""
    return torch.empty(address[2], dtype=torch.uint8, device=device)


@contextmanager
def no_numbers(patch):
    """Tensors with shape, dtype and device only, in modules too."""
    patch.setattr(torch.nn.Module, "_apply", apply_to_weights)
    patch.setattr(FakeTensor, "data", property(torch.Tensor.data.__get__, set_data), raising=False)
    with FAKE, Numbers(), torch.no_grad():
        yield


def apply_to_weights(module, function, recurse=True):
    """Module._apply, which cannot exchange the memory of tensors that have none."""
    for child in module.modules() if recurse else [module]:
        for name, weight in child.named_parameters(recurse=False):
            child.register_parameter(name, torch.nn.Parameter(function(weight), requires_grad=False))
        for name, buffer in child.named_buffers(recurse=False):
            setattr(child, name, function(buffer))
    return module


def set_data(tensor, value):
    """`tensor.data = value`, which torch takes for tensors on one device, as all are that have no memory."""
    torch.Tensor.data.__set__(tensor, value)
    tensor.fake_device = value.fake_device


def read_shapes(file, names=None, dtype=None):
    """The tensors of a file, of which only the header is read, in the dtype of the file."""
    headers = pack("sana_core.checkpoints.headers").read_header(file).headers
    return {
        name: torch.empty(headers[name].shape, dtype=headers[name].dtype, device="meta") for name in names or headers
    }


def read_numbers(file, names=None, dtype=None):
    """The tensors of a file, for what cannot be loaded without: what quantises looks at them."""
    return {name: tensor for name, tensor in load_file(file).items() if names is None or name in names}


def load(patch, loader, path, read=read_shapes, **options):
    """What `loader`, of nodes/host, makes of a file; its weights are on the CPU and have no numbers."""
    # both before either is changed: one takes the function from the other
    for module in [pack(f"nodes.host.loading.{name}") for name in ("weights", "vae")]:
        patch.setattr(module, "read", read)
    weights = pack("nodes.host.loading.weights")
    quantise = weights.quantise
    patch.setattr(weights, "quantise", lambda *arguments: quantise(*arguments[:-1], torch.device("cpu")))
    for name in ("checkpoints.load", "decode.run", "decode.encode"):
        patch.setattr(pack(f"sana_core.{name}"), "check_finite", lambda *arguments: None)
    # the loaders tell weights that they have still to fill by the meta device
    with _disable_current_modes():
        loaded = loader(path, **options)
    model = getattr(loaded, "patcher", loaded).model
    apply_to_weights(model, without_numbers)
    return loaded


def without_numbers(tensor):
    """A tensor on the CPU of that shape and dtype, quantised as that one is."""
    from comfy.quant_ops import QuantizedTensor

    if not isinstance(tensor, QuantizedTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    of_params = {field.name: getattr(tensor._params, field.name) for field in dataclasses.fields(tensor._params)}
    scales = {name: without_numbers(value) for name, value in of_params.items() if isinstance(value, torch.Tensor)}
    params = dataclasses.replace(tensor._params, **scales)
    return QuantizedTensor(without_numbers(tensor._qdata), tensor._layout_cls, params)
