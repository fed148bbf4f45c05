"""Seconds of one guided step on an accelerator, beside diffusers and beside the floor of the arithmetic: for gpu.py.

SANA 0.6B and 1.6B in bf16 with random weights, one picture, two rows (guidance),
300 tokens. The floor is the step's multiplications at the rate of a large bf16 matrix product in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from diffusers import SanaTransformer2DModel

from sana_core.doctor.arithmetic import transformer as released
from sana_core.doctor.figures import made_as
from sana_core.model.forward import Constants, prepare, velocity
from sana_core.model.known_models import VARIANTS, Architecture

TOKENS = 300
RUNS = 20
# of the matrices whose product says what the card can do
SIDE = 8192


class Step(NamedTuple):
    """What a guided step of one picture is made of."""

    transformer: SanaTransformer2DModel
    x: torch.Tensor
    timestep: torch.Tensor
    embeds: torch.Tensor
    mask: torch.Tensor
    constants: Constants


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


def prepared(name: str, pixels: int, device: torch.device) -> Step:
    """Return a guided step in bf16 of the variant `name`, with random weights."""
    with made_as(torch.bfloat16, device):
        transformer = released(VARIANTS[name].width, VARIANTS[name].layers)
    cells = pixels // 32
    with device:
        x = torch.randn(2, 32, cells, cells, dtype=torch.bfloat16)
        embeds = torch.randn(2, TOKENS, 2304, dtype=torch.bfloat16)
        mask = torch.ones(2, TOKENS, dtype=torch.long)
        timestep = torch.full((2,), 500.0)
    return Step(transformer, x, timestep, embeds, mask, prepare(transformer, embeds, mask, cells, cells))


@torch.inference_mode()
def measure(name: str, pixels: int, rate: float, device: torch.device) -> dict:
    transformer, x, timestep, embeds, mask, constants = prepared(name, pixels, device)
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


@torch.no_grad()
def measure_graph(name: str, pixels: int, device: torch.device) -> dict:
    """Return milliseconds of a step, launched one operation after another and replayed as one CUDA graph, and the
    megabytes that the graph holds. Raises AssertionError unless both have the same bits at other latents and times."""
    transformer, x, timestep, *_, constants = prepared(name, pixels, device)
    own = torch.get_device_module(device)

    def step(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return velocity(transformer, x, timestep, constants)

    # kernels are built and libraries chosen before it is recorded
    step(x, timestep)
    own.empty_cache()
    before = own.memory_reserved(device)
    graphed = torch.cuda.make_graphed_callables(step, (x.clone(), timestep.clone()))
    held = own.memory_reserved(device) - before
    for scale in (1.0, 0.5, 0.1):
        latents, time = x * scale, timestep * scale
        assert torch.equal(graphed(latents, time), step(latents, time)), f"other bits in a graph of {name}"
    found = {"plain": seconds(lambda: step(x, timestep)), "graph": seconds(lambda: graphed(x, timestep))}
    return {
        "milliseconds": {key: round(1000 * value, 2) for key, value in found.items()},
        "graph_of_plain": round(found["graph"] / found["plain"], 3),
        "megabytes_held": round(held / 1e6),
    }
