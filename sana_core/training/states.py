"""The folder of a run: run.json, the log, and the saved states. A run resumes from the newest state.

out/run.json              the config, and the digests of the LoRAs and weights that the run has published
out/steps/step-0000500/   state.safetensors  the trained weights, the optimizer's state, the moving average
                          state.json         SavedState and its digest
                          shards/            in place of state.safetensors if several processes have written the state
                          the LoRA, or the folder with the weights, for other programs
out/log.jsonl             a line for each step and validation

Each state is complete or does not exist. Nothing else in `out` is ever replaced, emptied or removed.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

import torch

from ..checkpoints.fingerprint import digest_json
from ..errors import CheckpointError, ExistingFileError, InputError, OutputError, SanaError, TrainingError, VersionError
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
from ..runtime.text import Json, brief, get_logger
from .dataset import PICTURES, RUN, STEPS
from .optimizers import OptimizerValues, fill, optimizer_state, restore_optimizer
from .ranks import Ranks
from .schedule import Best, TrainProgress
from .sharding import SHARDS, TENSORS, Layout, read_tensors, save_tensors

logger = get_logger(__name__)

LOG = "log.jsonl"
# The digest of the model in the config.
MODEL = "model"
NAME = re.compile(r"step-(\d{7,})")
# Seconds to wait on Windows until no other program has a file of a new state open.
SCAN_PATIENCE = 120.0
# The types of JSON in errors.
JSON_TYPES = {int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "an object"}


class RunRecord(NamedTuple):
    # The values that may not change when the run resumes. None: there is no run.
    config: Json | None
    # The digests of the files that the run has published.
    published: list[str]


class SavedState(NamedTuple):
    """The content of a state.json, except its digest."""

    progress: TrainProgress
    # The optimizer's values that are no tensors.
    values: OptimizerValues
    # The config of the run.
    config: Json
    # A digest of the samples of each phase.
    data: list[str]
    best: Best | None
    # The step of the last validation.
    validated: int | None
    # The number of shards that the weights are divided into.
    shards: int = 1
    # The digests of the files in the folder, by their names.
    files: dict[str, str] = {}  # noqa: RUF012

    @property
    def results(self) -> dict[str, str]:
        """{name: digest} of the files for other programs: a LoRA, or a folder of weights."""
        return {
            name: digest for name, digest in self.files.items() if name != TENSORS and not name.startswith(f"{SHARDS}/")
        }


def convert(value: Any, kind: Any, field: str = "") -> Any:
    """Check that the JSON `value` is of the type `kind`, and return it as that type.

    `kind` is a NamedTuple, a TypedDict, a type of JSON_TYPES, or one of these | None. Raises ValueError for a missing
    or unknown value and for a value of another type.
    """
    inner, prefix = get_args(kind), f"{field}." if field else ""
    if kind is Any or (value is None and type(None) in inner):
        return value
    if type(None) in inner:
        return convert(value, inner[0], field)
    fields = get_type_hints(kind) if hasattr(kind, "_fields") or is_typeddict(kind) else {}
    plain = dict if fields else get_origin(kind) or kind
    if type(value) is not plain and (plain, type(value)) != (float, int):
        raise ValueError(f"{field or 'content'}: got {brief(value)}, expected {JSON_TYPES[plain]}")
    if isinstance(value, list):
        return [convert(item, inner[0], f"{prefix}{number}") for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    for name in sorted(fields.keys() ^ value.keys()) if fields else ():
        got, expected = ("nothing", "a value") if name in fields else (brief(value[name]), "nothing")
        raise ValueError(f"{prefix}{brief(name)}: got {got}, expected {expected}")
    items = {name: convert(value[name], fields.get(name) or inner[1], f"{prefix}{brief(name)}") for name in value}
    return kind(**items) if fields else items


def step_folder(out: Path, step: int) -> Path:
    return out / STEPS / f"step-{step:07d}"


def find_states(out: Path) -> list[tuple[int, Path]]:
    """Return the (step, folder) of the states in the run's folder `out`, oldest first."""
    states = []
    for folder in (out / STEPS).glob("step-*"):
        match = NAME.fullmatch(folder.name)
        if match and (folder / STATE).is_file():
            states.append((int(match[1]), folder))
    return sorted(states)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the system in this context into an OutputError that names `path`."""
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


def foreign_file_error(path: Path) -> ExistingFileError:
    return ExistingFileError(
        f"out: {path} is not of this run, which would write there; move it away, or choose another folder"
    )


# Before a run: its folder must have no files of others


def read_run(out: Path) -> RunRecord:
    """Return the run.json of the run in `out`."""
    try:
        return convert(json.loads(read_small(out / RUN)), RunRecord)
    except FileNotFoundError:
        # If somebody has removed the file, the states still have its contents.
        states = [read_document(folder) for _, folder in find_states(out)]
        published = [digest for state in states for digest in state.results.values()]
        return RunRecord(states[-1].config if states else None, published)
    except (ValueError, RecursionError) as error:
        raise ExistingFileError(
            f"out: {out / RUN} is not of this run, but of another program or version ({brief(error, 150)}); "
            "move it away, or choose another folder"
        ) from None


def check_config(config: Json, existing: Json, out: Path) -> None:
    """Raise InputError for the first value of `config` that differs from the config of the run in `out`."""
    for name in sorted(config.keys() | existing.keys()):
        if config.get(name) != existing.get(name):
            got, has = ("none" if value is None else brief(value) for value in (config.get(name), existing.get(name)))
            raise InputError(f"{name}: got {got}, but the run in {out} has {has}; name another folder, or set it back")


def check_folder(out: Path, names: Iterable[str], phases: int, config: Json) -> None:
    """Raise ExistingFileError for files in `out` that this run would write but has not written.

    `names` are the files of its result. Raises InputError if the run in `out` has another config, or has already
    reached a later phase than `phases`. `config` has no digest of the model yet.
    """
    existing, published = read_run(out)
    if existing is not None:
        check_config(config, {name: value for name, value in existing.items() if name != MODEL}, out)
    check_places(out)
    folders, states = (out / STEPS, out / PICTURES), find_states(out)
    foreign_files = [folder for folder in folders if folder.exists() and not folder.is_dir()]
    if existing is None:
        foreign_files += [file for file in (out / LOG, *folders[1].glob("step-*.png")) if file.exists()]
    files = [out / name for name in names]
    foreign_files += [file for file in files if file.exists() and (file.is_dir() or digest_file(file) not in published)]
    if foreign_files:
        raise foreign_file_error(min(foreign_files))
    reached = read_document(states[-1][1]).progress.phase + 1 if states else 0
    if reached > phases:
        raise InputError(
            f"phase: got {phases}, but the run in {out} has come to phase {reached}; restore the phases before "
            "it, which are not trained again"
        )


def check_places(out: Path) -> None:
    """Raise ExistingFileError for a file with the name of a state that no run has written."""
    paths = [path for path in (out / STEPS).glob("step-*") if NAME.fullmatch(path.name)]
    # A thread may remove a state meanwhile, so the path is checked last.
    foreign_files = [path for path in paths if not (path / STATE).is_file() and path.exists()]
    if foreign_files:
        raise foreign_file_error(min(foreign_files))


def adopt_states(out: Path) -> None:
    """Move complete states that an earlier run of `out` could not rename to steps/step-N.

    The caller must have locked `out`.
    """
    for part in sorted(part for run in (out / OWN).glob("*") if not run.is_symlink() for part in kept_states(run)):
        try:
            state = read_document(part, in_place=False)
            for name, digest in state.files.items():
                check_file(part, name, digest)
        except CheckpointError:
            # After a power cut some of its files may not be on the disk.
            remove(part)
        else:
            folder = step_folder(out, state.progress.step)
            if not folder.exists():
                # A process that was killed after its first state was complete has not created the folder of states.
                folder.parent.mkdir(exist_ok=True)
                move_state(part, folder)
                logger.info("%s was saved by an earlier run that could not move it to %s", folder.name, STEPS)
            elif (folder / STATE).is_file():
                remove(part)
        remove_run(part.parent)


def begin_run(out: Path, parts: Path, config: Json) -> None:
    """Write the run.json of a run with `config`, which must be the config of a run that `out` has already."""
    existing, published = read_run(out)
    if existing is not None:
        check_config(config, existing, out)
    write_run(out, parts, RunRecord(config, published))


def write_run(out: Path, parts: Path, run: RunRecord) -> None:
    document = {"config": run.config or {}, "published": sorted({*run.published})}
    with writing(out / RUN):
        write_whole(out / RUN, json.dumps(document, indent=1).encode(), parts, replace=True)


# Read a state


def read_state(folder: Path, layout: Layout) -> tuple[SavedState, dict[str, torch.Tensor]]:
    """Return the state in `folder` and its tensors. A sharded tensor has only this rank's rows in `layout`.

    The ranks divide the check of the files' digests.
    """
    from safetensors import SafetensorError

    state = read_document(folder)
    files = sorted(state.files.keys() - state.results.keys())
    for name in files[layout.ranks.rank :: layout.ranks.size]:
        check_file(folder, name, state.files[name])
    try:
        return state, read_tensors(layout, folder, state.shards)
    except SanaError:
        raise
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise broken_state_error(folder, error) from error


def read_document(folder: Path, in_place: bool = True) -> SavedState:
    """Return the content of the state.json in `folder`. With `in_place`, `folder` must be the folder of that step."""
    try:
        document = json.loads(read_small(folder / STATE))
        damaged = document.pop("digest") != digest_json(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise broken_state_error(folder, error) from error
    if not damaged:
        try:
            state = convert(document, SavedState)
        except ValueError as error:
            raise VersionError(
                f"{folder.name}/{STATE}: {error}; resume with the version of this package that wrote it, or choose "
                "another folder"
            ) from None
        damaged = in_place and step_folder(folder.parent.parent, state.progress.step) != folder
    if damaged:
        raise broken_state_error(folder, f"{STATE} is damaged, its digest is another")
    return state


def check_file(folder: Path, name: str, digest: str) -> None:
    try:
        damaged = digest_file(folder / name) != digest
    except OSError as error:
        raise broken_state_error(folder, error) from error
    if damaged:
        raise broken_state_error(folder, f"{name} is damaged, its digest is another")


def broken_state_error(folder: Path, error: Exception | str) -> CheckpointError:
    return CheckpointError(
        f"{folder.name}: broken state of a run ({brief(error)}); remove that folder to resume from the one before"
    )


def restore(
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, torch.Tensor] | None,
    tensors: Mapping[str, torch.Tensor],
    values: OptimizerValues,
    name: str,
) -> None:
    """Restore parameters, optimizer and average from the contents of the state `name`."""

    def with_prefix(prefix: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}

    def fill_all(targets: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> None:
        for key in sorted(targets.keys() | stored.keys()):
            if key not in stored or key not in targets or stored[key].shape != targets[key].shape:
                raise CheckpointError(
                    f"{name}: {key} is missing or of another shape; remove that folder, or name another"
                )
        fill(targets, stored)

    fill_all(parameters, with_prefix("parameter."))
    if average is not None:
        fill_all(average, with_prefix("average."))
    try:
        restore_optimizer(optimizer, with_prefix("optimizer."), values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{name}: values of the optimizer do not fit it ({brief(error)}); remove that folder, or name another"
        ) from error


# The log


class Line(TypedDict, total=False):
    """A line of the log. A line of a validation has only `step` and `validation_loss`."""

    step: int
    phase: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    # Number of images in the step.
    images: int
    seconds: float
    validation_loss: float
    # Only in reported lines: the number of steps of the whole run.
    steps: int
    # Only in the last reported line: the first validation loss of the phase.
    first: float


class RunLog:
    """The log of the run in `out`. A log that cannot be written does not end the run: its lines wait in memory."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.waiting: list[Line] = []
        self.has_warned = False

    def add(self, line: Line) -> None:
        """Add `line`, after the lines that wait."""
        self.waiting.append(line)
        try:
            append_log(self.out, *self.waiting)
        except OSError as error:
            if not self.has_warned:
                logger.warning("%s cannot be written now (%s); its lines will be added later", LOG, reason_of(error))
            self.has_warned = True
        else:
            self.waiting = []

    def close(self) -> None:
        """Add the lines that wait. Logs a warning if it is still impossible."""
        if not self.waiting:
            return
        try:
            patiently(lambda: append_log(self.out, *self.waiting))
        except OSError as error:
            steps = self.waiting[0]["step"], self.waiting[-1]["step"]
            logger.warning(
                "%s cannot be written (%s), so it lacks steps %d to %d; the states have them",
                LOG,
                reason_of(error),
                *steps,
            )


