"""A graph of the CPU with the rules of a CUDA graph.

A recording keeps the operations of a function with their tensors. A replay repeats them on the same memory, as a CUDA
graph launches its kernels with the same addresses. As in CUDA:

- Values that Python passed to an operation are recorded with it.
- A tensor whose `data` was exchanged after the recording keeps its former memory.
- A recording computes nothing: until the first replay, its tensors are NaN.
- Reading a value on the host fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trees import leaves, mapped

from sana_core.sampling.step_graph import Recorder, Recording, Work


def alias(leaf: Any) -> Any:
    """Return a tensor with the memory that `leaf` has now."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def tensors(*trees: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(trees) if isinstance(leaf, torch.Tensor)]


class Operations(TorchDispatchMode):
    """Collects all operations. `check(number)` is called before each one, and raises to make it fail."""

    def __init__(self, check: Callable[[int], object]) -> None:
        super().__init__()
        self.check = check
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        # Memory that existed before.
        self.known: set[int] = set()
        self.created: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.check(len(self.calls))
        if func.overloadpacket.__name__ == "_local_scalar_dense":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        inputs = mapped(alias, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(inputs):
            key = tensor.untyped_storage()._cdata
            if key not in self.created:
                self.known.add(key)
        for tensor in tensors(out):
            key = tensor.untyped_storage()._cdata
            if key not in self.known and not func.is_view:
                self.created[key] = tensor.detach()
        self.calls.append((func, *inputs, mapped(alias, out)))
        return out


class FakeGraph:
    """A recorded function of the CPU."""

    def __init__(self, operations: Operations) -> None:
        self.calls = [call for call in operations.calls if not call[0].is_view]
        for tensor in operations.created.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FakeRecorder(Recorder):
    """Records on the CPU. It has the lock of its base class."""

    # Whether the host limits the speed, as a test wishes.
    host_limits = True
    # See Operations.
    check: Callable[[int], object] = staticmethod(lambda number: None)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.eager = 0
        # Graphs that are alive.
        self.graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()

    def run(self, work: Work) -> torch.Tensor:
        self.eager += 1
        return work()

    def waits_for_host(self) -> bool:
        return self.host_limits

    def capture(self, work: Work) -> Recording:
        # As in CUDA: the work runs once on the other stream.
        work()
        with Operations(self.check) as operations:
            out = work()
        graph = FakeGraph(operations)
        self.graphs.add(graph)
        return Recording(graph.replay, out)
