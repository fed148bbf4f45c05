"""Seconds and peak memory of text, step and decode at released shapes.

They stand beside what the plan predicts, and beside diffusers on the same device. Random weights take as long as any.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..checkpoints.files import Json
from ..decode import DecodeOptions, decode_into
from ..decode.device_memory import PeakMemory
from ..memory import INSTRUCTION_TOKENS, plan_memory
from ..model.forward import prepare, velocity
from ..model.known_models import MAX_TOKENS, TEXT_WIDTH, VARIANTS
from ..model.latents import CHANNELS, DOWNSCALE
from ..model.layers import arrange_convolutions, join_projections
from ..runtime.accelerator import has_bf16
from .arithmetic import noise, release, transformer
from .machine import named
from .report import Report

SECTION = "Seconds and memory"
# the error of a prediction from which on the report asks to be sent
NEAR = 0.1
# of a step and of a text, whose median counts
RUNS = 3
# by whether there is an accelerator: the variants and pixels of steps, and pixels of decodes
STEPS = {False: (("0.6B", 512),), True: (("1.6B", 1024), ("0.6B", 1024), ("1.6B", 4096))}
DECODES = {False: (512,), True: (1024, 4096)}


def measure(report: Report, device: torch.device) -> None:
    """Add lines, and figures for benchmarks/, on what `device` takes for text, step and decode."""
    accelerator = device.type != "cpu"
    dtype = torch.bfloat16 if has_bf16(device) else torch.float16 if accelerator else torch.float32
    if accelerator:
        with report.checking(SECTION, "text"):
            measure_text(report, device, dtype)
        release()
    for variant, pixels in STEPS[accelerator]:
        what = f"step, {variant}, {pixels} px"
        if not report.late(SECTION, what):
            with report.checking(SECTION, what):
                measure_step(report, device, dtype, variant, pixels)
            release()
    for pixels in DECODES[accelerator]:
        if not report.late(SECTION, f"decode, {pixels} px"):
            with report.checking(SECTION, f"decode, {pixels} px"):
                measure_decode(report, device, dtype, pixels)
            release()


def add_figures(report: Report, what: str, found: Json, device: torch.device) -> None:
    """Add a line on seconds, diffusers' seconds, and bytes taken and predicted.

    A plan that was wrong is a fault; not on a CPU, where all that the process holds is counted, as much as its
    allocator has kept.
    """
    report.figures[what] = found
    words = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in found.items() if value is not None]
    taken, predicted = found["gigabytes"], found["predicted_gigabytes"]
    if taken is None or device.type == "cpu":
        report.note(SECTION, what, ", ".join(words))
        return
    right = abs(taken / predicted - 1) <= NEAR
    if not right:
        words.append("the plan was wrong: please send this report")
    report.judge(SECTION, what, f"within {NEAR:.0%} of the plan", ", ".join(words), right)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of `call`, warm, each run waited for."""
    times = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


@contextmanager
def made_as(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """A context in which modules are made in `dtype` on `device`, never in float32 first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def measure_text(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    from transformers import Gemma2Config, Gemma2Model

    # whose defaults are those of Gemma-2-2b
    with made_as(dtype, device):
        model = Gemma2Model(Gemma2Config(attn_implementation="eager"))
    ids = torch.ones(1, MAX_TOKENS + INSTRUCTION_TOKENS, dtype=torch.long, device=device)
    with PeakMemory(device) as peak:
        taken = seconds(lambda: model(ids), device)
    plan = plan_memory("1.6B", 1024, 1024)["text"]["activations"]
    found = {"seconds": taken, "gigabytes": gigabytes(peak.bytes), "predicted_gigabytes": gigabytes(plan)}
    add_figures(report, f"text, {named(dtype)}", found, device)


def gigabytes(count: int | None) -> float | None:
    return None if count is None else count / 1e9


@torch.no_grad()
def measure_step(report: Report, device: torch.device, dtype: torch.dtype, variant: str, pixels: int) -> None:
    """A call with prompt and negative prompt."""
    with made_as(dtype, device):
        model = transformer(VARIANTS[variant].width, VARIANTS[variant].layers)
    join_projections(model)
    cells = pixels // DOWNSCALE
    x, embeds = (
        noise(2, *shape, seed=0).to(device, dtype) for shape in ((CHANNELS, cells, cells), (MAX_TOKENS, TEXT_WIDTH))
    )
    mask, timestep = torch.ones(2, MAX_TOKENS, device=device), torch.full((2,), 500.0, device=device)
    with PeakMemory(device) as peak:
        constants = prepare(model, embeds, mask, cells, cells)
        taken = seconds(lambda: velocity(model, x, timestep, constants), device)
    theirs = seconds(lambda: model(x, embeds, timestep, encoder_attention_mask=mask), device)
    kind = "bfloat16" if dtype.itemsize == 2 else "float32"
    plan = plan_memory(variant, pixels, pixels, 1, kind, device.type != "cpu")["transformer"]["activations"]
    found = {"seconds": taken, "diffusers_seconds": theirs, "gigabytes": gigabytes(peak.bytes)}
    what = f"step, {variant}, {pixels} px, {named(dtype)}"
    add_figures(report, what, found | {"predicted_gigabytes": gigabytes(plan)}, device)


@torch.no_grad()
def measure_decode(report: Report, device: torch.device, dtype: torch.dtype, pixels: int) -> None:
    """As SANA Decode does it, beside diffusers' tiles."""
    from diffusers import AutoencoderDC

    # the other sizes of the published one are the library's defaults
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    # float16 overflows in it
    wide = torch.bfloat16 if dtype.itemsize == 2 else dtype
    with made_as(wide, device):
        model = AutoencoderDC(
            encoder_block_types=blocks, decoder_block_types=blocks, upsample_block_type="interpolate"
        ).requires_grad_(False)
    arrange_convolutions(model)
    cells = pixels // DOWNSCALE
    latents, out = noise(1, CHANNELS, cells, cells, seed=0).to(device, wide), torch.empty(1, 3, pixels, pixels)
    own: Json = {}
    decode_into(out, model, latents, DecodeOptions(poll=report.poll), own)
    model.enable_tiling()
    started = time.perf_counter()
    with PeakMemory(device) as peak:
        model.decode(latents).sample.cpu()
    found = {
        "seconds": own["seconds"],
        "diffusers_seconds": time.perf_counter() - started,
        "gigabytes": gigabytes(own["peak_bytes"]),
        "predicted_gigabytes": gigabytes(own["predicted_bytes"]),
        "diffusers_gigabytes": gigabytes(peak.bytes),
    }
    add_figures(report, f"decode, {pixels} px, {named(wide)}", found, device)