def append_log(out: Path, *lines: Line) -> None:
    """Add `lines` to the run's log, all of them or none. Raises OSError."""
    with (out / LOG).open("ab+", buffering=0) as stream:
        end = stream.seek(0, 2)
        stream.seek(max(0, end - 1))
        # A power cut may have left half a line.
        data = b"\n"[: stream.read(1) not in (b"", b"\n")]
        data += b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        try:
            while data:
                data = data[stream.write(data) :]
        except OSError:
            stream.truncate(end)
            raise


def read_log(out: Path) -> list[Line]:
    """Return the lines of the run's log in the order of their steps, without broken lines.

    A killed run resumes from its last state and repeats the steps after that. The later lines of a step count.
    """
    file, lines = out / LOG, list[Line]()
    for text in patiently(file.read_bytes).split(b"\n") if file.exists() else ():
        try:
            line = json.loads(text)
            losses = [line[name] for name in ("loss", "validation_loss") if name in line]
            is_line = type(line["step"]) is int and [type(loss_value) for loss_value in losses] == [float]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if is_line:
            while lines and order(lines[-1]) >= order(line):
                lines.pop()
            lines.append(line)
    return lines


def order(line: Line) -> tuple[int, bool]:
    """Return the sort key of a line: the step, with the validation after the loss."""
    return line["step"], "loss" not in line


