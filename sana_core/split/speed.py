"""How fast the devices that share an image are, for each has rows in that proportion."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..model.block import feed_forward

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

# half of a step's arithmetic is in the feed-forwards: one of these on so many rows and columns, for so many seconds
SIZE = (16, 64)
SECONDS = 0.3


def device_name(device: torch.device) -> str:
    """Return what devices that are equally fast have in common."""
    return device.type if device.type in ("cpu", "mps") else torch.get_device_module(device).get_device_name(device)


def relative_speeds(devices: Sequence[torch.device], transformers: Sequence[SanaTransformer2DModel]) -> list[float]:
    """Return the speeds of `devices`, each with its copy of the transformer: measured, unless all are of one kind."""
    if len({device_name(device) for device in devices}) == 1:
        return [1.0] * len(devices)
    measured: dict[torch.device, float] = {}
    for device, transformer in zip(devices, transformers, strict=True):
        if device not in measured:
            measured[device] = measure(device, transformer)
    return [measured[device] / devices.count(device) for device in devices]


@torch.no_grad()
def measure(device: torch.device, transformer: SanaTransformer2DModel) -> float:
    """Return the feed-forwards of the first block that `device` makes in a second."""
    block, config = transformer.transformer_blocks[0].ff, transformer.config
    width = config.num_attention_heads * config.attention_head_dim
    dtype = transformer.dtype
    states = torch.zeros(1, SIZE[0] * SIZE[1], width, device=device, dtype=dtype)
    feed_forward(block, states, SIZE)
    wait_for(device)
    began, runs = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        feed_forward(block, states, SIZE)
        wait_for(device)
        runs += 1
    return runs / (time.perf_counter() - began)


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
