"""A run: its phases one after another, with states, validation and images on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import NamedTuple

import torch

from ..runtime.cancellation import Poll
from ..runtime.text import Json
from .optimizers import has_failed_restore
from .ranks import Ranks
from .run_log import Line, RunLog
from .runs import (
    SavedState,
    begin_run,
    check_config,
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
    TrainProgress,
    advance,
    after_step,
    all_steps_left,
    better,
    is_due,
    learning_rate,
    same_epochs,
    steps_left,
)
from .settings import Phase, TrainingSettings
from .state_files import chosen_save, read_tensors, restore, tensors_of
from .train_state import (
    TrainState,
    apply_gradients,
    averaged,
    compute_gradients,
    drop_step,
    gather_weights,
    validation_loss,
    warm_up_ddp_buckets,
)

logger = logging.getLogger(__name__)

# share of a phase by which more was done than its steps say, from which on somebody has added steps
LONGER = 0.05
# called with the line of the log of each step and validation
Report = Callable[[Line], None]
# writes what others load into a folder
Export = Callable[[TrainState, Path], None]
# makes and keeps the validation's images, for the step that it is given
Preview = Callable[[TrainState, int], None]


class RunDir(NamedTuple):
    """Where a run writes: its folder, one of the same disk for what is not finished, and what may not change in it."""

    out: Path
    parts: Path
    config: Json


class Callbacks(NamedTuple):
    """What a run tells and asks on its way. `export` and `preview` are called on the first rank, with whole weights."""

    report: Report
    poll: Poll
    export: Export
    preview: Preview | None = None


@dataclass
class Run:
    """A run as it stands between two steps."""

    state: TrainState
    data: Sequence[Data]  # of each phase
    folder: RunDir
    callbacks: Callbacks
    behind: Executor  # of the thread that puts states in their place
    log: RunLog
    progress: TrainProgress = TrainProgress()
    best: Best | None = None
    validated: int | None = None  # the step of the last validation
    groups: Sequence[Group] = ()  # of the epoch, none at the end of the last phase
    saved: int = 0  # the step of the last state
    completing: Future[None] | None = None  # of that, until it is in its place

    @property
    def settings(self) -> TrainingSettings:
        return self.state.settings

    @property
    def ranks(self) -> Ranks:
        return self.state.ranks

    @property
    def phase(self) -> Phase:
        return self.settings.phase[self.progress.phase]

    @property
    def best_of_phase(self) -> Best | None:
        return self.best if self.best is not None and self.best.phase == self.progress.phase else None

    def advance(self) -> None:
        """Go to where the next step is, in the next epoch or phase if this one is at its end."""
        self.progress, self.groups = advance(self.progress, self.data, self.settings)

    def is_save_due(self) -> bool:
        step = self.progress.step
        return (
            not self.groups
            or step % self.settings.save_every == 0
            or (self.best is not None and self.best.step == step)
        )


def run(state: TrainState, data: Sequence[Data], folder: RunDir, callbacks: Callbacks) -> Run:
    """Train `state` from the newest saved one in `folder` to the end of the last phase; return the run as it ended.

    `data` is that of each phase. States are saved every `save_every` steps, for the best validation, at the end, and
    when one of `callbacks` cancels by raising. Raises InputError where the folder has another run, CheckpointError for
    a broken state, TrainingError for a loss that is not finite, and OSError where a state cannot be written.
    """
    with ThreadPoolExecutor(1, "sana training state") as behind:
        now = Run(state, data, folder, together(callbacks, state.ranks), behind, RunLog(folder.out))
        try:
            resume(now)
            run_phases(now)
        finally:
            now.log.close()
        return now


def run_phases(now: Run) -> None:
    """Train from where the run stands to the end of the last phase."""
    total = now.progress.step + all_steps_left(now.settings, now.data, now.progress)
    while True:
        if now.ranks.size == 1 and now.completing is not None and now.completing.done():
            # where a disk is full, say so at once
            with saved_when_cancelled(now):
                settle(now)
        with saved_when_cancelled(now):
            validate_if_due(now)
        if now.is_save_due():
            with saved_when_cancelled(now):
                settle(now)
            save(now)
        if not now.groups:
            return settle(now)
        with saved_when_cancelled(now):
            now.callbacks.poll()
        line = learn(now)
        now.ranks.run_on_rank0(partial(now.log.add, line))
        now.progress = after_step(now.phase, now.progress, len(now.groups))
        if now.progress.position == len(now.groups) or now.progress.phase_step == now.phase.steps:
            now.advance()
        with saved_when_cancelled(now):
            now.callbacks.report({**line, "steps": total})


@contextmanager
def saved_when_cancelled(now: Run) -> Iterator[None]:
    """Save the finished steps when a callback in this context cancels, or something fails in it that all ranks know
    of. The context changes no weights, or restores them. After an error while it restores them, nothing is saved.

    A rank that fails alone ends at once, and the others hear of that.
    """
    try:
        yield
    except BaseException as error:
        if has_failed_restore(error):
            logger.error(
                "step %d is not saved, because its weights were not restored after a validation", now.progress.step
            )
        elif now.ranks.all_know(error):
            # The frames of the traceback hold the tensors of the failed step. Saving may need their memory.
            clear_frames(error.__traceback__)
            drop_step(now.state)
            try:
                save(now)
                settle(now)
            except Exception:
                # The error of saving is raised, and this one would be lost.
                logger.error("%s", str(error) or type(error).__name__)
                raise
        raise


def settle(now: Run) -> None:
    """Wait for the last state to be in its place. If that has failed, the error is raised once."""
    completing = now.completing
    try:
        now.ranks.run_on_rank0(lambda: None if completing is None else completing.result())
    except Exception:
        now.completing = None
        if now.best is not None and now.best.step == now.saved:
            # The next validation becomes the best, because the state of this one does not exist.
            now.best, now.validated = now.best._replace(step=0), None
        now.saved = -1
        raise


def save(now: Run) -> None:
    """Save the run's state unless the last one is of this step; a thread gives it its place, and removes those that are
    not kept."""
    state, folder, ranks = now.state, now.folder, now.ranks
    settle(now)
    complete: Callable[[], None] | None = None
    if now.progress.step != now.saved:
        tensors, values = tensors_of(state)
        ranks.run_on_all(partial(check_finite, tensors, now.progress.step))
        digests, shards = [own.digest for own in now.data], state.layout.parts
        saved = SavedState(now.progress, tensors, values, folder.config, digests, now.best, now.validated, shards)
        complete = write_state(folder.out, folder.parts, saved, partial(export, now), chosen_save(state), ranks)
        now.saved = now.progress.step
    # a run that was killed behind its last state has not removed them
    kept = None if now.best is None else now.best.step

    def put() -> None:
        if complete is not None:
            complete()
        try:
            remove_older(folder.out, folder.parts, now.settings.keep, kept)
        except OSError as error:
            logger.warning("older states are not removed now (%s)", error)

    if ranks.first:
        now.completing = now.behind.submit(put)


def export(now: Run, part: Path) -> None:
    """Write what others load into the folder `part`: on the first rank, with what all have gathered."""
    with averaged(now.state):
        # what a LoRA's file has besides is not the base; a DoRA's needs that to be written for ComfyUI
        alone = now.settings.method.kind in ("lora", "lokr")
        whole = gather_weights(now.state, torch.device("cpu"), trained_alone=alone)
        now.ranks.run_on_rank0(lambda: whole and now.callbacks.export(whole, part))


def validate_if_due(now: Run) -> None:
    """Take the validation loss, where images are held out, and make the validation's images."""
    state, step = now.state, now.progress.step
    if now.validated == step or not is_due(now.settings, now.progress, finished=not now.groups):
        return
    data, preview, found = now.data[now.progress.phase], now.callbacks.preview, None
    with averaged(state):
        if data.held_out:
            found = validation_loss(state, data, now.callbacks.poll)
            line: Line = {"step": step, "validation_loss": found}
            now.ranks.run_on_rank0(partial(now.log.add, line))
            now.callbacks.report(line)
        if preview is not None and now.settings.validation.prompts:
            whole = gather_weights(state, state.device, trained_alone=False)
            now.ranks.run_on_rank0(lambda: whole and preview(whole, step))
    now.validated = step
    if found is not None:
        now.best = better(now.best, found, now.progress)


