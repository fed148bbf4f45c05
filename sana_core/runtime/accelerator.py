"""The choice of a device, its memory and its dtypes, and which errors mean that memory ran out or that it failed.

The memory counters of torch.cuda and torch.xpu are used, because torch.accelerator has them only since 2.10 and not for
MPS.
"""

from __future__ import annotations

import gc
import re
import threading
from contextlib import AbstractContextManager, nullcontext

import torch

from ..errors import InputError
from .text import get_logger

logger = get_logger(__name__)

# Errors that mean that memory ran out, although torch raises them as a plain RuntimeError (or as AcceleratorError).
# Callers halve the work, and give the device up when the smallest piece of work fails as well.
MEMORY_RAN_OUT = re.compile(
    "|".join(
        (
            # "CUDA error: out of memory" (c10/cuda/CUDAException.cpp), "CUDA driver error: out of memory" (expandable
            # segments, c10/cuda/driver_api.h), "Triton Error [CUDA]: out of memory" (triton/backends/nvidia/driver.c),
            # "HIP error: out of memory", "MPS backend out of memory" (aten/src/ATen/mps/MPSAllocator.mm)
            r"out of memory",
            # c10/core/impl/alloc_cpu.cpp
            r"can't allocate memory",
            r"not enough memory: you tried to allocate",
            # aten/src/ATen/cuda/CUDABlas.cpp: "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `...`". ROCm has
            # HIPBLAS_, cuDNN CUDNN_STATUS_ALLOC_FAILED (aten/src/ATen/cuda/Exceptions.h)
            r"(CUBLAS|CUBLASLT|HIPBLAS|HIPBLASLT|CUDNN|CUSOLVER|HIPSOLVER)_STATUS_ALLOC_FAILED",
            # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and ..._HOST_ALLOCATION_FAILED
            r"CUDNN_STATUS_\w*ALLOCATION_FAILED",
            # A handle allocates its workspace outside of torch's allocator. On a full GPU its creation fails with
            # NOT_INITIALIZED rather than ALLOC_FAILED: pytorch.org forum 125450, tensorflow issue 9489.
            r"(CUBLAS|CUBLASLT|HIPBLAS|HIPBLASLT|CUDNN)_STATUS_NOT_INITIALIZED",
            # cuDNN tries one engine after another and drops their errors, also when the workspace does not fit
            # (aten/src/ATen/native/cudnn/Conv_v8.cpp; pytorch issue 108645). The text starts with "GET was" or "FIND
            # was". A GPU without any engine for a convolution fails again with the smallest piece and is then dropped.
            r"[Uu]nable to find an engine to execute",
            # The allocator queries NVML while it builds its OutOfMemoryError. Where the query failed, torch
            # before 2.10 raised this assertion instead (c10/cuda/CUDACachingAllocator.cpp, reportProcessMemoryInfo).
            r"NVML_SUCCESS == r INTERNAL ASSERT FAILED",
            # aten/src/ATen/miopen/Exceptions.h: only the name of the status
            r"miopenStatusAllocFailed",
            # XPU: "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)" (torch-xpu-ops
            # issue 5432), "... 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)" (pytorch issue 190972), before oneAPI 2025
            # "Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)"
            r"(UR_RESULT_ERROR|PI_ERROR|ZE_RESULT_ERROR)_OUT_OF_(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)",
            # oneDNN's text has no status; on XPU the status was "out of memory" (ComfyUI issue 5270)
            r"could not create a (primitive|memory)$",
            # MPS: a single buffer above the limit, "Invalid buffer size: 9.75 GB" (pytorch issues 78042, 141909)
            r"Invalid buffer size: ",
        )
    )
)
# Errors of a device or of its driver that torch raises as a plain RuntimeError. The device is given up.
DEVICE_FAILED = re.compile(
    "|".join(
        (
            # c10/cuda/CUDAException.cpp before torch 2.8, and its hipified copy. cuBLAS and hipBLAS errors still start
            # with this, for example "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`" and
            # "CUDA error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasCreate(handle)`".
            r"^(CUDA|HIP) (driver )?error: ",
            # "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "cuDNN Frontend error: ..." (ATen/cuda/Exceptions.h)
            r"^cuDNN (Frontend )?error: ",
            r"CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
            r"^miopenStatus\w+",
            # triton/backends/nvidia/driver.c and triton/backends/amd/driver.c
            r"^Triton Error \[\w+\]: ",
            # XPU: "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)" (pytorch issue 190972),
            # "Native API failed. Native API returns: ..." (intel-extension-for-pytorch issue 780), "UR error" (pytorch
            # issue 149953). c10/xpu/XPUException.h passes on the text of SYCL.
            r"backend failed with error: ",
            r"^Native API failed",
            r"^UR (error|backend failed)",
            r"(UR_RESULT_ERROR|PI_ERROR|ZE_RESULT_ERROR)_\w+",
            r"could not execute a primitive$",
        )
    )
)
# Held while cached memory is freed, or the kernels of a step are recorded (step_graph.py), by one thread at a time.
ALLOCATOR = threading.RLock()
# RDNA 2 and older
AMD_WITHOUT_BF16 = ("gfx103", "gfx101", "gfx906", "gfx900", "gfx803")


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the bytes that can still be allocated on `device`, and its total bytes."""
    if device.type in ("cpu", "mps"):
        # Apple's GPU uses the machine's memory.
        import psutil

        machine = psutil.virtual_memory()
        return machine.available, machine.total
    module = torch.get_device_module(device)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    try:
        free, total = module.mem_get_info(device)
    except RuntimeError as error:
        if is_driver_error(error):
            raise
        # torch.xpu raises if the driver does not report free memory, as on Intel's integrated GPUs and some Arc GPUs.
        total = module.get_device_properties(device).total_memory
        free = total - module.memory_reserved(device)
        logger.info(
            "%s: its driver does not report free memory, so only the memory of this process counts as used", device
        )
    return free + unused, total


def free_bytes(device: torch.device) -> int:
    return memory_info(device)[0]


def has_float64(device: torch.device) -> bool:
    """Whether `device` computes in float64. Apple's GPUs and Intel's Arc A do not."""
    if device.type in ("cpu", "meta", "mps"):
        return device.type != "mps"
    # Only torch.xpu has the property. CUDA GPUs all compute in float64.
    return getattr(torch.get_device_module(device).get_device_properties(device), "has_fp64", True)


def has_bf16(device: torch.device) -> bool:
    """Whether `device` computes in bfloat16 faster than in float32, by the same rules as ComfyUI's."""
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    module = torch.get_device_module(device)
    if module is not torch.cuda:
        return device.type != "cpu" and module.is_bf16_supported()
    properties = module.get_device_properties(device)
    if torch.version.hip is not None:
        return not properties.gcnArchName.startswith(AMD_WITHOUT_BF16)
    return properties.major >= 8


