"""A run: its phases one after another, with states, validation and pictures on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..runtime.cancellation import Poll
from .buckets import plan_epoch
from .learner import (
    Data,
    Learner,
    arrange_sums,
    averaged,
    restore,
    same_epochs,
    take_step,
    tensors_of,
    validation_loss,
)
from .rates import after_step, learning_rate, steps_left
from .run_log import append_log
from .runs import (
    Best,
    Place,
    State,
    begin_run,
    better,
    check_facts,
    check_finite,
    find_states,
    read_state,
    remove_older,
    step_folder,
    write_state,
)
from .settings import Phase
from .shard_files import chosen_save, own_values, read_tensors, shard_count, unpacked, whole_values
from .variants import choose

logger = logging.getLogger(__name__)

# share of a phase by which more was done than its steps say, from which on somebody has added steps
LONGER = 0.05
# indices of samples, in the batches of one step
Group = list[list[int]]
# called with the line of the log of each step and validation
Report = Callable[[Mapping[str, Any]], None]
# writes what others load into a folder
Export = Callable[[Learner, Path], None]
# draws and keeps the validation's pictures, for the step that it is given
Preview = Callable[[Learner, int], None]


class Folder(NamedTuple):
    """Where a run writes: its folder, one of the same disk for what is not finished, and what may not change in it."""

    out: Path
    parts: Path
    facts: Mapping[str, Any]


class Watch(NamedTuple):
    """What a run tells and asks on its way."""

    report: Report
    poll: Poll
    export: Export
    preview: Preview | None = None


def run(learner: Learner, data: Sequence[Data], folder: Folder, watch: Watch) -> tuple[Place, Best | None]:
    """Train `learner` from the newest state in `folder` to the end of the last phase; return where it ended, and the
    best validation of that phase where there was one.

    `data` is that of each phase. States are written every `save_every` steps, for the best validation, at the end, and
    when `watch` cancels by raising. Raises InputError where the folder has another run, CheckpointError for a
    broken state, TrainingError for a loss that is not finite, and OSError where a state cannot be written.
    """
    settings, ranks = learner.settings, learner.ranks
    place, best, validated = resume(learner, data, folder)
    place, groups = advance(place, data, learner)
    saved = place.step
    if groups:
        warn_of_rate(settings.phase[place.phase], place, len(groups))
        arrange_sums(learner, data[place.phase], groups[place.position], place)
    digests, total = [own.digest for own in data], place.step + all_steps_left(learner, data, place)

    def save() -> None:
        nonlocal saved
        if place.step != saved:
            tensors, values = tensors_of(learner)
            ranks.each_does(lambda: check_finite(tensors, place.step))
            values, shares = whole_values(learner, values), shard_count(learner)
            state = State(place, tensors, values, dict(folder.facts), digests, best, validated, shares)
            save_tensors = chosen_save(learner)
            write_state(folder.out, folder.parts, state, lambda part: export(learner, watch, part), save_tensors, ranks)
            saved = place.step
        # a run that was killed behind its last state has not removed them
        kept = None if best is None else best.step
        ranks.first_does(lambda: remove_older(folder.out, folder.parts, settings.keep, kept))

    @contextmanager
    def saving() -> Iterator[None]:
        """Save when what is told or asked in this context cancels."""
        try:
            yield
        except BaseException:
            save()
            raise

    while True:
        if validated != place.step and is_due(learner, place, finished=not groups):
            with saving():
                found = validate(learner, data[place.phase], folder, place, watch)
            validated = place.step
            best = best if found is None else better(best, found, place)
        if not groups or place.step % settings.save_every == 0 or (best is not None and best.step == place.step):
            save()
        if not groups:
            return place, best if best is not None and best.phase == place.phase else None
        with saving():
            watch.poll()
        line = learn(learner, data[place.phase], groups[place.position], place)
        if ranks.first:
            append_log(folder.out, line)
        place = after_step(settings.phase[place.phase], place, len(groups))
        if place.position == len(groups) or place.phase_step == settings.phase[place.phase].steps:
            place, groups = advance(place, data, learner)
        with saving():
            watch.report({**line, "steps": total})


def warn_of_rate(phase: Phase, place: Place, count: int) -> None:
    """Log where the learning rate of a phase has fallen before it was made longer."""
    behind = max(0, place.phase_step - phase.warmup)
    share = behind / (behind + steps_left(phase, place, count))
    if phase.schedule != "constant" and place.done - share > LONGER:
        logger.warning(
            "phase %d has more steps than it had, and continues from its learning rate of %.2g; for a higher one set "
            "schedule to constant, or add a [[phase]]",
            place.phase + 1,
            learning_rate(phase, place),
        )


def learn(learner: Learner, data: Data, group: Group, place: Place) -> dict[str, Any]:
    """Take the step at `place`, and return its line of the log."""
    rate = learning_rate(learner.settings.phase[place.phase], place)
    began = time.perf_counter()
    loss, norm = take_step(learner, data, group, place, rate)
    return {
        "step": place.step + 1,
        "phase": place.phase + 1,
        "epoch": place.epoch + 1,
        "loss": loss,
        "learning_rate": rate,
        "grad_norm": norm,
        "pictures": sum(map(len, group)),
        "seconds": round(time.perf_counter() - began, 4),
    }


def is_due(learner: Learner, place: Place, finished: bool) -> bool:
    """Whether there is a validation at `place`: before the first step, every `every` steps, and at the end."""
    every = learner.settings.validation.every
    return bool(every) and (place.step % every == 0 or finished)


def validate(learner: Learner, data: Data, folder: Folder, place: Place, watch: Watch) -> float | None:
    """Return the validation loss, None without held-out pictures, and draw the validation's pictures."""
    found = None
    with averaged(learner):
        if data.held_out:
            found = validation_loss(learner, data, watch.poll)
            line = {"step": place.step, "validation_loss": found}
            if learner.ranks.first:
                append_log(folder.out, line)
            watch.report(line)
        if watch.preview is not None and learner.settings.validation.prompts:
            watch.preview(learner, place.step)
    return found