def learn(now: Run) -> Line:
    """Take the next step, and return its line of the log."""
    progress, group = now.progress, now.groups[now.progress.position]
    rate = learning_rate(now.phase, progress)
    began = time.perf_counter()
    with saved_when_cancelled(now):
        loss, norm = compute_gradients(now.state, now.data[progress.phase], group, progress)
    apply_gradients(now.state, progress, rate)
    return {
        "step": progress.step + 1,
        "phase": progress.phase + 1,
        "epoch": progress.epoch + 1,
        "loss": loss,
        "learning_rate": rate,
        "grad_norm": norm,
        "pictures": sum(map(len, group)),
        "seconds": round(time.perf_counter() - began, 4),
    }


def warn_of_rate(phase: Phase, progress: TrainProgress, count: int) -> None:
    """Log where the learning rate of a phase has fallen before it was made longer."""
    behind = max(0, progress.phase_step - phase.warmup)
    share = behind / (behind + steps_left(phase, progress, count))
    if phase.schedule != "constant" and progress.done - share > LONGER:
        logger.warning(
            "phase %d has more steps than it had, and continues from its learning rate of %.2g; for a higher one set "
            "schedule to constant, or add a [[phase]]",
            progress.phase + 1,
            learning_rate(phase, progress),
        )


def resume(now: Run) -> None:
    """Bring the run to the newest state in its folder, and to its next step."""
    folder, ranks = now.folder, now.ranks
    # what the first rank sees of a network's folder decides
    ranks.run_on_rank0(partial(begin_run, folder.out, folder.parts, folder.config))
    steps = ranks.broadcast([step for step, _ in find_states(folder.out)])
    if steps:
        resume_at(now, step_folder(folder.out, steps[-1]))
    now.advance()
    now.saved = now.progress.step
    if now.groups:
        warn_of_rate(now.phase, now.progress, len(now.groups))
        data, group = now.data[now.progress.phase], now.groups[now.progress.position]
        warm_up_ddp_buckets(now.state, data, group, now.progress)