def current_accelerator() -> torch.device | None:
    """Return torch's default accelerator, or None if this machine has none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def chosen_device(name: str) -> torch.device:
    """Return the device with this name. If `name` is empty, return this machine's accelerator or else its CPU."""
    accelerator = current_accelerator()
    if not name:
        return accelerator or torch.device("cpu")
    count = torch.accelerator.device_count()
    names = ["cpu", *(f"{accelerator.type}:{index}" for index in range(count) if accelerator)]
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cpu" and f"{device.type}:{device.index or 0}" not in names:
        raise InputError(f"device: got {name!r:.40}, expected {' or '.join(names)}")
    return device


def current_device(device: torch.device) -> AbstractContextManager:
    """Return a context in which `device` is this thread's current device. It does nothing for a CPU and Apple's GPU."""
    if device.type == "cpu" or device.index is None:
        return nullcontext()
    context = getattr(torch.get_device_module(device), "device", nullcontext)
    return context(device)


def set_current_device(device: torch.device) -> None:
    """Make `device` the current device of this thread. A CPU and Apple's GPU have no current device to set.

    torch.accelerator had another name for this until torch 2.7. The modules of the devices always had this one.
    """
    if device.type not in ("cpu", "mps") and device.index is not None:
        torch.get_device_module(device).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all of its work. Raises the error of a kernel that failed."""
    if device.type not in ("cpu", "meta"):
        # torch.mps.synchronize takes no device.
        with current_device(device):
            torch.get_device_module(device).synchronize()


def check_device(device: torch.device) -> None:
    """Raise the error of `device` if it has failed. Waits for all of its work. A lack of memory is no failure."""
    try:
        synchronize(device)
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise


def empty_cache(device: torch.device | None = None) -> None:
    """Return cached memory that no tensor uses to the driver of `device`, by default of the current accelerator.

    torch has no such function for a single device. It empties the caches of all devices of the kind, and stops at the
    first device that fails.
    """
    device = device or current_accelerator()
    if device is None or device.type == "cpu":
        return
    # While a failed device is the current one, every call to CUDA returns that device's error.
    with ALLOCATOR, current_device(device):
        torch.get_device_module(device).empty_cache()


def is_driver_error(error: BaseException | None) -> bool:
    """Whether `error` is a failure of an accelerator or its driver, such as an access to an illegal address."""
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return DEVICE_FAILED.search(str(error)) is not None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` means that memory ran out, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and MEMORY_RAN_OUT.search(str(error)) is not None


def release_memory_of(error: BaseException, device: torch.device | None = None) -> BaseException:
    """Return `error` without its frames, whose variables keep tensors alive, and empty the cache of `device`.

    Never raises. After a driver error CUDA may answer every further call with the same error. The devices that still
    work do not need the empty cache, so that error is only logged.
    """
    error.__traceback__ = None
    error.__context__ = None
    error.__cause__ = None
    try:
        gc.collect()
        empty_cache(device)
    except Exception as failure:
        logger.warning("cannot empty the memory cache of %s: %.200s", device, failure)
        # Its frames refer to the frame of this function, and therefore to `error`.
        failure.__traceback__ = None
    return error
