"""The learning rate of each step."""

from __future__ import annotations

import math

from .runs import Place
from .settings import Phase


def learning_rate(phase: Phase, place: Place) -> float:
    """Return the rate of the step at `place` in `phase`, from 0 to `phase.learning_rate`.

    It rises in even steps in the first `warmup` steps. Then "constant" stays and the others fall to 0 with the share of
    the rest that is done, as diffusers.optimization's of those names, but for its "polynomial", which ends at 1e-7.
    Nothing scales it by batch or number of devices.
    """
    if place.phase_step < phase.warmup:
        return phase.learning_rate * (place.phase_step + 1) / phase.warmup
    if phase.schedule == "constant":
        return phase.learning_rate
    if phase.schedule == "linear":
        return phase.learning_rate * (1 - place.done)
    if phase.schedule == "polynomial":
        return phase.learning_rate * (1 - place.done) ** phase.power
    done = place.done
    if phase.schedule == "cosine_with_restarts" and done < 1:
        done = done * phase.cycles % 1
    return phase.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def after_step(phase: Phase, place: Place, count: int) -> Place:
    """Return where `place` in `phase` is after a step, in an epoch of `count` steps.

    The share that is left to do is divided evenly among the steps that are left by now. So the rate goes on from where
    it was when there are more or fewer of them in a resumed run, for another batch, more pictures or epochs.
    """
    done, left = place.done, steps_left(phase, place, count)
    # the last step ends nothing: a finished run that has more to do goes on at the rate that it ended with
    if place.phase_step >= phase.warmup and left > 1:
        done = min(1.0, done + (1 - done) / left)
    return place._replace(step=place.step + 1, phase_step=place.phase_step + 1, position=place.position + 1, done=done)


def steps_left(phase: Phase, place: Place, count: int) -> int:
    """Return how many steps of `phase` are left at `place`, in epochs of `count` steps; 0 behind its end."""
    done, total = place.phase_step, phase.steps
    if total is None:
        done, total = place.epoch * count + place.position, (phase.epochs or 0) * count
    return max(0, total - done)
