"""Measures how fast devices compute and copy tensors to each other. Takes about a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..model.block import feed_forward
from ..model.forward import prepare, velocity
from ..runtime.accelerator import synchronize
from .cost import BLOCK, OUTSIDE, GpuSpeed, Link

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

# Rows and columns of the feed-forward that is measured, and seconds of the measurement. Half of a step's arithmetic is
# in the feed-forwards.
SIZE, FEED_FORWARD_SECONDS = (16, 64), 0.3
# Side of the square matrices and bytes of the copy that are measured, and seconds of each measurement.
SIDE, LARGE, SECONDS = 4096, 64 * 2**20, 0.2


def device_name(device: torch.device) -> str:
    """Return the name of the kind of device. Devices with the same name count as equally fast."""
    return device.type if device.type in ("cpu", "mps") else torch.get_device_module(device).get_device_name(device)


def relative_speeds(devices: Sequence[torch.device], transformers: Sequence[SanaTransformer2DModel]) -> list[float]:
    """Return the speeds of `devices`, each with its copy of the transformer. Measured only if their names differ."""
    if len({device_name(device) for device in devices}) == 1:
        return [1.0] * len(devices)
    measured: dict[torch.device, float] = {}
    for device, transformer in zip(devices, transformers, strict=True):
        if device not in measured:
            measured[device] = measure(device, transformer)
    return [measured[device] / devices.count(device) for device in devices]


@torch.no_grad()
def measure(device: torch.device, transformer: SanaTransformer2DModel) -> float:
    """Return how many feed-forwards of the first block `device` computes in a second."""
    block, config = transformer.transformer_blocks[0].ff, transformer.config
    width = config.num_attention_heads * config.attention_head_dim
    states = torch.zeros(1, SIZE[0] * SIZE[1], width, device=device, dtype=transformer.dtype)
    return 1 / seconds_of(lambda: feed_forward(block, states, SIZE), [device], 1, FEED_FORWARD_SECONDS)


@torch.no_grad()
def launch_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of Python for a launch: the time of a step of a small model, divided by its launches.

    A single operation of torch takes far less than the layers and kernels of a block.
    """
    from diffusers import SanaTransformer2DModel

    heads = {"num_attention_heads": 2, "num_cross_attention_heads": 2}
    width = {"cross_attention_head_dim": 32, "cross_attention_dim": 64, "caption_channels": 64}
    model = SanaTransformer2DModel(num_layers=2, attention_head_dim=32, **heads, **width)
    # The method of diffusers logs a warning.
    torch.nn.Module.to(model, device, dtype)
    side = 2
    embeds, x = (torch.ones(shape, device=device, dtype=dtype) for shape in ((1, 8, 64), (1, 32, side, side)))
    constants = prepare(model, embeds, torch.ones(1, 8, device=device), side, side)
    timestep = torch.ones(1, device=device)
    return seconds_of(lambda: velocity(model, x, timestep, constants), [device]) / (OUTSIDE + 2 * BLOCK)


def probe(devices: list[torch.device], dtype: torch.dtype = torch.bfloat16) -> tuple[GpuSpeed, Link]:
    """Return the speed of the first device in `dtype`, and the link from the second device to it.

    The bandwidth is the one of a copy. The kernels between the products reach less: 0.39 of it on an H100.
    """
    first, second = devices[:2]
    square = torch.ones(SIDE, SIDE, device=first, dtype=dtype)
    tflops = 2 * SIDE**3 / seconds_of(lambda: square @ square, [first]) / 1e12
    block, byte = (torch.ones(size, device=first, dtype=torch.uint8) for size in (LARGE, 1))
    # A copy reads and writes.
    bandwidth = (
        2 * LARGE / max(seconds_of(lambda: block.clone(), [first]) - seconds_of(lambda: byte.clone(), [first]), 1e-9)
    )
    large, small = (torch.ones(size, device=second, dtype=torch.uint8) for size in (LARGE, 1))
    latency = seconds_of(lambda: small.to(first), [first, second])
    copied = seconds_of(lambda: large.to(first), [first, second])
    return GpuSpeed(tflops, bandwidth, launch_seconds(first, dtype)), Link(LARGE / max(copied - latency, 1e-9), latency)


def seconds_of(
    work: Callable[[], object], devices: list[torch.device], launches: int = 10, seconds: float = SECONDS
) -> float:
    """Return the mean seconds of `work` over about `seconds`. It waits for the devices after each `launches` calls."""
    work()
    synchronize_all(devices)
    began, runs = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(launches):
            work()
        synchronize_all(devices)
        runs += launches
    return (time.perf_counter() - began) / runs


def synchronize_all(devices: list[torch.device]) -> None:
    for device in devices:
        synchronize(device)