def resume_at(now: Run, newest: Path) -> None:
    """Bring the run to the state in the folder `newest`. An epoch whose images or batches are others by now begins
    again."""
    saved = now.ranks.run_on_all(lambda: read_state(newest, partial(read_tensors, now.state), now.ranks))
    check_config(now.folder.config, saved.config, now.folder.out)
    restore(now.state, saved.tensors, saved.values, newest.name)
    progress = saved.progress
    now.progress, now.best, now.validated = progress, saved.best, saved.validated
    if same_epochs(saved.data[progress.phase], now.data[progress.phase].digest):
        return
    if progress.position:
        logger.warning("images or batches of phase %d have changed, so its epoch begins again", progress.phase + 1)
    now.progress = progress._replace(position=0)
    # what has ended stays as it is; else the validation's may be others too
    if advance(now.progress, now.data, now.settings)[1]:
        now.best = now.validated = None


def together(callbacks: Callbacks, ranks: Ranks) -> Callbacks:
    """Return `callbacks` of several ranks: what one cancels, all do, at the same step; the first is told alone."""
    if ranks.size == 1:
        return callbacks
    failed: list[BaseException] = []

    def report(line: Line) -> None:
        try:
            if ranks.first:
                callbacks.report(line)
        except BaseException as error:
            # the others hear of it when they are asked next
            failed.append(error)

    def poll() -> None:
        error = failed[0] if failed else None
        try:
            callbacks.poll()
        except BaseException as raised:
            error = raised
        ranks.agree(error)

    return callbacks._replace(report=report, poll=poll)
