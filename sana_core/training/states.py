"""A run's folder and its saved states. A run resumes from the newest state. Each state is complete or does not exist.

out/run.json              the config, and the digests of the LoRAs and weights that the run has published
out/steps/step-0000500/   state.safetensors  the trained weights, the optimizer's state, the moving average
                          state.json         the progress, the config, the digests of all files
                          shards/            in place of state.safetensors if several processes have written the state
                          the LoRA, or the folder with the weights, for other programs
out/log.jsonl             a line for each step

Nothing else in `out` is ever replaced, emptied or removed.

Several ranks write safetensors files of torch.distributed.checkpoint. Each file records which rows of a tensor it
has, so any number of ranks can read them. One rank writes the tensors that all ranks have. A tensor that only one rank
has, such as the scales of its 8-bit values, is named with @ and the number of the shard.

An optimizer's tensors are named "<number of the parameter>.<name of the state>", or "group.<name>" if they belong to
all parameters. A tensor subclass, such as torchao's 8-bit values, is written as its inner tensors, named ".<name>"
after that. torch.distributed.checkpoint's set_optimizer_state_dict is not used. It would cast a state to its
parameter's dtype, 8-bit codes to fp32 and fp32 moments to bf16, so a resumed run would differ.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
from .optimizers import fill
from .schedule import Best, TrainProgress
from .sharding import Layout, row_slices

if TYPE_CHECKING:
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

LOG = "log.jsonl"
TENSORS, SHARDS = "state.safetensors", "shards"
# The digest of the model in the config.
MODEL = "model"
NAME = re.compile(r"step-(\d{7,})")
# Seconds to wait on Windows until no other program has a file of a new state open.
SCAN_PATIENCE = 120.0
# Entries of an optimizer's group that are no state. The schedule sets the rate at each step.
SETTINGS = ("params", "optimizer", "lr")
# The only state that is a single number.
STEP = "step"
# Separates the name of a tensor from the number of the only shard that has it.
SHARD_MARK = "@"
# CAME's means of rows, which are divided like the rows, and of columns, which are the same on all ranks.
ROWS, COLUMNS = "_row", "_col"


class SavedState(NamedTuple):
    """The contents of a state."""

    progress: TrainProgress
    tensors: dict[str, torch.Tensor]
    # The optimizer's values that are no tensors.
    values: Json
    # The values that may not change when the run resumes.
    config: Json
    # A digest of the samples of each phase.
    data: list[str]
    best: Best | None
    # The step of the last validation.
    validated: int | None
    # The number of shards that the weights are divided into.
    shards: int = 1


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


def stranger(path: Path) -> ExistingFileError:
    return ExistingFileError(
        f"out: {path} is not of this run, which would write there; move it away, or choose another folder"
    )


# The folder: its run.json, files of others, and the published results


def read_run(out: Path) -> tuple[Json | None, list[str]]:
    """Return the config of the run in `out`, None if there is no run, and the digests of the files it has published."""
    try:
        document = json.loads(read_small(out / RUN))
        return dict(document["config"]), [*map(str, document["published"])]
    except FileNotFoundError:
        # If somebody has removed the file, the states still have its contents.
        documents = [read_document(folder) for _, folder in find_states(out)]
        published = [digest for document in documents for digest in results_in(document).values()]
        return (documents[-1]["config"] if documents else None), published
    except (ValueError, KeyError, TypeError, RecursionError):
        raise stranger(out / RUN) from None


def begin_run(out: Path, parts: Path, config: Json) -> None:
    """Write the run.json of a run with `config`. Raises InputError if `out` has a run with another config."""
    existing, published = read_run(out)
    if existing is not None:
        check_config(config, existing, out)
    write_run(out, parts, config, published)


def write_run(out: Path, parts: Path, config: Json, published: Iterable[str]) -> None:
    document = {"config": dict(config), "published": sorted({*published})}
    with writing(out / RUN):
        write_whole(out / RUN, json.dumps(document, indent=1).encode(), parts, replace=True)


def check_config(config: Json, existing: Json, out: Path) -> None:
    """Raise InputError for the first value of `config` that differs from the config of the run in `out`."""
    for name in sorted(config.keys() | existing.keys()):
        if config.get(name) != existing.get(name):
            got, has = ("none" if value is None else brief(value) for value in (config.get(name), existing.get(name)))
            raise InputError(f"{name}: got {got}, but the run in {out} has {has}; name another folder, or set it back")


def check_folder(out: Path, names: Iterable[str], phases: int, config: Json) -> None:
    """Raise ExistingFileError for files in `out` that this run would write but has not written.

    `names` are the files of its result. Raises InputError if the run in `out` has another config, or has come further
    than `phases`. `config` has no digest of the model yet.
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
        raise stranger(min(foreign_files))
    reached = progress_of(read_document(states[-1][1])).phase + 1 if states else 0
    if reached > phases:
        raise InputError(
            f"phase: got {phases}, but the run in {out} has come to phase {reached}; restore the phases before "
            "it, which are not trained again"
        )


