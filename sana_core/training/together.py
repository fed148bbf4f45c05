"""A run's surroundings where several ranks train: one of them holds the folder, writes, draws and reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ..runtime.atomic_files import make_folder
from ..runtime.cancellation import Poll
from ..runtime.folder_lock import OWN, check_run, hold
from .learner import Learner, whole_learner
from .loop import Export, Preview, Watch
from .ranks import Ranks
from .runs import writing


@contextmanager
def held_together(out: Path, ranks: Ranks) -> Iterator[tuple[Path, Poll]]:
    """Hold the run's folder `out` for all `ranks`; give the folder for unfinished files, and what checks the hold.

    Raises InUseError for a folder in which another run writes, OutputError where it cannot be written, and
    MissingFileError for a rank that sees another folder under that name.
    """
    with ExitStack() as stack:

        def begin() -> Any:
            make_folder(out)
            with writing(out):
                return stack.enter_context(hold(out))

        held = ranks.first_does(begin)
        name = ranks.from_first(None if held is None else held.run.name)
        ranks.each_does(lambda: check_run(out, name))
        yield out / OWN / name, (lambda: None) if held is None else held.check


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
