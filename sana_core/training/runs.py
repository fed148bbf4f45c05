"""A run's folder: its states, each whole or not there, from the newest of which a run resumes.

out/run.json              what may not change in the run, and the digests of the LoRAs and weights that it has published
out/steps/step-0000500/   state.safetensors  what is trained, the optimizer's state, the moving average
                          state.json         where in the data it stands, what it was made with, digests of all files
                          shards/            of several processes: in its place, what each of them has written
                          the LoRA, or the transformer's folder, to be loaded elsewhere
out/log.jsonl             a line for each step

Nothing else in `out` is ever replaced, emptied or removed.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoints.fingerprint import digest_json
from ..checkpoints.headers import write_tensors
from ..errors import CheckpointError, ExistingFileError, InputError, OutputError, SanaError, TrainingError
from ..runtime.atomic_files import (
    digest_file,
    patiently,
    read_small,
    reason_of,
    remove,
    sync,
    sync_folder,
    unfinished,
    write_whole,
)
from ..runtime.folder_lock import OWN, STATE, kept_states, remove_run
from ..runtime.text import Json, brief
from .dataset import PICTURES, RUN, STEPS
from .ranks import ALONE, Ranks
from .schedule import Best, TrainProgress

logger = logging.getLogger(__name__)

LOG = "log.jsonl"
TENSORS, SHARDS = "state.safetensors", "shards"
# The digest of the model in the config.
MODEL = "model"
NAME = re.compile(r"step-(\d{7,})")
# Seconds to wait on Windows until no other program has a file of a new state open.
SCAN_PATIENCE = 120.0


class SavedState(NamedTuple):
    """What a run resumes from."""

    progress: TrainProgress
    tensors: dict[str, torch.Tensor]
    values: Json  # of the optimizer, as JSON
    config: Json  # what may not change when it resumes
    data: list[str]  # a digest of each phase's samples
    best: Best | None
    validated: int | None  # the step of the last validation
    shards: int = 1  # in how many the weights lay on the ranks


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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Let what the system refuses in this context be an OutputError that names `path`."""
    from safetensors import SafetensorError

    try:
        yield
    except SanaError:
        raise
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else brief(error)
        raise OutputError(
            f"out: cannot write into {path} ({reason}); see its rights and its disk, then start again, which resumes "
            "from the last state"
        ) from error


def stranger(path: Path) -> ExistingFileError:
    return ExistingFileError(
        f"out: {path} is not of this run, which would write there; move it away, or choose another folder"
    )


def read_run(out: Path) -> tuple[Json | None, list[str]]:
    """Return the config of the run in `out`, None where there is none, and the digests of what it has published.

    Raises ExistingFileError for a run.json that no run has written, and CheckpointError for a broken state.
    """
    try:
        document = json.loads(read_small(out / RUN))
        return dict(document["facts"]), [*map(str, document["published"])]
    except FileNotFoundError:
        # somebody has removed it, and the states know as much
        states = [read_document(folder) for _, folder in find_states(out)]
        published = [digest for state in states for digest in results_in(state).values()]
        return (states[-1]["facts"] if states else None), published
    except (ValueError, KeyError, TypeError, RecursionError):
        raise stranger(out / RUN) from None


def begin_run(out: Path, parts: Path, config: Json) -> None:
    """Make `out` the folder of a run with this config, or see that it is. Raises InputError where it is another's."""
    found, published = read_run(out)
    if found is not None:
        check_config(config, found, out)
    write_run(out, parts, config, published)


def write_run(out: Path, parts: Path, config: Json, published: Iterable[str]) -> None:
    document = {"facts": dict(config), "published": sorted({*published})}
    with writing(out / RUN):
        write_whole(out / RUN, json.dumps(document, indent=1).encode(), parts, replace=True)


def check_folder(out: Path, names: Iterable[str], phases: int, own: Json) -> None:
    """Raise ExistingFileError for what lies in `out` where a run writes, and this one has not written.

    `names` are those of the files that it will end with. Raises InputError for fewer than the `phases` that the run
    has been through, and for another run's config, of which `own` are those that are known before a model is read; and
    CheckpointError for a broken state.
    """
    config, published = read_run(out)
    if config is not None:
        check_config(own, {name: value for name, value in config.items() if name != MODEL}, out)
    check_places(out)
    folders, states = (out / STEPS, out / PICTURES), find_states(out)
    taken = [folder for folder in folders if folder.exists() and not folder.is_dir()]
    if config is None:
        taken += [file for file in (out / LOG, *folders[1].glob("step-*.png")) if file.exists()]
    files = [out / name for name in names]
    taken += [file for file in files if file.exists() and (file.is_dir() or digest_file(file) not in published)]
    if taken:
        raise stranger(min(taken))
    reached = progress_of(read_document(states[-1][1])).phase + 1 if states else 0
    if reached > phases:
        raise InputError(
            f"phase: got {phases}, but the run in {out} has come to phase {reached}; restore the phases before "
            "it, which are not trained again"
        )