def check_places(out: Path) -> None:
    """Raise ExistingFileError for files of others that have the name of a state."""
    named = [path for path in (out / STEPS).glob("step-*") if NAME.fullmatch(path.name)]
    # The states are listed afterwards, because a thread may add or remove one meanwhile.
    states = {folder for _, folder in find_states(out)}
    foreign_files = [path for path in named if path not in states and path.exists()]
    if foreign_files:
        raise stranger(min(foreign_files))


def publish(out: Path, parts: Path, name: str, state: Path) -> Path:
    """Copy the LoRA of the state in the folder `state` to `out` as `name`. Replaces only a file of this run."""
    file = out / name
    ((lora, digest),) = results_in(read_document(state)).items()
    config, published = read_run(out)
    existing = digest_file(file) if file.exists() else None
    if existing == digest:
        return file
    if existing is not None and existing not in published:
        raise stranger(file)
    check_file(state, lora, digest)
    # The digest is noted before the file exists, in case the process is killed between the two.
    write_run(out, parts, config or {}, [*published, digest])
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


def results_in(document: Json) -> dict[str, str]:
    """Return {name: digest} of the files of a state for other programs: a LoRA, or a folder of weights."""
    files = document["files"].items()
    return {name: digest for name, digest in files if name != TENSORS and not name.startswith(f"{SHARDS}/")}


def note_result(out: Path, parts: Path, state: Path) -> None:
    """Note the digests of the weights in the folder `state` as published, so that copies of them are recognised."""
    config, published = read_run(out)
    if missing := set(results_in(read_document(state)).values()) - set(published):
        write_run(out, parts, config or {}, [*published, *missing])


# Write a state


def write_state(
    out: Path, parts: Path, saved: SavedState, export: Callable[[Path], None], layout: Layout | None = None
) -> Callable[[], None]:
    """Write `saved` and the files of `export` into a folder in `parts`. Returns a function that completes the state.

    All ranks of `layout` call this, and `export` is called on each. Only the first rank calls the returned function,
    once, in any thread. It takes digests, waits for the disk and moves the folder to its place, which takes longer than
    to write the files. The weights may change meanwhile.
    """
    layout = layout or Layout()
    ranks, step = layout.ranks, saved.progress.step
    folder, part = step_folder(out, step), parts / f".state-{step}.part"
    document: Json = {"progress": saved.progress._asdict()}
    document |= {name: getattr(saved, name) for name in ("config", "shards", "values", "data", "best", "validated")}
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
        own_digests = save_tensors(layout, saved.tensors, part)
        digests.update(
            {name: digest for rank_digests in ranks.all_gather(own_digests) for name, digest in rank_digests.items()}
        )
    return complete


