"""Every torch that the pack takes counts memory and tells a driver's error, by whatever name."""

import pytest
import torch

from sana_core import accelerator

NAMES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "reset_peak_memory_stats", "empty_cache")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize("older", [False, True])
def test_memory_is_counted_by_functions_that_this_torch_has(monkeypatch, kind, older):
    if older:
        monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)
    memory = accelerator.memory_functions(torch.device(kind))
    assert all(callable(getattr(memory, name)) for name in NAMES)
    assert hasattr(memory, "get_memory_info") or memory is getattr(torch, kind)


def test_free_memory_before_torch_2_10_is_what_the_devices_module_says(monkeypatch):
    monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3_000, 8_000))
    assert accelerator.free_memory(torch.device("cuda:0")) == 3_000


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
