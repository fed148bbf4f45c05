"""A Triton driver without a GPU: the pack's kernels are built, bound and looked up as on an H100, and then not run.

The launcher's call of CUDA and the launches of cuBLAS are replaced by work of the CPU that does not hold Python's lock,
as the real calls do not hold it. So a step of the model costs the time that its host side costs on a GPU. The results
are not images: the memory that a kernel would write keeps what was in it.
"""

from __future__ import annotations

import collections
import time
import zlib
from typing import Any

import torch
import torch.nn.functional as F

# Microseconds without Python's lock of a kernel of Triton, and of a product of matrices or an attention of torch.
LAUNCH, PRODUCT = 4.0, 10.0
# zlib keeps the lock for fewer bytes.
FEWEST_BYTES = 5121
KERNELS = frozenset({"modulation", "linear_attention", "gated_depthwise"})


def bytes_per_microsecond() -> float:
    """Return how many bytes zlib sums in a microsecond on this machine, when nothing else disturbs it."""
    data, seconds = bytes(2**18), []
    for _ in range(200):
        started = time.perf_counter()
        zlib.crc32(data)
        seconds.append(time.perf_counter() - started)
    return len(data) / (1e6 * min(seconds))


class Work:
    """A call that takes some microseconds of the processor without Python's lock."""

    def __init__(self, microseconds: float, speed: float) -> None:
        self.data = bytes(max(FEWEST_BYTES, int(microseconds * speed)))

    def __call__(self, *arguments: Any) -> None:
        zlib.crc32(self.data)


class Utils:
    """The functions of Triton's driver in C."""

    def __init__(self, launch: Work) -> None:
        self.launch = launch

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def build_signature_metadata(self, signature: Any) -> bytes:
        return b""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass


class Driver:
    """Triton's driver for an H100, with its launcher up to the call of C."""

    def __init__(self, launch: Work) -> None:
        import triton.backends.nvidia.driver as nvidia
        from triton.backends.compiler import GPUTarget

        # The real driver takes them from its library in C.
        nvidia.PyKernelArg = collections.namedtuple("PyKernelArg", "nested_tuple type")
        for value, name in enumerate(("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE")):
            setattr(nvidia, name, value)
        self.utils, self.launcher_cls, self.target = Utils(launch), nvidia.CudaLauncher, GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return 9, 0


def install(speed: float) -> None:
    """Let this process launch the pack's kernels with the fake driver, on tensors of the CPU.

    `speed` is the result of `bytes_per_microsecond`, the same in all processes that are compared.
    """
    from triton.runtime import driver

    import sana_core.model.forward as forward

    driver.set_active(Driver(Work(LAUNCH, speed)))
    forward.kernels_on = lambda device, dtype: KERNELS
    product = Work(PRODUCT, speed)
    for name in ("linear", "scaled_dot_product_attention"):
        setattr(F, name, followed_by(getattr(F, name), product))
    # The memory that no kernel has written may have such numbers, with which a CPU is slow.
    torch.set_flush_denormal(True)


def followed_by(function: Any, work: Work) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        out = function(*arguments, **options)
        work()
        return out

    return call