def check_finite(tensors: Mapping[str, torch.Tensor], step: int) -> None:
    """Raise TrainingError for values that are not finite after `step` steps. They must not become a state."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise TrainingError(
                f"training: after step {step} {name:.80} is not finite; lower learning_rate, the same command resumes"
            )


def put_state(part: Path, folder: Path, document: Json, digests: Mapping[str, str]) -> None:
    """Add the `document` to the files in `part`, and move them to `folder`. Some of the `digests` are known."""
    names = {path: path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file()}
    files = {**digests, **{name: digest_file(path) for path, name in names.items() if name not in digests}}
    # Last and whole: a part with this file is a complete state, which adopt_states moves to its place later. Its
    # unfinished file is beside the part. Inside, a killed process could leave it in the state for ever.
    write_document(part, part.parent, {**document, "files": files})
    sync(part)
    folder.parent.mkdir(exist_ok=True)
    if folder.exists():
        raise stranger(folder)
    # A virus scanner reads the new files, which takes long if the model is large.
    move_state(part, folder, SCAN_PATIENCE)


def write_document(folder: Path, parts: Path, document: Json) -> None:
    """Write the state.json of the state in `folder` through the folder `parts`."""
    # JSON changes types, such as tuples to lists. The digest is of the document as it will be read.
    content = json.loads(json.dumps(document))
    text = json.dumps({**content, "digest": digest_json(content)}, indent=1, sort_keys=True)
    write_whole(folder / STATE, text.encode(), parts, replace=True)


def note_validation(folder: Path, parts: Path, best: Best | None, validated: int | None) -> None:
    """Add the validation to the state in `folder`. A run that was cancelled or failed has saved the state before it."""
    document = read_document(folder)
    if document["validated"] != validated:
        with writing(folder):
            write_document(folder, parts, {**document, "best": best, "validated": validated})


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


def adopt_states(out: Path) -> None:
    """Move complete states that an earlier run of `out` could not move to their place. The caller holds `out`."""
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
                # A process that was killed after its first state was complete has not created the folder of states.
                folder.parent.mkdir(exist_ok=True)
                move_state(part, folder)
                logger.info("%s was saved by an earlier run that could not move it to %s", folder.name, STEPS)
            elif (folder / STATE).is_file():
                remove(part)
        remove_run(part.parent)


def remove_older(out: Path, parts: Path, keep: int, best: int | None) -> None:
    """Remove all states except the newest `keep`, the state of step `best`, and states with files of others.

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
        written = {STATE, *read_document(folder)["files"]}
    except CheckpointError:
        return False
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()} <= written


# Read a state


def read_state(folder: Path, layout: Layout | None = None) -> SavedState:
    """Return the state in `folder`, with the rows that this rank has in `layout`. Each rank checks some of the files.

    Raises CheckpointError for a broken state, and InputError for 8-bit values of another number of shards.
    """
    from safetensors import SafetensorError

    layout = layout or Layout()
    document = read_document(folder)
    files = sorted(name for name in document["files"] if name == TENSORS or name.startswith(f"{SHARDS}/"))
    for name in files[layout.ranks.rank :: layout.ranks.size]:
        check_file(folder, name, document["files"][name])
    try:
        tensors = read_tensors(layout, folder, document["shards"])
    except SanaError:
        raise
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise broken(folder, error) from error
    values, config, data, best = (document[name] for name in ("values", "config", "data", "best"))
    return SavedState(progress_of(document), tensors, values, config, data, best and Best(*best), document["validated"])


def broken(folder: Path, error: Exception | str) -> CheckpointError:
    reason = brief(error.strerror if isinstance(error, OSError) and error.strerror else error)
    return CheckpointError(
        f"{folder.name}: broken state of a run ({reason}); remove that folder to resume from the one before"
    )


def check_file(folder: Path, name: str, digest: str) -> None:
    """Raise CheckpointError for a file of a state that is missing or has changed."""
    try:
        file_digest = digest_file(folder / name)
    except OSError as error:
        raise broken(folder, error) from error
    if file_digest != digest:
        raise broken(folder, f"{name} is damaged, its digest is another")


def read_document(folder: Path) -> Json:
    """Return the content of the state.json of the state in `folder`. Raises CheckpointError if it is broken."""
    document = load_document(folder)
    if step_folder(folder.parent.parent, progress_of(document).step) != folder:
        raise broken(folder, f"{STATE} is damaged, its digest is another")
    return document