def export(learner: Learner, watch: Watch, part: Path) -> None:
    with averaged(learner):
        watch.export(learner, part)


def resume(learner: Learner, data: Sequence[Data], folder: Folder) -> tuple[Place, Best | None, int | None]:
    """Bring `learner` to the newest state in `folder`; return its place, the best validation, and the last one's step.

    An epoch whose pictures or batches are others by now begins again.
    """
    ranks = learner.ranks
    # what the first rank sees of a network's folder decides
    ranks.first_does(lambda: begin_run(folder.out, folder.parts, folder.facts))
    steps = ranks.from_first([step for step, _ in find_states(folder.out)])
    if not steps:
        return Place(), None, None
    newest = step_folder(folder.out, steps[-1])
    state = ranks.each_does(lambda: read_state(newest, partial(read_tensors, learner), ranks))
    check_facts(folder.facts, state.facts, folder.out)
    tensors = unpacked(state.tensors, state.values)
    restore(learner, tensors, own_values(learner, state.values, tensors), newest.name)
    place = state.place
    if same_epochs(state.data[place.phase], data[place.phase].digest):
        return place, state.best, state.validated
    if place.position:
        logger.warning("images or batches of phase %d have changed, so its epoch begins again", place.phase + 1)
    place = place._replace(position=0)
    # what has ended stays as it is; else the validation's may be others too
    ended = not advance(place, data, learner)[1]
    return (place, state.best, state.validated) if ended else (place, None, None)


def advance(place: Place, data: Sequence[Data], learner: Learner) -> tuple[Place, list[Group]]:
    """Return where the next step is, and the groups of its epoch; none when the last phase is at its end."""
    settings = learner.settings
    while True:
        phase = settings.phase[place.phase]
        groups = plan(phase, data[place.phase], settings.seed + place.phase, place.epoch)
        if place.position >= len(groups):
            place = place._replace(epoch=place.epoch + 1, position=0)
            groups = plan(phase, data[place.phase], settings.seed + place.phase, place.epoch)
        if place.phase_step < phase.steps if phase.steps is not None else place.epoch < (phase.epochs or 0):
            return place, groups
        if place.phase + 1 == len(settings.phase):
            return place, []
        place = Place(place.step, place.phase + 1)


def plan(phase: Phase, data: Data, seed: int, epoch: int) -> list[Group]:
    """Return the groups of batches of an epoch, one for each step."""
    buckets = [data.buckets[index] for index in data.training]
    batches = plan_epoch(buckets, phase.batch, seed, epoch)
    batches = [[data.training[index] for index in batch] for batch in batches]
    # after the batches are made, for all variants of an image have its shape
    batches = [[choose(data.samples, data.variants.get(each, [each]), seed, epoch) for each in own] for own in batches]
    return [batches[start : start + phase.accumulate] for start in range(0, len(batches), phase.accumulate)]


def all_steps_left(learner: Learner, data: Sequence[Data], place: Place) -> int:
    """Return how many steps there are from `place` to the end."""
    left = 0
    for number in range(place.phase, len(data)):
        phase = learner.settings.phase[number]
        # every epoch has as many, for the pictures are the same
        count = len(plan(phase, data[number], learner.settings.seed, 0))
        left += steps_left(phase, place if number == place.phase else Place(), count)
    return left