def read_losses(out: Path) -> list[float]:
    """Return the loss of each step up to the newest state in `out`, from which the run resumes."""
    newest = max((step for step, _ in find_states(out)), default=0)
    return [line["loss"] for line in read_log(out) if "loss" in line and line["step"] <= newest]


class Eta:
    """Estimates the remaining time from the time since the first step of this process began."""

    def __init__(self) -> None:
        self.began = 0.0
        self.first: int | None = None

    def describe(self, line: Line) -> str:
        """Return a step's reported line as text: step, loss, rate, speed and remaining time."""
        if self.first is None:
            # The preparation and the first validation do not count.
            self.first, self.began = line["step"] - 1, time.monotonic() - line["seconds"]
        seconds_left = (time.monotonic() - self.began) / (line["step"] - self.first) * (line["steps"] - line["step"])
        speed = line["images"] / max(line["seconds"], 1e-9)
        text = f"step {line['step']} of {line['steps']}, loss {line['loss']:.4f}, rate {line['learning_rate']:.2g}"
        return f"{text}, {speed:.2f} images a second, {clock(seconds_left)} left"


def describe_validation(line: Line) -> str:
    """Return a validation's line as text. A line with "first" is of the best validation, and is compared with it."""
    line_text = f"step {line['step']}: validation loss {line['validation_loss']:.4f}"
    if "first" not in line:
        return line_text
    if line["validation_loss"] < line["first"]:
        return f"the best is of {line_text}, from {line['first']:.4f}"
    return f"the best is of {line_text}, which was {line['first']:.4f} at first: lower the learning rate"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