def load_document(folder: Path) -> Json:
    """Return the content of the state.json in `folder`, which may be a state that has not been moved to its place."""
    try:
        document = json.loads(read_small(folder / STATE))
        digest = document.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise broken(folder, error) from error
    if digest != digest_json(document):
        raise broken(folder, f"{STATE} is damaged, its digest is another")
    return document


def progress_of(document: Json) -> TrainProgress:
    return TrainProgress(**document["progress"])


# The tensors of a state


def tensors_of(
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, torch.Tensor] | None,
) -> tuple[dict[str, torch.Tensor], Json]:
    """Return the contents of a state: tensors by name, and values for JSON."""
    optimizer_tensors, values = optimizer_state(optimizer)
    tensors = {f"parameter.{name}": parameter.detach() for name, parameter in parameters.items()}
    tensors.update({f"optimizer.{name}": tensor for name, tensor in optimizer_tensors.items()})
    tensors.update({f"average.{name}": tensor for name, tensor in (average or {}).items()})
    return tensors, values


def restore(
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, torch.Tensor] | None,
    tensors: Mapping[str, torch.Tensor],
    values: Json,
    name: str,
) -> None:
    """Restore parameters, optimizer and average from the contents of the state `name`.

    Raises CheckpointError if the state is of another model.
    """

    def group(prefix: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}

    stored = group("parameter.")
    for key in sorted(parameters.keys() | stored.keys()):
        if key not in stored or key not in parameters or stored[key].shape != parameters[key].shape:
            raise CheckpointError(f"{name}: {key} is missing or of another shape; remove that folder, or name another")
    fill(parameters, stored)
    restore_optimizer(optimizer, group("optimizer."), values)
    if average is not None:
        fill(average, group("average."))


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], Json]:
    """Return the state of an optimizer of `make_optimizer` except its rate: tensors by name, and values for JSON.

    Contiguous tensors are not copied. Write or copy them before the next step.
    """
    (group,) = optimizer.param_groups
    tensors: dict[str, torch.Tensor] = {}
    parameters: list[Json] = []
    for index, parameter in enumerate(group["params"]):
        entry: Json = {"values": {}, "subclasses": {}}
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                entry["values"][name] = value
            elif hasattr(value, "__tensor_flatten__"):
                parts, attributes = value.__tensor_flatten__()
                entry["subclasses"][name] = [encode(attribute) for attribute in attributes]
                for part in parts:
                    tensors[f"{index}.{name}.{part}"] = getattr(value, part).contiguous()
            else:
                tensors[f"{index}.{name}"] = value.contiguous()
        parameters.append(entry)
    values = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and name not in SETTINGS:
            tensors[f"group.{name}"] = value.contiguous()
        elif name not in SETTINGS and value != optimizer.defaults.get(name):
            values[name] = value
    return tensors, {"group": values, "parameters": parameters}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], values: Json) -> None:
    """Restore the state of `optimizer`, which has taken no step, on the devices of its parameters.

    `optimizer` keeps its learning rate, betas and weight decay, because a new phase of a run may have others. `restore`
    and the run's config have checked that parameters and name of the optimizer are the same.
    """
    (group,) = optimizer.param_groups
    for index, (parameter, entry) in enumerate(zip(group["params"], values["parameters"], strict=True)):
        state = dict(entry["values"])
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            if number == str(index) and "." not in name:
                state[name] = placed(name, tensor, parameter, group)
        for name, attributes in entry["subclasses"].items():
            state[name] = eight_bit(f"{index}.{name}.", tensors, attributes, parameter.device)
        if state:
            optimizer.state[parameter] = state
    group.update(values["group"])
    for key, tensor in tensors.items():
        if key.startswith("group."):
            group[key.removeprefix("group.")] = tensor.to(group["params"][0].device, copy=True)


