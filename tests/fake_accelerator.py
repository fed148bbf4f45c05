"""Pretended accelerators: tensors with a device and a shape but without values, and a counter of operations on them.

torch's FakeTensorMode carries tensors on cuda:0 and cuda:1 and raises where devices mix. `Counter` sees every operation
below torch's compositions and counts:

- launches: one for each operation that computes or copies. Views, empty tensors and queries of a tensor count none. A
  convolution with a bias counts two, because torch adds the bias of cuDNN's convolutions in a separate kernel. The
  attention over the prompt's tokens counts one, or two if its mask has to be padded.
- bytes moved: each tensor that an operation reads, once, and each that it writes, once. A broadcast tensor counts the
  bytes that it holds. Caches and repeated reads of a kernel do not count.
- products: the bytes of products of matrices, convolutions and attention.
- peak: per device, the most bytes alive at once of tensors created while counting, in blocks of 512.
- weight_copies: convolutions of channels-last maps with weights in another layout. torch rearranges such weights in
  each call. This launch is not among the launches, and its bytes, `gigabytes_of_weight_copies`, not among those moved.
- transfers: copies between devices, and values read into the host.

A Triton kernel is counted where it is launched, as one launch that reads or writes each of its tensors once, and the
depthwise kernel some rows twice (see `triton_bytes`). Nothing here knows cuDNN's workspace, fragmentation or time.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections import Counter as Tally
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from trees import leaves

# For a fake card autograd would start a thread in its first backward, after which no test could fork: so first this.
torch.ones(1, requires_grad=True).sum().backward()
# one for all: a tensor of one mode becomes another in a second
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
BLOCK = 512
# Operations that launch nothing, in addition to views: queries, allocations, and moves of a tensor into a graph.
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device", "lift_fresh", "_unsafe_view",
    "detach", "is_same_size", "sym_size", "sym_stride", "set_", "lift", "alias", "_reshape_alias",
}  # fmt: skip
PRODUCTS = {
    "mm", "addmm", "_scaled_mm", "bmm", "baddbmm", "convolution", "attention", "attention_sums", "attention_outputs",
}  # fmt: skip
WRITE_ONLY = {"copy_", "zero_", "fill_"}


def size(tensor: torch.Tensor) -> int:
    """Return the bytes that `tensor` has in memory. Broadcast elements count once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride or length == 0 else 1
    return count * tensor.element_size()


def is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and suggest_memory_format(tensor) == torch.channels_last


def tensors(*trees: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(trees) if isinstance(leaf, torch.Tensor)]


