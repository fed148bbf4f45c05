"""Repeats the step of a sampling from a recording, where the host limits the speed.

The recording is a CUDA graph, which launches the kernels of the step again without the work of the host.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from ..errors import first_line
from ..runtime.accelerator import ALLOCATOR
from ..runtime.text import get_logger

logger = get_logger(__name__)

Work = Callable[[], torch.Tensor]
# A device that waits for the launches of the host takes as long as the host, plus timers and the last kernels.
TOLERANCE = 1.2


class Recording(NamedTuple):
    replay: Callable[[], object]
    # The result of the function. Each replay overwrites it.
    out: torch.Tensor


class Recorder:
    """Runs and records functions on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Milliseconds that the host took for the last `run`.
        self.host_time = 0.0

    def run(self, work: Work) -> torch.Tensor:
        """Return `work()`, and measure it without waiting for the device."""
        stream, started = torch.cuda.current_stream(self.device), time.perf_counter()
        self.begin.record(stream)
        out = work()
        self.end.record(stream)
        self.host_time = 1000 * (time.perf_counter() - started)
        return out

    def waits_for_host(self) -> bool:
        """Whether the device did not take longer than the host for the last `run`. False if it has not ended yet."""
        return self.end.query() and self.begin.elapsed_time(self.end) <= TOLERANCE * self.host_time

    def record(self, work: Work) -> Recording | None:
        """Record `work`, which must not read values on the host. None: another thread records or frees memory now."""
        # Not blocking, because a device that hangs keeps the lock.
        if not ALLOCATOR.acquire(blocking=False):
            return None
        try:
            return self.capture(work)
        finally:
            ALLOCATOR.release()

    def capture(self, work: Work) -> Recording:
        stream, current = side_stream(self.device), torch.cuda.current_stream(self.device)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # cuBLAS keeps a workspace for each stream, which must not be in the memory of the recording.
            work()
            # Free the cached memory of the steps before, because the recording allocates the same amount.
            torch.cuda.empty_cache()
            try:
                # In this mode, calls of other threads cannot make the recording fail.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    out = work()
                finally:
                    graph.capture_end()
            except BaseException:
                # After some errors torch's allocator would still wait for the end of the recording, and refuse to free
                # memory. These functions raise if it has ended.
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self.device.index, pool)
                    torch._C._cuda_releasePool(self.device.index, pool)
                raise
        current.wait_stream(stream)
        return Recording(graph.replay, out)


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for recordings. It is always the same, because libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


def recorder_for(device: torch.device) -> Recorder | None:
    """Return a recorder, or None for CPUs, AMD, other allocators than torch's own, and torch before 2.8."""
    if torch.get_device_module(device) is not torch.cuda or torch.version.hip is not None:
        return None
    can_record = torch.cuda.get_allocator_backend() == "native" and hasattr(torch._C, "_cuda_endAllocateToPool")
    return Recorder(device) if can_record else None


# Calls that build kernels and allocate workspaces. The last one is measured.
EAGER_CALLS = 2


class StepGraph:
    """Computes the steps of one sampling, in which only the inputs change.

    `counts` receives how many times a step was "recorded" and "replayed", and how many recordings "failed".
    """

    def __init__(self, recorder: Recorder, counts: Counter[str]) -> None:
        self.recorder, self.counts, self.refused = recorder, counts, False
        self.key: object = None
        # Number of calls with this key.
        self.calls = 0
        self.recording: Recording | None = None
        self.inputs: list[torch.Tensor] = []

    def __call__(self, key: object, work: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return `work(*inputs)`, which is valid until the next call. Equal keys mean the same `work`."""
        if key != self.key:
            # There is one recording at a time, because it keeps the memory of a whole step.
            self.key, self.calls, self.recording = key, 0, None
        self.calls += 1
        if self.recording is None and self.calls > EAGER_CALLS and not self.refused and self.recorder.waits_for_host():
            self.record(work, inputs)
        if self.recording is None:
            return self.recorder.run(partial(work, *inputs))
        for recorded, new in zip(self.inputs, inputs, strict=True):
            recorded.copy_(new)
        self.recording.replay()
        self.counts["replayed"] += 1
        return self.recording.out

    def record(self, work: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
        try:
            self.inputs = [part.clone() for part in inputs]
            self.recording = self.recorder.record(partial(work, *self.inputs))
            self.counts["recorded"] += self.recording is not None
        except Exception as error:
            # If the device has failed, it fails again when it computes the step.
            self.refused = True
            self.counts["failed"] += 1
            if self.counts["failed"] == 1:
                logger.warning("%s: steps are computed without a CUDA graph (%s)", inputs[0].device, first_line(error))