def placed(name: str, tensor: torch.Tensor, parameter: torch.Tensor, group: Json) -> torch.Tensor:
    """Return a copy of `tensor`, the state `name` of `parameter`, on the device where the optimizer expects it."""
    if name == STEP:
        # torch and torchao count steps on the CPU. Only the fused kernels count on the device. Shards store the count
        # as a tensor with one element.
        return tensor.reshape(()).to(parameter.device if group.get("fused") else "cpu", copy=True)
    if tensor.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return tensor.to(parameter.device, copy=True)


def eight_bit(
    prefix: str, tensors: Mapping[str, torch.Tensor], attributes: list[object], device: torch.device
) -> torch.Tensor:
    """Return torchao's 8-bit state from its inner tensors, whose names begin with `prefix`."""
    from torchao.optim.subclass_8bit import OptimState8bit

    parts = {
        name.removeprefix(prefix): tensor.to(device, copy=True)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    return OptimState8bit.__tensor_unflatten__(parts, [decode(attribute) for attribute in attributes])


def encode(attribute: object) -> object:
    """Return an attribute of a tensor for JSON. A dtype is its name in torch."""
    return str(attribute) if isinstance(attribute, torch.dtype) else attribute


def decode(attribute: object) -> object:
    return getattr(torch, attribute.removeprefix("torch.")) if isinstance(attribute, str) else attribute


def owner_of(layout: Layout, name: str) -> tuple[DTensor | None, str]:
    """Return the sharded weight that the state's tensor `name` belongs to, and the name without the parameter's.

    None: the tensor belongs to no sharded weight.
    """
    trained = {} if layout.shards is None else layout.shards.trained
    kind, _, parameter = name.partition(".")
    if kind != "optimizer":
        return trained.get(parameter), ""
    number, _, key = parameter.partition(".")
    return {str(index): weight for index, weight in enumerate(trained.values())}.get(number), key


def is_of_one_shard(key: str) -> bool:
    """Whether an optimizer's tensor describes the elements of one shard in their order, and not rows."""
    return key.endswith(("_scales", "_codes")) or "." in key


def is_shared(key: str) -> bool:
    """Whether an optimizer's tensor is the same on all ranks.

    The shape does not tell, because the step count has the shape of a shard with one element.
    """
    return key == STEP or key.endswith(COLUMNS)


def save_tensors(layout: Layout, tensors: Mapping[str, torch.Tensor], part: Path) -> dict[str, str]:
    """Write the `tensors` of a state into the folder `part`. Returns the digests of the files that have been taken.

    Several ranks write together. Only if every rank has all tensors and torch is older than 2.9, rank 0 writes alone.
    """
    if layout.ranks.size == 1:
        write_tensors(part / TENSORS, tensors)
        return {}
    import torch.distributed.checkpoint as checkpoint

    if layout.shards is None and not hasattr(checkpoint, "HuggingFaceStorageWriter"):
        layout.ranks.run_on_rank0(lambda: write_tensors(part / TENSORS, tensors))
        return {}
    return save_shards(layout, tensors, part)


def save_shards(layout: Layout, tensors: Mapping[str, torch.Tensor], part: Path) -> dict[str, str]:
    """Write this rank's part of the `tensors` of a state into the folder `part`. All ranks call this.

    Returns the digests of the files of this rank by name. If one rank fails, all ranks raise an error.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    def show() -> dict[str, torch.Tensor]:
        # Those files cannot have tensors without a dimension.
        plain = {name: tensor.detach().reshape(tensor.shape or (1,)) for name, tensor in tensors.items()}
        return dict(as_part(layout, name, tensor.contiguous()) for name, tensor in plain.items())

    def finish() -> dict[str, str]:
        files = sorted((part / SHARDS).glob(f"shard-{layout.ranks.rank + 1:05d}-*"))
        for file in files:
            # Each rank waits for its own disk.
            sync(file)
        return {f"{SHARDS}/{file.name}": digest_file(file) for file in files}

    shown = layout.ranks.run_on_all(show)
    failure: BaseException | None = None
    writer = HuggingFaceStorageWriter(str(part / SHARDS), save_distributed=True)
    try:
        with quiet():
            save(shown, storage_writer=writer)
    except CheckpointException as error:
        # All ranks raise it together.
        cause = reason(error)
        if isinstance(cause, KeyboardInterrupt):
            failure = cause
        elif isinstance(cause, OSError):
            failure = OutputError(f"out: cannot write the state ({brief(cause)}); see its rights and its disk")
        else:
            text = brief(str(cause) or type(cause).__name__)
            failure = TrainingError(f"training: cannot write the state ({text}); the same command resumes")
    layout.ranks.agree(failure)
    return layout.ranks.run_on_all(finish)


def as_part(layout: Layout, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return the tensor's name in the files, and the tensor that this rank writes: the whole one or its rows."""
    owner, key = owner_of(layout, name)
    if owner is None:
        return name, tensor
    if is_of_one_shard(key):
        return f"{name}{SHARD_MARK}{layout.part}", tensor
    if is_shared(key):
        return name, tensor
    return name, in_rows(layout, tensor, owner, whole_shape(owner, key))


def whole_shape(owner: DTensor, key: str) -> torch.Size:
    """Return the whole shape of a tensor that is divided like `owner`."""
    return owner.shape[:1] if key.endswith(ROWS) else owner.shape


def in_rows(layout: Layout, tensor: torch.Tensor, owner: DTensor, shape: torch.Size) -> DTensor:
    """Return `tensor` as this rank's rows of a tensor of `shape`, which is divided like `owner`. It is not moved."""
    from torch.distributed.tensor import DTensor

    assert layout.shards is not None
    # A mesh of GPUs would move a tensor of the CPU to the GPU.
    mesh = layout.shards.cpu_mesh if tensor.device.type == "cpu" else owner.device_mesh
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, mesh, owner.placements, run_check=False, shape=shape, stride=stride)