class Counter(TorchDispatchMode):
    """The counter of the module's docstring. `scalars`: {dtype: value that the host reads from a tensor}."""

    def __init__(self, scalars: dict[torch.dtype, Any] | None = None) -> None:
        super().__init__()
        self.scalars = scalars or {}
        self.launches = self.moved = self.products = self.transfers = self.weight_copies = self.weights_copied = 0
        self.by_name: Tally[str] = Tally()
        self.bytes_by_name: Tally[str] = Tally()
        self.alive: Tally[torch.device] = Tally()
        self.peak: dict[torch.device, int] = {}
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if name == "_local_scalar_dense" and args[0].device.type != "cpu":
            self.transfers += 1
            return self.scalars[args[0].dtype]
        out = func(*args, **(kwargs or {}))
        if name == "convolution" and any(map(is_channels_last, args[:2])):
            # cuDNN returns channels-last. A torch without CUDA cannot know which library will convolve.
            out = torch.empty_like(out, memory_format=torch.channels_last)
        inputs, outputs = tensors(args, kwargs), tensors(out)
        if not (name in FREE or (hasattr(func, "is_view") and func.is_view)):
            self.count(name, inputs, outputs)
        # Weights, inputs and views of them are not counted.
        self.track(inputs, counted=False)
        self.track(outputs)
        return out

    def count(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        devices = {tensor.device.type for tensor in read + written}
        if devices == {"cpu"}:
            return
        if name in ("_to_copy", "copy_") and len({tensor.device for tensor in read + written}) > 1:
            self.transfers += 1
            return
        launches, moved = 1, sum(size(tensor) for tensor in written)
        moved += sum(size(tensor) for tensor in read[name in WRITE_ONLY :])
        if name == "convolution":
            if len(read) == 3:
                launches, moved = 2, moved + 2 * size(written[0])
            if is_channels_last(read[0]) and not read[1].is_contiguous(memory_format=torch.channels_last):
                self.weight_copies += 1
                self.weights_copied += 2 * size(read[1])
        self.add(name, launches, moved)

    def add(self, name: str, launches: int, moved: int) -> None:
        self.launches += launches
        self.moved += moved
        self.by_name[name] += launches
        self.bytes_by_name[name] += moved
        if name in PRODUCTS:
            self.products += moved

    def track(self, seen: list[torch.Tensor], counted: bool = True) -> None:
        for tensor in seen:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" or storage._cdata in self.known:
                continue
            self.known.add(storage._cdata)
            held = -(-storage.nbytes() // BLOCK) * BLOCK if counted else 0
            self.alive[tensor.device] += held
            self.peak[tensor.device] = max(self.peak.get(tensor.device, 0), self.alive[tensor.device])
            weakref.finalize(storage, self.release, storage._cdata, tensor.device, held)

    def release(self, key: int, device: torch.device, held: int) -> None:
        self.known.discard(key)
        self.alive[device] -= held

    def figures(self) -> dict[str, Any]:
        """Return the counts: gigabytes moved and in products, megabytes at the peak of each device."""
        peaks = [round(peak / 1e6, 1) for _, peak in sorted(self.peak.items(), key=lambda pair: str(pair[0]))]
        return {
            "launches": self.launches,
            "gigabytes_moved": round(self.moved / 1e9, 2),
            "gigabytes_of_products": round(self.products / 1e9, 2),
            "peak_megabytes": peaks[0] if len(peaks) == 1 else peaks,
            "weight_copies": self.weight_copies,
            "gigabytes_of_weight_copies": round(self.weights_copied / 1e9, 2),
            "transfers": self.transfers,
        }


class FusedAttention(TorchFunctionMode):
    """Softmax attention as accelerators have it, in one kernel; FakeTensorMode would take it apart."""

    def __init__(self, counter: Counter | None) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args
        mask = (kwargs or {}).get("attn_mask")
        batch, heads, count, _ = query.shape
        # the kernel writes [B, N, heads, d]
        out = torch.empty(batch, count, heads, value.shape[-1], dtype=value.dtype, device=value.device).transpose(1, 2)
        if self.counter is not None:
            inputs = [query, key, value] + ([] if mask is None else [mask])
            assert len({tensor.device for tensor in [*inputs, out]}) == 1, "tensors of one attention on several devices"
            # it reads masks in vectors of 8 (preprocess_mask in aten/native/transformers/attention.cpp)
            padded = mask is not None and any(stride % 8 for stride in mask.stride()[:-1])
            self.counter.add("attention", 1 + padded, sum(map(size, [*inputs, out])))
        return out


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# {Triton kernel: arguments that it writes and does not read}
WRITTEN = {
    "map_rows": {"out"},
    "residual_norm": {"out"},
    "attention_sums": {"sums"},
    "attention_outputs": {"out"},
    "gated_depthwise": {"out"},
}


def triton_bytes(name: str, given: dict[str, Any]) -> int:
    """Bytes that a kernel moves: each tensor once. Two bands of a depthwise both read the two rows at their border."""
    options = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    assert options.keys() >= WRITTEN[name] - {key for key, value in given.items() if value is None}
    again = 0.0
    if name == "residual_norm" and given["branch"] is not None:
        # written in place
        again = size(options["hidden"])
    if name == "gated_depthwise":
        again = size(options["x"]) * 2 * (given["bands"] - 1) / given["rows_in"]
    return sum(map(size, options.values())) + int(again)


class NoDevice:
    """Replaces torch.cuda.device, which needs a driver."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"

    def __enter__(self) -> None:
        return

    def __exit__(self, *error: object) -> None:
        return


@contextlib.contextmanager
def fake_accelerators(counter: Counter | None = None, triton: bool = True, trial: Any = None) -> Iterator[None]:
    """Inside, `device="cuda:0"` creates fake tensors. Other threads and moves of modules are not covered.

    Triton's kernels are counted instead of run. Without `triton` they are missing, as on a machine without Triton.
    `trial` is the module that tries kernels. None is the engine's; tests in ComfyUI pass the pack's module.
    """
    if trial is None:
        from sana_core.kernels import trial

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        inputs = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        devices = {value.device for value in inputs.values() if isinstance(value, torch.Tensor)}
        assert len(devices) == 1, f"tensors of {kernel.__name__} on {devices}"
        if active.counter is not None:
            active.counter.add(kernel.__name__, 1, triton_bytes(kernel.__name__, inputs))

    active = SimpleNamespace(counter=None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(FAKE)
        if not torch.cuda.is_available():
            properties = SimpleNamespace(major=9, minor=0, name="fake", total_memory=80 * 10**9)
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: properties))
        stack.callback(trial.refused_kernels.cache_clear)
        trial.refused_kernels.cache_clear()
        if triton:
            from triton.runtime.jit import JITFunction

            stack.enter_context(mock.patch.object(JITFunction, "run", run))
            stack.enter_context(mock.patch.object(torch.cuda, "device", NoDevice))
            # tried before anything is counted
            for device, dtype in itertools.product((FIRST, SECOND), (torch.float32, torch.bfloat16, torch.float16)):
                assert trial.kernels_on(device, dtype) == trial.TRIALS.keys()
        else:
            stack.enter_context(mock.patch.dict(sys.modules, {"triton": None, f"{trial.__package__}.channels": None}))
        active.counter = counter
        stack.enter_context(FusedAttention(counter))
        if counter is not None:
            stack.enter_context(counter)
        yield
