"""Seconds of one guided step on an accelerator, beside diffusers and beside the floor of the arithmetic: for gpu.py.

SANA 0.6B and 1.6B in bf16 with random weights, one picture, two rows (guidance),
300 tokens. The floor is the step's multiplications at the rate of a large bf16 matrix product in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from sana_core.doctor.arithmetic import transformer as released
from sana_core.doctor.figures import made_as
from sana_core.model.forward import prepare, velocity
from sana_core.model.known_models import VARIANTS, Architecture

TOKENS = 300
RUNS = 20
# of the matrices whose product says what the card can do
SIDE = 8192


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def seconds(call: Callable[[], torch.Tensor]) -> float:
    """Median seconds of `call`, warm, each run waited for."""
    for _ in range(3):
        call()
    times = []
    for _ in range(RUNS):
        synchronize()
        started = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def peak_rate(device: torch.device) -> float:
    """Multiply-adds a second of a bf16 matrix product."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return SIDE**3 / seconds(lambda: a @ b)


def multiply_adds(model: Architecture, pixels: int, rows: int = 2) -> float:
    """Of one step whose prompt is prepared: projections, attentions and feed-forwards (SANA paper, section 2.2)."""
    width = model.width
    hidden = int(2.5 * width)
    positions = (pixels // 32) ** 2
    block = 4 * width**2  # query, key, value, out
    block += 2 * 33 * width  # linear attention: two products of 32 x 33 a head
    block += 2 * width**2 + 2 * TOKENS * width  # cross-attention
    block += 2 * width * hidden + 9 * 2 * hidden + hidden * width
    return rows * positions * (model.layers * block + 64 * width)


@torch.inference_mode()
def measure(name: str, pixels: int, rate: float, device: torch.device) -> dict:
    with made_as(torch.bfloat16, device):
        transformer = released(VARIANTS[name].width, VARIANTS[name].layers)
    with device:
        cells = pixels // 32
        x = torch.randn(2, 32, cells, cells, dtype=torch.bfloat16)
        embeds = torch.randn(2, TOKENS, 2304, dtype=torch.bfloat16)
        mask = torch.ones(2, TOKENS, dtype=torch.long)
        timestep = torch.full((2,), 500.0)
    constants = prepare(transformer, embeds, mask, cells, cells)
    theirs, ours = (torch.compile(each, mode="reduce-overhead") for each in (transformer, velocity))
    calls = {
        "diffusers_eager": lambda: transformer(x, embeds, timestep, encoder_attention_mask=mask).sample,
        "eager": lambda: velocity(transformer, x, timestep, constants),
        "diffusers_compiled": lambda: theirs(x, embeds, timestep, encoder_attention_mask=mask).sample,
        "compiled": lambda: ours(transformer, x, timestep, constants),
    }
    found = {key: seconds(call) for key, call in calls.items()}
    floor = multiply_adds(VARIANTS[name], pixels) / rate
    torch.compiler.reset()
    return {
        "milliseconds": {key: round(1000 * value, 2) for key, value in found.items()},
        "floor_milliseconds": round(1000 * floor, 2),
        "times_the_floor": {key: round(value / floor, 2) for key, value in found.items()},
        "of_diffusers_eager": {key: round(value / found["diffusers_eager"], 3) for key, value in found.items()},
    }
