"""How long a run's steps take, from the operations in them: predicted, and on no GPU measured.

A GPU is taken to reach REACHED of what it computes at most, as large models do in training; encoding, validation and
what GPUs send each other are not counted.
"""

from __future__ import annotations

import torch

from ..memory import count
from ..model.known_models import MAX_TOKENS, TEXT_WIDTH
from ..split.cost import CARDS, position_flops
from ..split.probe import SIDE, seconds_of
from .memory_model import trained_shapes
from .plan import Base, largest_shape
from .run_log import clock
from .settings import Phase, Settings

REACHED = 0.4
GPUS = {"H100": CARDS["nvlink"].tflops, "RTX 4090": CARDS["pcie"].tflops}


def step_operations(settings: Settings, base: Base, phase: Phase) -> int:
    """Return the operations of a step of `phase`, a product and its sum being two: the forward, once more with gradient
    checkpointing, the gradients of what every layer takes in, and those of the weights that are trained."""
    sizes = [largest_shape(side) for side in (phase.resolution, *phase.resolutions)]
    mean = sum(image_operations(settings, base, width * height) for width, height in sizes) / len(sizes)
    return round(mean * phase.batch * phase.accumulate)


def image_operations(settings: Settings, base: Base, cells: int) -> float:
    """Return the operations of a step for one image of `cells` latents."""
    method, width, layers = settings.method, base.model.width, base.model.layers
    forwards = 2 if settings.checkpoint_gradients else 1
    once = cells * position_flops(width, layers)
    # of the text, whose keys and values training computes each time, nothing below them learns but in a full training
    text = 2 * MAX_TOKENS * (TEXT_WIDTH * width + width**2 + 2 * layers * width**2)
    if method.kind == "full":
        return (forwards + 2) * (once + text)
    if method.kind == "controlnet":
        copied = method.blocks / layers
        return (forwards + 1) * once + forwards * text + (forwards + 2) * copied * (once + text)
    adapter = 2 * cells * count(trained_shapes(base.shapes, method))
    return (forwards + 1) * once + forwards * text + (forwards + 2) * adapter


def duration_lines(settings: Settings, base: Base, cards: int = 1) -> list[str]:
    """Return what the steps of each phase take on `cards` of GPUS."""
    lines = []
    for number, phase in enumerate(settings.phase, 1):
        operations = step_operations(settings, base, phase)
        found = []
        for name, tflops in GPUS.items():
            seconds = operations / (tflops * 1e12 * REACHED * cards)
            whole = "" if phase.steps is None else f", {clock(seconds * phase.steps)} in all"
            found.append(f"{seconds:.2g} s on {f'{cards} {name}s' if cards > 1 else f'one {name}'}{whole}")
        speed = f"at {REACHED * 100:.0f} % of the speed"
        lines.append(f"phase {number}: a step of {operations / 1e12:.3g} TFLOP takes {'; '.join(found)} ({speed})")
    return lines


def measured_seconds(settings: Settings, base: Base, device: torch.device, done: int) -> float:
    """Return how long the steps after the first `done` take on `device`, whose speed is measured in half a second."""
    square = torch.ones(SIDE, SIDE, device=device, dtype=getattr(torch, settings.dtype))
    reached = REACHED * 2 * SIDE**3 / seconds_of(lambda: square @ square, [device])
    seconds = 0.0
    for phase in settings.phase:
        left = max(0, (phase.steps or 0) - done)
        done = max(0, done - (phase.steps or 0))
        seconds += left * step_operations(settings, base, phase) / reached
    return seconds