# Write a state


def tensors_of(
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, torch.Tensor] | None,
) -> tuple[dict[str, torch.Tensor], OptimizerValues]:
    """Return the contents of a state: tensors by name, and values for JSON."""
    optimizer_tensors, values = optimizer_state(optimizer)
    tensors = {f"parameter.{name}": parameter.detach() for name, parameter in parameters.items()}
    tensors.update({f"optimizer.{name}": tensor for name, tensor in optimizer_tensors.items()})
    tensors.update({f"average.{name}": tensor for name, tensor in (average or {}).items()})
    return tensors, values


def check_finite(tensors: Mapping[str, torch.Tensor], step: int) -> None:
    """Raise TrainingError for values that are not finite after `step` steps. They must not become a state."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise TrainingError(
                f"training: after step {step} {name:.80} is not finite; lower learning_rate, the same command resumes"
            )


class NewState:
    """A state that is being written into a folder in `parts`, and is then moved to steps/step-N."""

    def __init__(self, out: Path, parts: Path, state: SavedState, layout: Layout) -> None:
        self.state, self.layout, self.parts = state, layout, parts
        self.folder = step_folder(out, state.progress.step)
        self.part = parts / f".state-{state.progress.step}.part"
        # The digests of the tensors' files, by their names.
        self.digests: dict[str, str] = {}

    def write(self, tensors: Mapping[str, torch.Tensor], export: Callable[[Path], None]) -> None:
        """Write `tensors` and the files of `export`. All ranks call this, and it calls `export` on all of them."""
        ranks = self.layout.ranks
        with self.removing_on_error():
            ranks.run_on_rank0(lambda: remove(self.part))
            ranks.run_on_rank0(self.part.mkdir)
            export(self.part)
            for rank_digests in ranks.all_gather(save_tensors(self.layout, tensors, self.part)):
                self.digests |= rank_digests

    def complete(self) -> None:
        """Compute the digests, call fsync and rename the folder to steps/step-N. Only the first rank calls this, once.

        This is slow and needs no weights, so a thread calls it while training continues.
        """
        with self.removing_on_error():
            for file in self.part.rglob("*"):
                name = file.relative_to(self.part).as_posix()
                if file.is_file() and name not in self.digests:
                    self.digests[name] = digest_file(file)
            # Written last and whole. A folder with this file is a complete state, which adopt_states can move later.
            state = self.state._replace(shards=self.layout.shard_count, files=self.digests)
            write_document(self.part, self.parts, state)
            sync(self.part)
            self.folder.parent.mkdir(exist_ok=True)
            if self.folder.exists():
                raise foreign_file_error(self.folder)
            # A virus scanner reads the new files, which takes long if the model is large.
            move_state(self.part, self.folder, SCAN_PATIENCE)

    @contextmanager
    def removing_on_error(self) -> Iterator[None]:
        try:
            with writing(self.folder):
                yield
        except BaseException:
            if self.layout.ranks.first and not (self.part / STATE).is_file():
                shutil.rmtree(self.part, ignore_errors=True)
            raise


class Saver:
    """Completes the states of a run in a thread of the first rank while the next steps run, and removes old ones."""

    def __init__(self, out: Path, parts: Path, keep: int, ranks: Ranks) -> None:
        self.out, self.parts, self.keep, self.ranks = out, parts, keep, ranks
        self.thread = ThreadPoolExecutor(1, "sana training state")
        # The job of the thread for the last state.
        self.job: Future[None] | None = None
        # The step of the last state. 0: there is no state yet. None: it could not be written.
        self.saved_step: int | None = 0

    def begin(self, new: NewState | None, step: int, best: Best | None, validated: int | None) -> None:
        """Let the thread complete the `new` state of `step`. None: it exists, and only its validation may be missing.

        `best` is the best validation, and `validated` the step of the last one.
        """
        if new is not None:
            self.saved_step = step
        if self.ranks.first:
            self.job = self.thread.submit(self.finish, new, step, best, validated)

    def finish(self, new: NewState | None, step: int, best: Best | None, validated: int | None) -> None:
        with self.ranks.completing:
            if new is not None:
                new.complete()
            elif step and validated == step:
                # A run that was cancelled or failed has saved the state before its validation.
                folder = step_folder(self.out, step)
                try:
                    state = read_document(folder)
                    if state.validated != validated:
                        with writing(folder):
                            write_document(folder, self.parts, state._replace(best=best, validated=validated))
                except SanaError as error:
                    # The state itself is in its place, and the next one has the validation.
                    logger.warning("the validation of step %d is not saved now (%s)", step, error)
        try:
            # Even without a new state, because a run that was killed after its last state has not removed them.
            remove_older(self.out, self.parts, self.keep, None if best is None else best.step)
        except OSError as error:
            logger.warning("older states are not removed now (%s)", error)

    def wait(self) -> None:
        """Wait until the last state is in its place. If that has failed, raise the error, but only once."""
        job = self.job
        try:
            self.ranks.run_on_rank0(lambda: None if job is None else job.result())
        except Exception:
            self.job = self.saved_step = None
            raise
        finally:
            # Break the cycle error, traceback, frame, job, which would keep the model in memory until the garbage
            # collector runs.
            job = None


def write_document(folder: Path, parts: Path, state: SavedState) -> None:
    """Write the state.json of the state in `folder` through the folder `parts`.

    A killed process leaves its unfinished file in `parts`. Written in `folder` itself, such a file would stay in the
    state.
    """
    records = {"progress": state.progress._asdict(), "best": state.best and state.best._asdict()}
    # JSON changes types, such as tuples to lists. The digest is of the document as it will be read.
    document = json.loads(json.dumps(state._asdict() | records))
    text = json.dumps({**document, "digest": digest_json(document)}, indent=1, sort_keys=True)
    write_whole(folder / STATE, text.encode(), parts, replace=True)


def move_state(part: Path, folder: Path, patience: float | None = None) -> None:
    """Move the complete state in `part` to `folder`. If that fails it stays in `part`, which the OutputError names."""
    try:
        patiently(lambda: part.rename(folder), patience)
        sync_folder(folder.parent)
    except OSError as error:
        raise OutputError(
            f"out: {folder.name} is complete but cannot be moved from {part} to {folder} ({reason_of(error)}); close "
            "the program that has its files open, then start again, which moves it and resumes from it"
        ) from error


def remove_older(out: Path, parts: Path, keep: int, best: int | None) -> None:
    """Remove all states except the newest `keep`, the state of step `best`, and states with files of other programs.

    A state that another program has open stays until a later call. On Windows that may be ComfyUI, which maps the
    weights of a ControlNet.
    """
    for step, folder in find_states(out)[:-keep]:
        if step != best and has_only_its_files(folder):
            # Renamed first, so that no half of it is a state.
            gone = parts / f".gone-{step}.part"
            try:
                patiently(partial(folder.rename, gone), 1.0)
                remove(gone)
            except OSError as error:
                logger.warning("%s is not removed now (%s)", folder.name, reason_of(error))


def has_only_its_files(folder: Path) -> bool:
    """Whether the folder of a state has only the files that were written into it."""
    try:
        written = {STATE, *read_document(folder).files}
    except (CheckpointError, VersionError):
        return False
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()} <= written


# The result


def publish(out: Path, parts: Path, name: str, state: Path) -> Path:
    """Copy the LoRA of the state in the folder `state` to `out` as `name`. Replaces only a file of this run."""
    file = out / name
    ((lora, digest),) = read_document(state).results.items()
    if file.exists():
        existing = digest_file(file)
        if existing == digest:
            return file
        if existing not in read_run(out).published:
            raise foreign_file_error(file)
    check_file(state, lora, digest)
    # The digest is stored before the file exists, in case the process is killed between the two.
    note_published(out, parts, state)
    try:
        with writing(file), unfinished(file, parts, replace=True) as part:
            shutil.copyfile(state / lora, part)
    except OutputError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        raise OutputError(
            f"out: {file} cannot be replaced ({reason_of(error.__cause__)}); close the program that has it open, then "
            f"start again, which only replaces it; the new LoRA is {state / lora}"
        ) from error
    return file


def note_published(out: Path, parts: Path, state: Path) -> None:
    """Add the digests of the results of `state` to run.json, so that a later run may replace copies of them."""
    run = read_run(out)
    digests = set(read_document(state).results.values())
    if not digests <= set(run.published):
        write_run(out, parts, run._replace(published=[*run.published, *digests]))
