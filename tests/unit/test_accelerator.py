"""Every supported torch version counts memory and reports a driver's error, under any name."""

import subprocess
import sys
import time
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from decoders import f32c32

from sana_core import errors
from sana_core.commands import options
from sana_core.decode import decode_latents, run, workspace
from sana_core.runtime import accelerator

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "mem_get_info",
    "empty_cache",
)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_memory_is_counted_by_functions_that_this_torch_has(kind):
    memory = torch.get_device_module(torch.device(kind))
    assert all(callable(getattr(memory, name)) for name in NAMES)


@pytest.mark.parametrize("name", ["model", "cuda:7", "meta", "cpu:x", "xpu"])
def test_a_device_that_is_not_here_is_named_with_those_that_are(name):
    assert accelerator.chosen_device("cpu") == accelerator.chosen_device("") == torch.device("cpu")
    with pytest.raises(errors.InputError, match="^device: got .*, expected cpu"):
        accelerator.chosen_device(name)


def test_emptying_the_cache_of_no_accelerator_does_nothing():
    accelerator.empty_cache()


# Texts that torch and its libraries raise as a plain RuntimeError; the sources are in runtime/accelerator.py.
ASYNC = "\nCUDA kernel errors might be asynchronously reported at some other API call"
MEMORY = (
    "CUDA error: out of memory" + ASYNC,
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "Unable to find an engine to execute this computation",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131, please report a bug',
    "Triton Error [CUDA]: out of memory",
    "miopenStatusAllocFailed",
    "MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 384.00 KB, max allowed: 9.07 GB).",
    "Invalid buffer size: 9.75 GB",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "could not create a primitive",
    "[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
    "[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.",
)
DEVICE = (
    "CUDA error: an illegal memory access was encountered" + ASYNC,
    "CUDA error: unspecified launch failure",
    "CUDA driver error: unknown error",
    "HIP error: invalid device function",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.",
    "miopenStatusUnknownError",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "Triton Error [HIP]:  Code: 719, Messsage: unspecified launch failure",
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "UR error",
    "could not execute a primitive",
)
WORK = (
    "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!",
    "could not create a primitive descriptor for a matmul primitive",
    "the caption mentions a CUDA error: nothing failed",
)


@pytest.mark.parametrize("text", MEMORY)
def test_errors_that_mean_memory_ran_out(text):
    assert accelerator.is_out_of_memory(RuntimeError(text))
    assert not accelerator.is_driver_error(RuntimeError(text))
    assert not accelerator.is_out_of_memory(ValueError(text))


@pytest.mark.parametrize("text", DEVICE)
def test_errors_that_mean_the_device_failed(text):
    assert accelerator.is_driver_error(RuntimeError(text))
    assert not accelerator.is_out_of_memory(RuntimeError(text))
    assert not accelerator.is_driver_error(ValueError(text))


@pytest.mark.parametrize("text", WORK)
def test_errors_of_the_work_are_neither(text):
    assert not accelerator.is_driver_error(RuntimeError(text))
    assert not accelerator.is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")])
def test_errors_with_a_class_for_memory(error):
    assert accelerator.is_out_of_memory(error) and not accelerator.is_driver_error(error)


def test_no_error_is_neither():
    assert not accelerator.is_out_of_memory(None) and not accelerator.is_driver_error(None)


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch before 2.8")
def test_an_accelerator_error_is_a_driver_error_unless_memory_ran_out():
    assert accelerator.is_driver_error(torch.AcceleratorError("a text that a later torch invents"))
    full = torch.AcceleratorError("CUDA error: out of memory")
    assert accelerator.is_out_of_memory(full) and not accelerator.is_driver_error(full)


def failed_with_tensors():
    """Return an error and weak references to the tensors of its frame, of its cause and of its context."""
    alive = []

    def hold(error):
        tensor = torch.zeros(8)
        alive.append(weakref.ref(tensor))
        raise error

    try:
        try:
            try:
                hold(ValueError("first"))
            except ValueError as first:
                cause = first
            hold(KeyError("second"))
        except KeyError:
            tensor = torch.zeros(8)
            alive.append(weakref.ref(tensor))
            raise torch.OutOfMemoryError("CUDA out of memory") from cause
    except torch.OutOfMemoryError as error:
        return error, alive


def test_a_released_error_keeps_no_tensor_alive():
    error, alive = failed_with_tensors()
    assert len(alive) == 3 and any(reference() is not None for reference in alive)
    assert accelerator.release_memory_of(error) is error
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
    assert [reference() for reference in alive] == [None] * 3


def test_emptying_the_cache_of_a_dead_device_does_not_raise(monkeypatch, caplog):
    def dead():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", dead)
    error = RuntimeError("CUDA error: unspecified launch failure")
    assert accelerator.release_memory_of(error, torch.device("cuda:1")) is error
    assert "cannot empty the memory cache of cuda:1: CUDA error: an illegal" in caplog.text


def test_the_cache_is_emptied_while_its_device_is_the_current_one(monkeypatch):
    """A call while a dead device is the current one raises the error of that device."""
    current, emptied = [0], []

    @contextmanager
    def device(which):
        before, current[0] = current[0], which.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(current[0]))
    accelerator.release_memory_of(torch.OutOfMemoryError(), torch.device("cuda:1"))
    accelerator.release_memory_of(torch.OutOfMemoryError(), torch.device("cpu"))
    assert emptied == [1]


