"""Accelerators of any torch: their memory, and which errors mean that it ran out or that the driver failed.

Memory is asked of a device's own module: torch.accelerator counts it since 2.10 only, and not on Apple's.
"""

from __future__ import annotations

import gc
import re

import torch

from ..errors import InputError

# RDNA 2 and what is older
AMD_WITHOUT_BF16 = ("gfx103", "gfx101", "gfx906", "gfx900", "gfx803")


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the bytes that can still be allocated on `device`, and all that it has."""
    if device.type in ("cpu", "mps"):
        # Apple's GPU has the machine's
        import psutil

        machine = psutil.virtual_memory()
        return machine.available, machine.total
    own = torch.get_device_module(device)
    free, total = own.mem_get_info(device)
    # what torch has reserved and does not use
    return free + own.memory_reserved(device) - own.memory_allocated(device), total


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`."""
    return memory_info(device)[0]


def has_bf16(device: torch.device) -> bool:
    """Whether `device` computes in bfloat16 faster than in float32, by the same rules as ComfyUI's."""
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    own = torch.get_device_module(device)
    if own is not torch.cuda:
        return device.type != "cpu" and own.is_bf16_supported()
    properties = own.get_device_properties(device)
    if torch.version.hip is not None:
        return not properties.gcnArchName.startswith(AMD_WITHOUT_BF16)
    return properties.major >= 8


def current_accelerator() -> torch.device | None:
    """Return the accelerator that torch uses where none is named, None where this machine has none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def chosen_device(name: str) -> torch.device:
    """Return the device that a setting `name`s, and for an empty one this machine's accelerator, or its CPU.

    Raises InputError for one that torch or this machine has not.
    """
    own = current_accelerator()
    if not name:
        return own or torch.device("cpu")
    names = ["cpu", *(f"{own.type}:{index}" for index in range(torch.accelerator.device_count()) if own)]
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cpu" and f"{device.type}:{device.index or 0}" not in names:
        raise InputError(f"device: got {name!r:.40}, expected {' or '.join(names)}")
    return device


def empty_cache() -> None:
    """Give what torch has reserved and does not use back to the accelerators, if there are any."""
    device = current_accelerator()
    if device is not None:
        torch.get_device_module(device).empty_cache()


def is_driver_error(error: BaseException | None) -> bool:
    """Whether an accelerator failed rather than the work on it, as after an access to memory that is not there."""
    if is_out_of_memory(error):
        return False
    if hasattr(torch, "AcceleratorError"):
        return isinstance(error, torch.AcceleratorError)
    # c10/cuda/CUDAException.cpp, and what hipify makes of it
    return isinstance(error, RuntimeError) and re.match(r"(CUDA|HIP) error: ", str(error)) is not None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` says that memory ran out, on an accelerator or on the CPU.

    Not all have a class: "CUDA error: out of memory" is torch's AcceleratorError, "MPS backend out of memory" and
    "DefaultCPUAllocator: can't allocate memory" are its RuntimeErrors.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and re.search(r"out of memory|can't allocate memory", str(error)) is not None


def release_memory_of(error: BaseException) -> BaseException:
    """Return `error` without its frames, whose variables would keep tensors alive, and give their memory back."""
    error.__traceback__ = None
    error.__context__ = None
    gc.collect()
    empty_cache()
    return error
