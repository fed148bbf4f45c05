"""Where a run stands and what comes next: the batches of each epoch in their order, the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..checkpoints.fingerprint import digest_json
from ..runtime.checks import check_whole
from .cache import Cache, Stream
from .dataset import Sample
from .images import Bucket
from .loss import CHOICE, generator
from .settings import Phase, TrainingSettings

# indices of samples, in the batches of one step
Group = list[list[int]]


class TrainProgress(NamedTuple):
    """Where a run stands, after `step` steps: in its phases, `position` steps of that epoch done, and the share `done`
    of what follows the phase's warmup."""

    step: int = 0
    phase: int = 0
    phase_step: int = 0
    epoch: int = 0
    position: int = 0
    done: float = 0.0


class Best(NamedTuple):
    """The lowest validation loss of a phase, the step that it was measured at, 0 while only what is not trained has
    been, and the phase's first one."""

    loss: float
    step: int
    phase: int
    first: float


def better(best: Best | None, loss: float, progress: TrainProgress) -> Best:
    """Return the best validation after one at `progress`; those of another phase are of other images."""
    if best is None or best.phase != progress.phase:
        return Best(loss, progress.step, progress.phase, loss)
    return best._replace(loss=loss, step=progress.step) if not best.step or loss < best.loss else best


class Data(NamedTuple):
    """The images of a phase, by their indices in `samples`, which are also those of the cache."""

    samples: Sequence[Sample]
    cache: Cache | Stream
    training: list[int]
    held_out: list[int]
    buckets: list[Bucket]  # of each sample
    digest: str  # of `digest_data`
    variants: dict[int, list[int]] = {}  # noqa: RUF012  # of each image, of which an epoch learns one, by the first


def digest_data(order: object, contents: object) -> str:
    """Return a digest of the `order` in which samples are learned, and of their `contents`, None where nobody looks."""
    return "-".join(digest_json(each) if each is not None else "" for each in (order, contents))


def same_epochs(first: str, second: str) -> bool:
    """Whether digests of `digest_data` are of the same epochs, as far as both know their contents."""
    return all(
        one == other or not (one and other) for one, other in zip(first.split("-"), second.split("-"), strict=True)
    )


def is_due(settings: TrainingSettings, progress: TrainProgress, finished: bool) -> bool:
    """Whether there is a validation at `progress`: before the first step, every `every` steps, and at the end."""
    every = settings.validation.every
    return bool(every) and (progress.step % every == 0 or finished)


def advance(
    progress: TrainProgress, data: Sequence[Data], settings: TrainingSettings
) -> tuple[TrainProgress, list[Group]]:
    """Return where the next step is, and the groups of its epoch; none when the last phase is at its end."""
    while True:
        phase = settings.phase[progress.phase]
        groups = plan(phase, data[progress.phase], settings.seed + progress.phase, progress.epoch)
        if progress.position >= len(groups):
            progress = progress._replace(epoch=progress.epoch + 1, position=0)
            groups = plan(phase, data[progress.phase], settings.seed + progress.phase, progress.epoch)
        if progress.phase_step < phase.steps if phase.steps is not None else progress.epoch < (phase.epochs or 0):
            return progress, groups
        if progress.phase + 1 == len(settings.phase):
            return progress, []
        progress = TrainProgress(progress.step, progress.phase + 1)


def plan(phase: Phase, data: Data, seed: int, epoch: int) -> list[Group]:
    """Return the groups of batches of an epoch, one for each step."""
    buckets = [data.buckets[index] for index in data.training]
    batches = plan_epoch(buckets, phase.batch, seed, epoch)
    batches = [[data.training[index] for index in batch] for batch in batches]
    # after the batches are made, for all variants of an image have its shape
    batches = [[choose(data.samples, data.variants.get(each, [each]), seed, epoch) for each in own] for own in batches]
    return [batches[start : start + phase.accumulate] for start in range(0, len(batches), phase.accumulate)]


