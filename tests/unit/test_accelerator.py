"""Every torch that the pack takes counts memory and tells a driver's error, by whatever name."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from decoders import f32c32

from sana_core import errors
from sana_core.commands import options
from sana_core.decode import decode_latents, device_memory, run
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


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("HIP error: invalid device function"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("CUDA error: so it is called"), False),
        (None, False),
    ],
)
def test_before_torch_2_8_a_drivers_error_is_told_by_its_words(monkeypatch, error, expected):
    monkeypatch.delattr(torch, "AcceleratorError", raising=False)
    assert accelerator.is_driver_error(error) is expected


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch before 2.8")
def test_since_torch_2_8_it_has_a_class_of_its_own():
    assert accelerator.is_driver_error(torch.AcceleratorError("CUDA error: unspecified launch failure"))
    assert not accelerator.is_driver_error(RuntimeError("CUDA error: so it is called"))


@pytest.mark.parametrize(
    "error, expected",
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_memory_that_runs_out_is_no_drivers_error(error, expected):
    assert accelerator.is_out_of_memory(error) is expected
    assert not (expected and accelerator.is_driver_error(error))


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch before 2.8")
def test_an_accelerators_error_can_mean_that_memory_ran_out():
    error = torch.AcceleratorError("CUDA error: out of memory")
    assert accelerator.is_out_of_memory(error) and not accelerator.is_driver_error(error)


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
    """torch.mps as it is on Apple's machines, where it counts by these alone; returns what is allocated."""
    allocated = [100]
    monkeypatch.setattr(torch._C, "_mps_currentAllocatedMemory", lambda: allocated[0], raising=False)
    assert not [name for name in NAMES if name != "empty_cache" and hasattr(torch.mps, name)]
    return allocated


def test_the_peak_on_apples_gpu_is_what_was_seen_of_it(apple):
    with device_memory.PeakMemory(torch.device("mps")) as peak:
        apple[0] = 400
        time.sleep(0.1)
        apple[0] = 200
        time.sleep(0.1)
    assert peak.bytes == 300
    assert accelerator.free_bytes(torch.device("mps")) > 2**20


@pytest.mark.parametrize("kind, measured", [("mps", True), ("privateuseone", False)])
def test_a_decode_ends_on_accelerators_that_count_less(apple, kind, measured, monkeypatch):
    """Decoded on the CPU, and measured as there; torch knows nothing of the second."""
    monkeypatch.setattr(run, "PeakMemory", lambda device: device_memory.PeakMemory(torch.device(kind)))
    report = {}
    pixels = decode_latents(f32c32(8), torch.zeros(1, 32, 4, 4), report=report)
    assert pixels.shape == (1, 3, 128, 128)
    assert report["strips"] and (report["peak_bytes"] == 0 if measured else report["peak_bytes"] is None)


def test_what_is_free_on_a_device_is_what_torch_has_reserved_and_does_not_use_too(counted):
    assert accelerator.free_bytes(torch.device("cuda")) == 700


def test_the_peak_on_a_device_is_what_was_allocated_at_once_since_the_start(counted):
    with device_memory.PeakMemory(torch.device("cuda:1")) as peak:
        counted.allocate(150)
        counted.allocate(-100)
        counted.allocate(20)
    assert peak.bytes == 150 and counted.devices == {torch.device("cuda:1")}
    with device_memory.PeakMemory(torch.device("cuda:1")) as peak:
        counted.allocate(-50)
    assert peak.bytes == 0


# in a process of its own, where no other test's freed memory is used again
PEAK = """
import time
import torch
from sana_core.decode.device_memory import PeakMemory
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
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, capture_output=True, text=True, check=True)
    share, nothing, later = map(float, done.stdout.split())
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
    monkeypatch.setattr(options, "local_devices", lambda names: cards)
    monkeypatch.setattr(options, "has_bf16", lambda device: device.index == 0)
    for asked, expected in ((None, "float32"), ("float16", "float16")):
        arguments = SimpleNamespace(cluster=None, devices=None, dtype=asked)
        assert options.choose_dtype(arguments) == expected
        assert capsys.readouterr().err == f"generating in {expected} on cuda:0, cuda:1\n"
    del cards[1]
    assert options.choose_dtype(SimpleNamespace(cluster=None, devices=None, dtype=None)) == "bfloat16"
