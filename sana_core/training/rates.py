"""The learning rate of each step."""

from __future__ import annotations

import math

from .settings import Phase


def learning_rate(phase: Phase, step: int, total: int) -> float:
    """Return the rate of a phase's step, counted from 0, of `total`.

    It rises in even steps to `phase.learning_rate` in the first `warmup` steps. Then "constant" stays there, "linear"
    and "cosine" fall to 0 at the phase's end. Nothing scales it by batch or number of devices.
    """
    if step < phase.warmup:
        return phase.learning_rate * (step + 1) / phase.warmup
    done = (step - phase.warmup) / max(1, total - phase.warmup)
    if phase.schedule == "linear":
        return phase.learning_rate * (1 - done)
    if phase.schedule == "cosine":
        return phase.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    return phase.learning_rate
