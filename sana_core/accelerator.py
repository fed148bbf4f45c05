"""What torch.accelerator lacks in older torch: memory before 2.10, and before 2.8 a class for errors of drivers."""

from __future__ import annotations

import re
from typing import Any

import torch


def memory_functions(device: torch.device) -> Any:
    """Return the module of torch that counts the memory of `device`: memory_allocated and the like."""
    own = torch.accelerator
    return own if hasattr(own, "get_memory_info") else torch.get_device_module(device)


def free_memory(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory that nobody has reserved."""
    memory = memory_functions(device)
    free, _ = memory.get_memory_info(device) if hasattr(memory, "get_memory_info") else memory.mem_get_info(device)
    return free


def empty_cache() -> None:
    """Give what torch has reserved and does not use back to the accelerators, if there are any."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None:
        memory_functions(device).empty_cache()


def is_driver_error(error: BaseException | None) -> bool:
    """Whether an accelerator failed rather than the work on it, as after an access to memory that is not there."""
    if hasattr(torch, "AcceleratorError"):
        return isinstance(error, torch.AcceleratorError)
    # c10/cuda/CUDAException.cpp, and what hipify makes of it
    return isinstance(error, RuntimeError) and re.match(r"(CUDA|HIP) error: ", str(error)) is not None