def read_tensors(layout: Layout, folder: Path, count: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the state in `folder` that this rank has in `layout`. They were saved in `count` shards."""
    if (folder / SHARDS).is_dir():
        return read_shards(layout, folder / SHARDS, count)
    from safetensors import safe_open

    tensors = {}
    with safe_open(folder / TENSORS, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            rows = own_rows(layout, name, view.get_shape())
            tensors[name] = file.get_tensor(name) if rows is None else view[rows]
    return tensors


def own_rows(layout: Layout, name: str, shape: Sequence[int]) -> slice | None:
    """Return the rows that this rank has of a tensor of the whole `shape`. None: it has the whole tensor."""
    owner, key = owner_of(layout, name)
    if owner is None or layout.parts == 1:
        return None
    if is_of_one_shard(key):
        raise other_shards(1, layout.parts)
    if is_shared(key):
        return None
    return row_slices(shape[0], layout.parts)[layout.part]


def read_shards(layout: Layout, folder: Path, count: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load

    tensors: dict[str, torch.Tensor] = {}
    for name, about in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        plain, _, number = name.partition(SHARD_MARK)
        if number and count != layout.parts:
            raise other_shards(count, layout.parts)
        if number and int(number) != layout.part:
            continue
        tensors[name] = torch.empty(about.size, dtype=about.properties.dtype)  # type: ignore[union-attr]
        owner, _ = owner_of(layout, plain)
        rows = None if number else own_rows(layout, plain, tensors[name].shape)
        if owner is not None and rows is not None:
            # A copy, so that the whole tensor is freed.
            tensors[name] = in_rows(layout, tensors[name][rows].clone(), owner, tensors[name].shape)
    try:
        with quiet():
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise broken(folder.parent, str(reason(error))) from None
    return {
        name.partition(SHARD_MARK)[0]: tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for name, tensor in tensors.items()
    }


def other_shards(got: int, expected: int) -> InputError:
    return InputError(
        f"optimizer: got 8-bit values in {got} shards for {expected}, expected as many; continue with {got} processes, "
        "or in another folder"
    )


def reason(error: CheckpointException) -> BaseException:
    """Return the error of the first rank that failed."""
    return next(iter(error.failures.values()))[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings of torch.distributed.checkpoint about things that are done here on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
