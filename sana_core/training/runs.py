"""A run's folder: its states, each whole or not there, from the newest of which a run goes on.

out/steps/step-0000500/   state.safetensors  what is trained, the optimizer's state, the moving average
                          state.json         where in the data it stands, and what it was made with
                          shards/            of several processes: in its place, what each of them has written
                          the LoRA, or the transformer's folder, to be loaded elsewhere
out/log.jsonl             a line for each step
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from os import O_RDONLY, close, fsync
from os import open as open_descriptor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checkpoints.files import brief
from ..errors import CheckpointError, InputError, SanaError
from ..whole_files import sync_folder
from .ranks import ALONE, Ranks

STEPS, LOG = "steps", "log.jsonl"
STATE, TENSORS, SHARDS = "state.json", "state.safetensors", "shards"
NAME = re.compile(r"step-(\d{7,})")


class Place(NamedTuple):
    """Where a run stands, after `step` steps: in its phases, `position` steps of that epoch done."""

    step: int = 0
    phase: int = 0
    phase_step: int = 0
    epoch: int = 0
    position: int = 0


class State(NamedTuple):
    """What a run goes on from."""

    place: Place
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]  # of the optimizer, as JSON
    facts: dict[str, Any]  # what may not change when it goes on
    data: list[str]  # a digest of each phase's samples
    best: tuple[float, int] | None  # the lowest validation loss, and the step that it was measured at
    validated: int | None  # the step of the last validation
    shares: int = 1  # in how many the weights lay on the ranks


def step_folder(out: Path, step: int) -> Path:
    return out / STEPS / f"step-{step:07d}"


def find_states(out: Path) -> list[tuple[int, Path]]:
    """Return the (step, folder) of the states in the run's folder `out`, oldest first."""
    found = []
    for folder in (out / STEPS).glob("step-*"):
        match = NAME.fullmatch(folder.name)
        if match and (folder / STATE).is_file():
            found.append((int(match[1]), folder))
    return sorted(found)


def save_whole(tensors: Mapping[str, torch.Tensor], part: Path) -> None:
    """Write `tensors` into one file in the folder `part`. Raises OSError."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part / TENSORS)


def write_state(
    out: Path,
    parts: Path,
    state: State,
    export: Callable[[Path], None],
    save: Callable[[Mapping[str, torch.Tensor], Path], None] = save_whole,
    ranks: Ranks = ALONE,
) -> Path:
    """Write `state` and what `export` adds to its folder; return that. It appears whole and on the disk, or not at all.

    Until then it lies in `parts`, a folder of the same disk. All `ranks` have to call this; `export` and `save` are
    called on each, the rest is the first's. Raises OSError.
    """
    folder, part = step_folder(out, state.place.step), parts / f"state-{state.place.step}"

    def begin() -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()

    def finish() -> None:
        document = {**state._asdict(), "place": state.place._asdict()}
        del document["tensors"]
        (part / STATE).write_text(json.dumps(document, indent=1))
        for path in part.rglob("*"):
            if path.is_file():
                sync_file(path)
            else:
                sync_folder(path)
        sync_folder(part)
        folder.parent.mkdir(exist_ok=True)
        part.rename(folder)
        sync_folder(folder.parent)

    try:
        ranks.first_does(begin)
        export(part)
        ranks.each_does(lambda: save(state.tensors, part))
        ranks.first_does(finish)
    finally:
        if ranks.first:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def sync_file(path: Path) -> None:
    """Wait until what is in `path` is on the disk. Raises OSError."""
    descriptor = open_descriptor(path, O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        close(descriptor)


def remove_older(out: Path, parts: Path, keep: int, best: int | None) -> None:
    """Remove all states but the newest `keep` and that of the step `best`. Raises OSError."""
    for step, folder in find_states(out)[:-keep]:
        if step != best:
            # away at once, so that no half of it is found
            gone = parts / f"gone-{step}"
            folder.rename(gone)
            shutil.rmtree(gone)


def read_state(folder: Path, read: Callable[[Path, int], dict[str, torch.Tensor]]) -> State:
    """Return the state in `folder`, whose tensors `read` returns from that and the shares that they were in.

    Raises CheckpointError for one that is broken, and what `read` does.
    """
    from safetensors import SafetensorError

    try:
        document = json.loads((folder / STATE).read_text())
        place = Place(**document["place"])
        if not all(type(number) is int and number >= 0 for number in place):
            raise TypeError
        tensors = read(folder, document.get("shares", 1))
        values, facts, data, best = (document[name] for name in ("values", "facts", "data", "best"))
        return State(place, tensors, values, facts, data, best and tuple(best), document["validated"])
    except SanaError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder.name}: broken state of a run ({brief(error)}); remove that folder to go on from the one before"
        ) from error


def check_facts(own: Mapping[str, Any], found: Mapping[str, Any], out: Path) -> None:
    """Raise InputError for the first of a run's facts that is not what its states were made with."""
    for name in sorted(own.keys() | found.keys()):
        if own.get(name) != found.get(name):
            raise InputError(
                f"{name}: got {brief(own.get(name))}, but the run in {out} has {brief(found.get(name))}; "
                "name another folder, or set it back"
            )


def append_log(out: Path, line: Mapping[str, Any]) -> None:
    """Add `line` to the run's log. Raises OSError."""
    with (out / LOG).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def read_log(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line of the run's log, as text and as what it says, up to one that was not written whole.

    Raises OSError.
    """
    file = out / LOG
    for text in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else ():
        try:
            line = json.loads(text)
            known = text.endswith("\n") and type(line["step"]) is int
        # half a line, of a process that was killed
        except (ValueError, KeyError, TypeError):
            return
        if not known:
            return
        yield text, line


def read_losses(out: Path) -> list[float]:
    """Return the loss of each step in the run's log, none for a run that has not begun. Raises OSError."""
    return [line["loss"] for _, line in read_log(out) if "loss" in line]


def cut_log(out: Path, step: int) -> None:
    """Take the lines after `step` off the run's log, which are written again when it goes on. Raises OSError."""
    kept = [text for text, line in read_log(out) if line["step"] <= step]
    if (out / LOG).exists():
        (out / LOG).write_text("".join(kept), encoding="utf-8")
