"""A run: its phases one after another, with states, validation and pictures on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..runtime.cancellation import Poll
from .learner import Learner, arrange_sums, averaged, restore, take_step, tensors_of, validation_loss, whole_learner
from .ranks import Ranks
from .run_log import append_log
from .runs import (
    State,
    begin_run,
    check_facts,
    check_finite,
    find_states,
    read_state,
    remove_older,
    step_folder,
    write_state,
)
from .schedule import (
    Best,
    Data,
    Group,
    Place,
    advance,
    after_step,
    all_steps_left,
    better,
    is_due,
    learning_rate,
    same_epochs,
    steps_left,
)
from .settings import Phase
from .shard_files import chosen_save, own_values, read_tensors, shard_count, unpacked, whole_values

logger = logging.getLogger(__name__)

# share of a phase by which more was done than its steps say, from which on somebody has added steps
LONGER = 0.05
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
    with ThreadPoolExecutor(1, "sana training state") as behind:
        return run_phases(learner, data, folder, watch, behind)


def run_phases(
    learner: Learner, data: Sequence[Data], folder: Folder, watch: Watch, behind: Executor
) -> tuple[Place, Best | None]:
    """Train as `run` does, with states put in their place by a thread `behind`."""
    settings, ranks = learner.settings, learner.ranks
    completing = Future[None]()
    completing.set_result(None)
    place, best, validated = resume(learner, data, folder)
    place, groups = advance(place, data, learner.settings)
    saved = place.step
    if groups:
        warn_of_rate(settings.phase[place.phase], place, len(groups))
        arrange_sums(learner, data[place.phase], groups[place.position], place)
    digests, total = [own.digest for own in data], place.step + all_steps_left(settings, data, place)

    def settle() -> None:
        """Wait for the last state."""
        ranks.first_does(completing.result)

    def save() -> None:
        nonlocal saved, completing
        settle()
        complete: Callable[[], object] = lambda: None  # noqa: E731
        if place.step != saved:
            tensors, values = tensors_of(learner)
            ranks.each_does(lambda: check_finite(tensors, place.step))
            values, shares = whole_values(learner, values), shard_count(learner)
            state = State(place, tensors, values, dict(folder.facts), digests, best, validated, shares)
            write = partial(export, learner, watch)
            complete = write_state(folder.out, folder.parts, state, write, chosen_save(learner), ranks)
            saved = place.step
        # a run that was killed behind its last state has not removed them
        kept = None if best is None else best.step

        def put() -> None:
            complete()
            remove_older(folder.out, folder.parts, settings.keep, kept)

        if ranks.first:
            completing = behind.submit(put)

    @contextmanager
    def saving() -> Iterator[None]:
        """Save when what is told or asked in this context cancels."""
        try:
            yield
        except BaseException:
            save()
            settle()
            raise

    while True:
        if ranks.size == 1 and completing.done():
            # where a disk is full, say so at once
            settle()
        if validated != place.step and is_due(settings, place, finished=not groups):
            with saving():
                found = validate(learner, data[place.phase], folder, place, watch)
            validated = place.step
            best = best if found is None else better(best, found, place)
        if not groups or place.step % settings.save_every == 0 or (best is not None and best.step == place.step):
            save()
        if not groups:
            settle()
            return place, best if best is not None and best.phase == place.phase else None
        with saving():
            watch.poll()
        line = learn(learner, data[place.phase], groups[place.position], place)
        if ranks.first:
            append_log(folder.out, line)
        place = after_step(settings.phase[place.phase], place, len(groups))
        if place.position == len(groups) or place.phase_step == settings.phase[place.phase].steps:
            place, groups = advance(place, data, learner.settings)
        with saving():
            watch.report({**line, "steps": total})


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
    ended = not advance(place, data, learner.settings)[1]
    return (place, state.best, state.validated) if ended else (place, None, None)


def watch_together(ranks: Ranks, watch: Watch) -> Watch:
    """Return `watch` for several ranks: what one of them cancels, all do, at the same step; the first is told alone."""
    if ranks.size == 1:
        return watch
    failed: list[BaseException] = []

    def report(line: Mapping[str, Any]) -> None:
        try:
            if ranks.first:
                watch.report(line)
        except BaseException as error:
            # the others hear of it when they are asked next
            failed.append(error)

    def poll() -> None:
        error = failed[0] if failed else None
        try:
            watch.poll()
        except BaseException as raised:
            error = raised
        ranks.agree(error)

    return Watch(report, poll, watch.export, watch.preview)


def export_together(ranks: Ranks, export: Export) -> Export:
    """Return `export`, of a learner that `ranks` share: the first writes what it gathers from all."""

    def write(learner: Learner, part: Path) -> None:
        # what a LoRA's file has besides is not the base; a DoRA's needs that to be written for ComfyUI
        alone = learner.settings.method.kind in ("lora", "lokr")
        whole = whole_learner(learner, torch.device("cpu"), trained_alone=alone)
        ranks.first_does(lambda: export(whole, part) if whole is not None else None)

    return write


def preview_together(ranks: Ranks, preview: Preview) -> Preview:
    """Return `preview`, of a learner that `ranks` share: the first draws, on the whole model, which its device holds
    meanwhile."""

    def draw(learner: Learner, step: int) -> None:
        whole = whole_learner(learner, learner.device, trained_alone=False)
        ranks.first_does(lambda: preview(whole, step) if whole is not None else None)

    return draw