class Counted:
    """torch's counters of a device's memory (torch.cuda's documentation), of one that has 1000 bytes."""

    def __init__(self, allocated, reserved):
        self.allocated, self.peak, self.reserved, self.devices = allocated, allocated, reserved, set()

    def allocate(self, size):
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def memory_allocated(self, device):
        self.devices.add(device)
        return self.allocated

    def mem_get_info(self, device):
        return 1000 - self.reserved, 1000

    def max_memory_allocated(self, device):
        return self.peak

    def memory_reserved(self, device):
        return self.reserved

    def reset_peak_memory_stats(self, device):
        self.peak = self.allocated


@pytest.fixture
def counted(monkeypatch):
    memory = Counted(allocated=300, reserved=400)
    memory.allocate(500)
    memory.allocate(-500)
    for name in set(NAMES) & set(dir(memory)):
        monkeypatch.setattr(torch.cuda, name, getattr(memory, name))
    return memory


@pytest.fixture
def apple(monkeypatch):
    """torch.mps with only the counters of Apple's machines. The value is a list with the allocated bytes."""
    allocated = [100]
    monkeypatch.setattr(torch._C, "_mps_currentAllocatedMemory", lambda: allocated[0], raising=False)
    assert not [name for name in NAMES if name != "empty_cache" and hasattr(torch.mps, name)]
    return allocated


def test_the_peak_on_apples_gpu_is_what_was_seen_of_it(apple):
    with workspace.PeakMemory(torch.device("mps")) as peak:
        apple[0] = 400
        time.sleep(0.1)
        apple[0] = 200
        time.sleep(0.1)
    assert peak.bytes == 300
    assert accelerator.free_bytes(torch.device("mps")) > 2**20


def test_apples_gpu_is_waited_for(monkeypatch):
    """The function of torch.mps that waits for the GPU takes no device."""
    waits = []
    monkeypatch.setattr(torch._C, "_mps_deviceSynchronize", lambda: waits.append("mps"), raising=False)
    accelerator.synchronize(torch.device("mps"))
    assert waits


@pytest.mark.parametrize("kind, measured", [("mps", True), ("privateuseone", False)])
def test_a_decode_ends_on_accelerators_that_count_less(apple, kind, measured, monkeypatch):
    """The CPU decodes and counts here. torch has no counters for the second kind."""
    monkeypatch.setattr(run, "PeakMemory", lambda device: workspace.PeakMemory(torch.device(kind)))
    report = {}
    pixels = decode_latents(f32c32(8), torch.zeros(1, 32, 4, 4), report=report)
    assert pixels.shape == (1, 3, 128, 128)
    assert report["strips"] and (report["peak_bytes"] == 0 if measured else report["peak_bytes"] is None)


def test_what_is_free_on_a_device_is_what_torch_has_reserved_and_does_not_use_too(counted):
    assert accelerator.free_bytes(torch.device("cuda")) == 700


def test_the_peak_on_a_device_is_what_was_allocated_at_once_since_the_start(counted):
    with workspace.PeakMemory(torch.device("cuda:1")) as peak:
        counted.allocate(150)
        counted.allocate(-100)
        counted.allocate(20)
    assert peak.bytes == 150 and counted.devices == {torch.device("cuda:1")}
    with workspace.PeakMemory(torch.device("cuda:1")) as peak:
        counted.allocate(-50)
    assert peak.bytes == 0


# A new process cannot reuse memory that another test has freed.
PEAK = """
import time
import torch
from sana_core.decode.workspace import PeakMemory
size = 400_000_000
with PeakMemory(torch.device("cpu")) as peak:
    held = torch.ones(size, dtype=torch.uint8)
    time.sleep(0.2)
    del held
    time.sleep(0.05)
with PeakMemory(torch.device("cpu")) as nothing:
    pass
watched = peak.bytes
held = torch.ones(2 * size, dtype=torch.uint8)
time.sleep(0.1)
print(watched / size, nothing.bytes, peak.bytes - watched)
"""


def test_the_peak_on_the_cpu_is_what_the_process_holds_more_than_at_the_start():
    process = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, capture_output=True, text=True, check=True)
    share, nothing, later = map(float, process.stdout.split())
    assert 0.9 < share < 1.5 and nothing == 0
    assert later == 0, "what comes after its end is not its"


def test_what_is_free_without_a_device_is_the_machines():
    available = psutil.virtual_memory().available
    assert accelerator.free_bytes(torch.device("cpu")) == pytest.approx(available, rel=0.2)


@pytest.mark.parametrize(
    "kind, hip, card, expected",
    [
        ("cpu", None, {}, False),
        ("cuda", None, {"major": 8}, True),
        ("cuda", None, {"major": 7}, False),
        ("cuda", "7.2", {"major": 9, "gcnArchName": "gfx942:sramecc+:xnack-"}, True),
        ("cuda", "7.2", {"major": 10, "gcnArchName": "gfx1030"}, False),
    ],
)
def test_bf16_is_chosen_where_comfyui_would(kind, hip, card, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**card))
    assert accelerator.has_bf16(torch.device(kind)) is expected


def test_the_command_line_draws_in_what_suits_its_devices_and_says_so(monkeypatch, capsys):
    cards = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(options, "has_bf16", lambda device: device.index == 0)
    for asked, expected in ((None, "float32"), ("float16", "float16")):
        assert options.choose_dtype(SimpleNamespace(dtype=asked), cards) == expected
        assert capsys.readouterr().err == f"generating in {expected} on cuda:0, cuda:1\n"
    del cards[1]
    assert options.choose_dtype(SimpleNamespace(dtype=None), cards) == "bfloat16"
