"""Measures the peak memory of an operation."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

SAMPLING_SECONDS = 0.01


def process_bytes() -> int:
    """Return the resident memory of this process, without shared memory where the system reports it."""
    import psutil

    memory = psutil.Process().memory_info()
    # The system loads and drops pages of mapped files at will. Only Linux counts them separately.
    return memory.rss - getattr(memory, "shared", 0)


# Devices for which torch records no peak. The memory in use is sampled repeatedly.
SAMPLERS = {"cpu": process_bytes, "mps": torch.mps.current_allocated_memory}


class PeakMemory:
    """A context that measures the peak memory of a device, beyond the memory in use at its start.

    On the CPU it measures the memory of the process. `bytes` stays None for devices whose memory cannot be measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None
        module = getattr(torch, device.type, None)
        self.counter = module if hasattr(module, "max_memory_allocated") else None
        self.memory_in_use = SAMPLERS.get(device.type)
        self.ended = threading.Event()

    def __enter__(self) -> PeakMemory:
        if self.counter is not None:
            self.start = self.counter.memory_allocated(self.device)
            self.counter.reset_peak_memory_stats(self.device)
        elif self.memory_in_use is not None:
            self.start, self.bytes = self.memory_in_use(), 0
            self.watcher = threading.Thread(target=self.watch, daemon=True)
            self.watcher.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.counter is not None:
            self.bytes = max(0, self.counter.max_memory_allocated(self.device) - self.start)
        elif self.memory_in_use is not None:
            self.ended.set()
            self.watcher.join()

    def watch(self) -> None:
        assert self.memory_in_use is not None and self.bytes is not None
        while not self.ended.wait(SAMPLING_SECONDS):
            self.bytes = max(self.bytes, self.memory_in_use() - self.start)
