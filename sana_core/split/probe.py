"""How fast the accelerators of this machine compute, and hand each other tensors: measured in about a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .cost import GpuSpeed, Link
from .speed import wait_for

SIDE = 4096
LARGE = 64 * 2**20
SECONDS = 0.2


def seconds_of(work: Callable[[], object], devices: list[torch.device]) -> float:
    """Return how long `work` takes, of as many runs as 0.2 seconds hold, ten launched before they are waited for."""
    work()
    for device in devices:
        wait_for(device)
    began, runs = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        for _ in range(10):
            work()
        for device in devices:
            wait_for(device)
        runs += 10
    return (time.perf_counter() - began) / runs


def probe(devices: list[torch.device], dtype: torch.dtype = torch.bfloat16) -> tuple[GpuSpeed, Link]:
    """Return what the first device does in `dtype`, and the link from the second to it."""
    first, second = devices[:2]
    square = torch.ones(SIDE, SIDE, device=first, dtype=dtype)
    tflops = 2 * SIDE**3 / seconds_of(lambda: square @ square, [first]) / 1e12
    own, one = (torch.ones(size, device=first, dtype=torch.uint8) for size in (LARGE, 1))
    launch = seconds_of(lambda: one.clone(), [first])
    # read and written
    bandwidth = 2 * LARGE / max(seconds_of(lambda: own.clone(), [first]) - launch, 1e-9)
    large, small = (torch.ones(size, device=second, dtype=torch.uint8) for size in (LARGE, 1))
    latency = seconds_of(lambda: small.to(first), [first, second])
    copied = seconds_of(lambda: large.to(first), [first, second])
    return GpuSpeed(tflops, bandwidth, launch), Link(LARGE / max(copied - latency, 1e-9), latency)
