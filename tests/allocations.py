"""Memory that runs out at one allocation after another."""

import gc
import os

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trees import leaves

# Only every n-th allocation fails. `make soak` sets 1.
EVERY = int(os.environ.get("ALLOCATIONS_EVERY", "0"))
SMALLEST = 1024


def storages(values):
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in values if type(x) is torch.Tensor}


class RunsOut(TorchDispatchMode):
    """Counts the allocations of at least `SMALLEST` bytes in this thread, and fails the n-th one, once."""

    def __init__(self, wanted=0):
        super().__init__()
        self.wanted, self.count = wanted, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        inputs = storages(leaves((arguments, options)))
        result = function(*arguments, **(options or {}))
        new = storages(leaves(result))
        if any(size >= SMALLEST and pointer not in inputs for pointer, size in new.items()):
            self.count += 1
            if self.count == self.wanted:
                del result
                raise torch.OutOfMemoryError("no memory")
        return result


def large_tensors(numel=10**4):
    """The tensors that are alive, but for small ones and weights."""
    gc.collect()
    return {id(x) for x in gc.get_objects() if type(x) is torch.Tensor and x.numel() > numel}


def numbers(count, few):
    """From 1 to `count`: all, or about `few` of them, the first and the last included."""
    return range(1, count + 1, EVERY or max(1, count // few))