def check_places(out: Path) -> None:
    """Raise ExistingFileError for what others have put where a state is to be written, now or later."""
    found = [each for each in (out / STEPS).glob("step-*") if NAME.fullmatch(each.name)]
    # behind them, for a state may come or go meanwhile
    known = {folder for _, folder in find_states(out)}
    taken = [each for each in found if each not in known and each.exists()]
    if taken:
        raise stranger(min(taken))


def publish(out: Path, parts: Path, name: str, state: Path) -> Path:
    """Put the LoRA in the folder `state` into `out` as `name`, over an earlier one of this run; return its path.

    Raises ExistingFileError for a file of others, CheckpointError for a LoRA that is broken, and OSError.
    """
    file = out / name
    ((own, digest),) = results_in(read_document(state)).items()
    config, published = read_run(out)
    there = digest_file(file) if file.exists() else None
    if there == digest:
        return file
    if there is not None and there not in published:
        raise stranger(file)
    check_file(state, own, digest)
    # known before it is there, for a process that is killed between the two
    write_run(out, parts, config or {}, [*published, digest])
    try:
        with writing(file), unfinished(file, parts, replace=True) as part:
            shutil.copyfile(state / own, part)
    except OutputError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        raise OutputError(
            f"out: {file} cannot be replaced ({reason_of(error.__cause__)}); close the program that has it open, then "
            f"start again, which only replaces it; the new LoRA is {state / own}"
        ) from error
    return file


def results_in(document: Json) -> dict[str, str]:
    """Return {name: digest} of the files of a state that other programs load: a LoRA, or a folder of weights."""
    files = document["files"].items()
    return {name: digest for name, digest in files if name != TENSORS and not name.startswith(f"{SHARDS}/")}


def note_result(out: Path, parts: Path, state: Path) -> None:
    """Add the files of the folder of weights in `state` to those that the run in `out` has published.

    Copies of them elsewhere are recognised by that.
    """
    config, published = read_run(out)
    if missing := set(results_in(read_document(state)).values()) - set(published):
        write_run(out, parts, config or {}, [*published, *missing])


def save_whole(tensors: Mapping[str, torch.Tensor], part: Path) -> dict[str, str]:
    """Write `tensors` into one file in the folder `part`, whose digest is taken later. Raises OSError."""
    write_tensors(part / TENSORS, tensors)
    return {}


def put_state(part: Path, folder: Path, document: Json, digests: Mapping[str, str]) -> None:
    """Make the folder `part`, with its `document` and the digests of its files, the state's `folder`; some `digests`
    are known. Raises ExistingFileError for what others have put there, and OSError."""
    names = {path: path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file()}
    files = {**digests, **{name: digest_file(path) for path, name in names.items() if name not in digests}}
    # as it will be read
    whole = json.loads(json.dumps({**document, "files": files}))
    text = json.dumps({**whole, "digest": digest_json(whole)}, indent=1, sort_keys=True)
    # Last and whole: a part with this file is a complete state, which adopt_states moves to its place later.
    write_whole(part / STATE, text.encode(), part)
    sync(part)
    folder.parent.mkdir(exist_ok=True)
    if folder.exists():
        raise stranger(folder)
    # A virus scanner reads the new files, which takes long if the model is large.
    move_state(part, folder, SCAN_PATIENCE)


def move_state(part: Path, folder: Path, patience: float | None = None) -> None:
    """Make the complete state `part` the state `folder`. Raises OutputError that names `part`, which stays then."""
    try:
        patiently(lambda: part.rename(folder), patience)
        sync_folder(folder.parent)
    except OSError as error:
        raise OutputError(
            f"out: {folder.name} is complete but cannot be moved from {part} to {folder} ({reason_of(error)}); close "
            "the program that has its files open, then start again, which moves it and resumes from it"
        ) from error


def adopt_states(out: Path) -> None:
    """Move complete states to their place that an earlier run of `out` could not move. The caller holds `out`.

    Raises OutputError if one still cannot be moved.
    """
    for part in sorted(part for run in (out / OWN).glob("*") if not run.is_symlink() for part in kept_states(run)):
        try:
            document = load_document(part)
            for name, digest in document["files"].items():
                check_file(part, name, digest)
        except CheckpointError:
            # A power cut came before all of it was on the disk.
            remove(part)
        else:
            folder = step_folder(out, progress_of(document).step)
            if not folder.exists():
                move_state(part, folder)
                logger.info("%s was saved by an earlier run that could not move it to %s", folder.name, STEPS)
            elif (folder / STATE).is_file():
                remove(part)
        remove_run(part.parent)