def all_steps_left(settings: TrainingSettings, data: Sequence[Data], progress: TrainProgress) -> int:
    """Return how many steps there are from `progress` to the end."""
    left = 0
    for number in range(progress.phase, len(data)):
        phase = settings.phase[number]
        # every epoch has as many, for the images are the same
        count = len(plan(phase, data[number], settings.seed, 0))
        left += steps_left(phase, progress if number == progress.phase else TrainProgress(), count)
    return left


def choose(samples: Sequence[Sample], indices: Sequence[int], seed: int, epoch: int) -> int:
    """Return which of the variants at `indices` the epoch learns."""
    if len(indices) == 1:
        return indices[0]
    bounds = np.cumsum([samples[index].share for index in indices])
    drawn = generator(CHOICE, (seed, epoch, indices[0])).random() * bounds[-1]
    return indices[int(np.searchsorted(bounds[:-1], drawn, side="right"))]


def plan_epoch(buckets: Sequence[Bucket], batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of an epoch: indices of samples, each once, of one bucket each, in a random order.

    `buckets` has the bucket of each sample. The order depends on `seed` and `epoch` alone. The last batch of a bucket
    may be smaller. Raises InputError for a batch below 1.
    """
    check_whole("batch", batch, 1, 1_000_000)
    # raw random values are the same in every version of numpy. With a spawn key they are not those of a sample, whose
    # key ends with an index
    rng = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    order = np.argsort(rng.random_raw(len(buckets)), kind="stable")
    members: dict[Bucket, list[int]] = {}
    for index in order.tolist():
        members.setdefault(buckets[index], []).append(index)
    batches = [
        indices[start : start + batch] for indices in members.values() for start in range(0, len(indices), batch)
    ]
    turns = np.argsort(rng.random_raw(len(batches)), kind="stable")
    return [batches[turn] for turn in turns.tolist()]


def learning_rate(phase: Phase, progress: TrainProgress) -> float:
    """Return the rate of the step at `progress` in `phase`, from 0 to `phase.learning_rate`.

    It rises in even steps in the first `warmup` steps. Then "constant" stays and the others fall to 0 with the share of
    the rest that is done, as diffusers.optimization's of those names, but for its "polynomial", which ends at 1e-7.
    Nothing scales it by batch or number of devices.
    """
    if progress.phase_step < phase.warmup:
        return phase.learning_rate * (progress.phase_step + 1) / phase.warmup
    if phase.schedule == "constant":
        return phase.learning_rate
    if phase.schedule == "linear":
        return phase.learning_rate * (1 - progress.done)
    if phase.schedule == "polynomial":
        return phase.learning_rate * (1 - progress.done) ** phase.power
    done = progress.done
    if phase.schedule == "cosine_with_restarts" and done < 1:
        done = done * phase.cycles % 1
    return phase.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def after_step(phase: Phase, progress: TrainProgress, count: int) -> TrainProgress:
    """Return where `progress` in `phase` is after a step, in an epoch of `count` steps.

    The share that is left to do is divided evenly among the steps that are left by now. So the rate continues where it
    was when there are more or fewer of them in a resumed run, for another batch, more images or epochs.
    """
    done, left = progress.done, steps_left(phase, progress, count)
    # the last step ends nothing: a finished run that has more to do continues at the rate that it ended with
    if progress.phase_step >= phase.warmup and left > 1:
        done = min(1.0, done + (1 - done) / left)
    return progress._replace(
        step=progress.step + 1, phase_step=progress.phase_step + 1, position=progress.position + 1, done=done
    )


def steps_left(phase: Phase, progress: TrainProgress, count: int) -> int:
    """Return how many steps of `phase` are left at `progress`, in epochs of `count` steps; 0 behind its end."""
    done, total = progress.phase_step, phase.steps
    if total is None:
        done, total = progress.epoch * count + progress.position, (phase.epochs or 0) * count
    return max(0, total - done)
