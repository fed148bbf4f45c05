"""How many bytes of tensors are alive, and how many were at most, of tensors with memory and of fake ones alike."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trees import leaves

# CUDA's allocator hands out blocks of this many bytes.
BLOCK = 512
# {dtype: value that the host reads from a tensor without values}
SCALARS = {torch.bool: True, torch.float32: 0.05, torch.float64: 0.05, torch.bfloat16: 0.05, torch.int64: 1}


class LiveBytes(TorchDispatchMode):
    """Counts the tensors that came about within it: in `alive`, and in `peak` the most at once since `restart`.

    What kernels take for themselves while they run is not seen.
    """

    def __init__(self, fake=False):
        super().__init__()
        self.fake, self.alive, self.peak, self.known = fake, 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.fake and func is torch.ops.aten._local_scalar_dense.default:
            return SCALARS[args[0].dtype]
        out = func(*args, **(kwargs or {}))
        for tensor in leaves((args, kwargs)):
            self.track(tensor, counted=False)
        for tensor in leaves(out):
            self.track(tensor, counted=True)
        return out

    def track(self, tensor, counted):
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        held = -(-storage.nbytes() // BLOCK) * BLOCK if counted else 0
        self.alive += held
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.release, storage._cdata, held)

    def release(self, key, held):
        self.known.discard(key)
        self.alive -= held

    def restart(self):
        self.peak = self.alive