def write_state(
    out: Path,
    parts: Path,
    state: SavedState,
    export: Callable[[Path], None],
    save: Callable[[Mapping[str, torch.Tensor], Path], dict[str, str]] = save_whole,
    ranks: Ranks = ALONE,
) -> Callable[[], None]:
    """Write `state` and what `export` adds into a folder in `parts`, which is on the same disk; return what gives that
    its place, where it appears whole and on the disk, or not at all.

    What is returned is for the first rank to call, once, in any thread, while the weights may change: digests and the
    disk take longer than to write. All `ranks` have to call this; `export` and `save`, which returns the digests that
    it has taken, are called on each. Both raise OutputError.
    """
    folder, part = step_folder(out, state.progress.step), parts / f".state-{state.progress.step}.part"
    document: Json = {"place": state.progress._asdict(), "facts": state.config, "shares": state.shards}
    document |= {name: getattr(state, name) for name in ("values", "data", "best", "validated")}
    digests: dict[str, str] = {}

    def begin() -> None:
        remove(part)
        part.mkdir()

    @contextmanager
    def in_part() -> Iterator[None]:
        try:
            with writing(folder):
                yield
        except BaseException:
            if ranks.first and not (part / STATE).is_file():
                shutil.rmtree(part, ignore_errors=True)
            raise

    def complete() -> None:
        with in_part():
            put_state(part, folder, document, digests)

    with in_part():
        ranks.run_on_rank0(begin)
        export(part)
        own = save(state.tensors, part)
        digests.update({name: digest for found in ranks.all_gather(own) for name, digest in found.items()})
    return complete


def remove_older(out: Path, parts: Path, keep: int, best: int | None) -> None:
    """Remove all states but the newest `keep`, that of the step `best`, and those that are not as they were written.

    A state that another program has open stays until a later call. On Windows that may be ComfyUI, which maps the
    weights of a ControlNet.
    """
    for step, folder in find_states(out)[:-keep]:
        if step != best and is_own(folder):
            # Renamed first, so that no half of it is a state.
            gone = parts / f".gone-{step}.part"
            try:
                patiently(partial(folder.rename, gone), 1.0)
                remove(gone)
            except OSError as error:
                logger.warning("%s is not removed now (%s)", folder.name, reason_of(error))


def is_own(folder: Path) -> bool:
    """Whether there is nothing in the folder of a state but what was written into it."""
    try:
        own = {STATE, *read_document(folder)["files"]}
    except CheckpointError:
        return False
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()} <= own


def broken(folder: Path, error: Exception | str) -> CheckpointError:
    reason = brief(error.strerror if isinstance(error, OSError) and error.strerror else error)
    return CheckpointError(
        f"{folder.name}: broken state of a run ({reason}); remove that folder to resume from the one before"
    )


def check_file(folder: Path, name: str, digest: str) -> None:
    """Raise CheckpointError for a file of a state that is not what was written."""
    try:
        found = digest_file(folder / name)
    except OSError as error:
        raise broken(folder, error) from error
    if found != digest:
        raise broken(folder, f"{name} is damaged, its digest is another")


def read_document(folder: Path) -> Json:
    """Return what a state says besides its tensors. Raises CheckpointError for one that is broken."""
    document = load_document(folder)
    if step_folder(folder.parent.parent, progress_of(document).step) != folder:
        raise broken(folder, f"{STATE} is damaged, its digest is another")
    return document


def load_document(folder: Path) -> Json:
    """Return the content of state.json in `folder`, which need not be the state's place. Raises CheckpointError."""
    try:
        document = json.loads(read_small(folder / STATE))
        digest = document.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise broken(folder, error) from error
    if digest != digest_json(document):
        raise broken(folder, f"{STATE} is damaged, its digest is another")
    return document


def progress_of(document: Json) -> TrainProgress:
    return TrainProgress(**document["place"])


def read_state(folder: Path, read: Callable[[Path, int], dict[str, torch.Tensor]], ranks: Ranks = ALONE) -> SavedState:
    """Return the state in `folder`, whose tensors `read` returns from that and the shares that they were in.

    Each of `ranks` sees to the digests of its share of the files. Raises CheckpointError for a state that is broken,
    and what `read` does.
    """
    from safetensors import SafetensorError

    document = read_document(folder)
    files = sorted(name for name in document["files"] if name == TENSORS or name.startswith(f"{SHARDS}/"))
    for name in files[ranks.rank :: ranks.size]:
        check_file(folder, name, document["files"][name])
    try:
        tensors = read(folder, document["shares"])
    except SanaError:
        raise
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise broken(folder, error) from error
    values, config, data, best = (document[name] for name in ("values", "facts", "data", "best"))
    return SavedState(progress_of(document), tensors, values, config, data, best and Best(*best), document["validated"])


def check_finite(tensors: Mapping[str, torch.Tensor], step: int) -> None:
    """Raise TrainingError for what may not become a state: values that are not finite after `step` steps."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise TrainingError(
                f"training: after step {step} {name:.80} is not finite; lower learning_rate, the same command resumes"
            )


def check_config(own: Json, found: Json, out: Path) -> None:
    """Raise InputError for the first value of a run's config that is not what its states were made with."""
    for name in sorted(own.keys() | found.keys()):
        if own.get(name) != found.get(name):
            got, has = ("none" if config.get(name) is None else brief(config[name]) for config in (own, found))
            raise InputError(f"{name}: got {got}, but the run in {out} has {has}; name another folder, or set it back")
