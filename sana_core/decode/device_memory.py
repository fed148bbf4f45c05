"""How much memory a piece of work really took."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from ..accelerator import free_memory, memory_functions

SECONDS = 0.01  # between two looks at the process


class PeakMemory:
    """A context that measures the most bytes beyond those at its start: of the device, on the CPU of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self.ended = threading.Event()

    def __enter__(self) -> PeakMemory:
        self.start = self.used()
        if self.device.type == "cpu":
            self.watcher = threading.Thread(target=self.watch, daemon=True)
            self.watcher.start()
        else:
            memory_functions(self.device).reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.device.type == "cpu":
            self.ended.set()
            self.watcher.join()
        else:
            peak = memory_functions(self.device).max_memory_allocated(self.device)
            self.bytes = max(0, peak - self.start)

    def used(self) -> int:
        if self.device.type != "cpu":
            return memory_functions(self.device).memory_allocated(self.device)
        import psutil

        memory = psutil.Process().memory_info()
        # pages of mapped files come and go as the system likes; only Linux tells them apart
        return memory.rss - getattr(memory, "shared", 0)

    def watch(self) -> None:
        while not self.ended.wait(SECONDS):
            self.bytes = max(self.bytes, self.used() - self.start)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`."""
    if device.type == "cpu":
        import psutil

        return psutil.virtual_memory().available
    memory = memory_functions(device)
    # what torch has reserved and does not use
    return free_memory(device) + memory.memory_reserved(device) - memory.memory_allocated(device)
