"""How much memory a piece of work really took."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

SECONDS = 0.01  # between two looks at what is used


def process_bytes() -> int:
    """Return what this process holds."""
    import psutil

    memory = psutil.Process().memory_info()
    # pages of mapped files come and go as the system likes; only Linux tells them apart
    return memory.rss - getattr(memory, "shared", 0)


# where torch keeps no peak, what is used is looked at again and again
LOOKS = {"cpu": process_bytes, "mps": torch.mps.current_allocated_memory}


class PeakMemory:
    """A context that measures the most bytes beyond those at its start: of the device, on the CPU of the process.

    They stay None for a device that nothing counts, for a measurement ends no work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None
        own = getattr(torch, device.type, None)
        self.counter = own if hasattr(own, "max_memory_allocated") else None
        self.look = LOOKS.get(device.type)
        self.ended = threading.Event()

    def __enter__(self) -> PeakMemory:
        if self.counter is not None:
            self.start = self.counter.memory_allocated(self.device)
            self.counter.reset_peak_memory_stats(self.device)
        elif self.look is not None:
            self.start, self.bytes = self.look(), 0
            self.watcher = threading.Thread(target=self.watch, daemon=True)
            self.watcher.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.counter is not None:
            self.bytes = max(0, self.counter.max_memory_allocated(self.device) - self.start)
        elif self.look is not None:
            self.ended.set()
            self.watcher.join()

    def watch(self) -> None:
        assert self.look is not None and self.bytes is not None
        while not self.ended.wait(SECONDS):
            self.bytes = max(self.bytes, self.look() - self.start)
