"""The tensors of a state that several ranks write, each its part of it, and that any number of them reads.

They are safetensors files of torch.distributed.checkpoint, of which each says where in the whole its rows belong. What
is whole on every rank is written by one of them; what is a rank's own, such as the scales of 8-bit numbers, has its
number behind an @.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.files import brief
from ..errors import CheckpointError, InputError, OutputError
from ..runtime.atomic_files import digest_file, sync
from .learner import Learner
from .runs import SHARDS, TENSORS, save_whole
from .sharding import Shards

OWN = "@"
# of CAME, the means of rows, which lie where the rows do
ROWS = "_row"


def shard_count(learner: Learner) -> int:
    """Return in how many shares the weights lie: 1 where each rank has all of them."""
    return 1 if learner.shards is None else learner.ranks.size // learner.settings.parallel.replicas


def shard_number(learner: Learner) -> int:
    """Return which of the shares is this rank's."""
    return 0 if learner.shards is None else learner.ranks.rank % shard_count(learner)


def owner_of(name: str, shards: Shards) -> tuple[Any, str]:
    """Return the weight that the tensor of this name in a state belongs to, None for that of all, and its own name."""
    kind, _, rest = name.partition(".")
    if kind != "optimizer":
        return shards.trained.get(rest), ""
    number, _, key = rest.partition(".")
    owners = list(shards.trained.values())
    return (owners[int(number)] if number.isdigit() and int(number) < len(owners) else None), key


def is_own(key: str) -> bool:
    """Whether a tensor of an optimizer's state belongs to the elements of a rank in their order, not to rows."""
    return key.endswith(("_scales", "_codes")) or "." in key


def chosen_save(learner: Learner) -> Callable[[Mapping[str, torch.Tensor], Path], dict[str, str]]:
    """Return what writes the tensors of a state: all ranks together, or where one has everything, and torch has no
    files for that yet (2.9 has), the first alone."""
    if learner.ranks.size == 1:
        return save_whole
    import torch.distributed.checkpoint as checkpoint

    if learner.shards is None and not hasattr(checkpoint, "HuggingFaceStorageWriter"):
        return save_whole if learner.ranks.first else lambda tensors, part: {}
    return partial(save_shards, learner)


def save_shards(learner: Learner, tensors: Mapping[str, torch.Tensor], part: Path) -> dict[str, str]:
    """Write this rank's part of `tensors`, those of a state, into the folder `part`; all ranks have to.

    Returns the digests of its files by their names in `part`. Raises OutputError on all of them where one cannot write.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    shown = {}
    for name, tensor in tensors.items():
        # a number by itself has no place in those files
        tensor = tensor.detach().reshape(tensor.shape or (1,)).contiguous()
        if learner.shards is not None:
            name, tensor = as_part(name, tensor, learner, learner.shards)
        shown[name] = tensor
    writer = HuggingFaceStorageWriter(str(part / SHARDS), save_distributed=True)
    try:
        with quiet():
            save(shown, storage_writer=writer)
    except CheckpointException as error:
        raise OutputError(
            f"out: cannot write the state ({brief(reason(error))}); see its rights and its disk"
        ) from None
    files = sorted((part / SHARDS).glob(f"shard-{learner.ranks.rank + 1:05d}-*"))
    for file in files:
        # each rank waits for its own disk
        sync(file)
    return {f"{SHARDS}/{file.name}": digest_file(file) for file in files}


def as_part(name: str, tensor: torch.Tensor, learner: Learner, shards: Shards) -> tuple[str, Any]:
    """Return the name in the files, and the rows of this rank as a part of the whole tensor."""
    owner, key = owner_of(name, shards)
    if owner is None:
        return name, tensor
    if is_own(key):
        return f"{name}{OWN}{shard_number(learner)}", tensor
    shape = whole_shape(owner, key, tensor.shape)
    return name, tensor if shape is None else in_rows(tensor, owner, shape)


def whole_shape(owner: Any, key: str, shape: torch.Size) -> torch.Size | None:
    """Return the shape of all rows of a tensor with the `shape` here, None where it is the same on every rank."""
    if key.endswith(ROWS):
        return owner.shape[:1]
    return owner.shape if shape == owner.to_local().shape else None


def in_rows(tensor: torch.Tensor, owner: Any, shape: torch.Size) -> Any:
    """Return `tensor` as this rank's rows of one of `shape`, divided as `owner` is."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, owner.device_mesh, owner.placements, run_check=False, shape=shape, stride=stride)


def read_tensors(learner: Learner, folder: Path, count: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the state in `folder` as `learner` holds them here; they were in `count` shares.

    Raises CheckpointError for one that is broken, InputError for 8-bit numbers that were in other shares.
    """
    if (folder / SHARDS).is_dir():
        return read_shards(learner, folder, count)
    from safetensors import safe_open

    found = {}
    with safe_open(folder / TENSORS, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            start, end = own_rows(learner, name, view.get_shape())
            found[name] = file.get_tensor(name) if end is None else view[start:end]
    return found


def own_rows(learner: Learner, name: str, shape: list[int]) -> tuple[int, int | None]:
    """Return the first row of this rank of a whole tensor, and the one after the last; (0, None) for all of it.

    Raises InputError for the state of an optimizer in 8 bits.
    """
    if shard_count(learner) == 1 or learner.shards is None:
        return 0, None
    owner, key = owner_of(name, learner.shards)
    if owner is None or not shape:
        return 0, None
    if is_own(key):
        raise of_others(1, shard_count(learner))
    if not key.endswith(ROWS) and list(owner.shape) != shape:
        return 0, None
    # torch.chunk's division, which is FSDP's
    each = -(-shape[0] // shard_count(learner))
    start = min(shape[0], shard_number(learner) * each)
    return start, min(shape[0], start + each)


def read_shards(learner: Learner, folder: Path, count: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load

    place = str(folder / SHARDS)
    try:
        known = HuggingFaceStorageReader(place).read_metadata().state_dict_metadata
        wanted: dict[str, Any] = {}
        for name, about in known.items():
            plain, _, number = name.partition(OWN)
            if number and count != shard_count(learner):
                raise of_others(count, shard_count(learner))
            if not number or int(number) == shard_number(learner):
                shape, dtype = about.size, about.properties.dtype  # type: ignore[union-attr]
                whole = torch.empty(shape, dtype=dtype)
                wanted[name] = whole if number else empty_part(learner, plain, whole)
        with quiet():
            load(wanted, storage_reader=HuggingFaceStorageReader(place), no_dist=True)
    except (CheckpointException, KeyError, ValueError, RuntimeError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise CheckpointError(
            f"{folder.name}: broken state of a run ({brief(reason(error))}); remove that folder to resume from the one "
            "before"
        ) from None
    return {
        name.partition(OWN)[0]: each.to_local() if hasattr(each, "to_local") else each for name, each in wanted.items()
    }


def empty_part(learner: Learner, name: str, whole: torch.Tensor) -> Any:
    """Return what is filled with this rank's part of a tensor like `whole`."""
    start, end = own_rows(learner, name, list(whole.shape))
    if end is None or learner.shards is None:
        return whole
    owner, _ = owner_of(name, learner.shards)
    return in_rows(whole[start:end].to(owner.to_local().device, copy=True), owner, whole.shape)


def of_others(got: int, expected: int) -> InputError:
    return InputError(
        f"optimizer: got 8-bit numbers in {got} shares for {expected}, expected as many; go on with {got} processes, "
        "or in another folder"
    )


def whole_values(learner: Learner, values: dict[str, Any]) -> dict[str, Any]:
    """Return the `values` of `optimizer_state`, whose shapes are those of this rank's rows, with those of the whole."""
    if learner.shards is None:
        return values
    owners = list(learner.shards.trained.values())
    parameters = [
        {**entry, "shape": list(owner.shape)} for entry, owner in zip(values["parameters"], owners, strict=True)
    ]
    layout = {}
    for name, (dtype, own) in values["tensors"].items():
        owner, key = owner_of(f"optimizer.{name}", learner.shards)
        shape = None if owner is None or is_own(key) else whole_shape(owner, key, torch.Size(own))
        layout[name] = [dtype, own if shape is None else list(shape)]
    return {**values, "parameters": parameters, "tensors": layout}


def own_values(learner: Learner, values: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return `values`, as a state has them, with the shapes of this rank's rows, which `tensors` have.

    Shapes that are of another model stay, and are refused where they are compared.
    """
    if learner.shards is None:
        return values
    owners = list(learner.shards.trained.values())
    parameters = values["parameters"]
    if [entry["shape"] for entry in parameters] == [list(owner.shape) for owner in owners]:
        parameters = [
            {**entry, "shape": list(owner.to_local().shape)} for entry, owner in zip(parameters, owners, strict=True)
        ]
    layout = dict(values["tensors"])
    for name, (dtype, _) in values["tensors"].items():
        if f"optimizer.{name}" in tensors:
            layout[name] = [dtype, list(tensors[f"optimizer.{name}"].shape)]
    return {**values, "parameters": parameters, "tensors": layout}


def unpacked(tensors: dict[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return `tensors` with the numbers by themselves that are written as lists of one."""
    single = {f"optimizer.{name}" for name, (_, shape) in values["tensors"].items() if not shape}
    return {name: each.reshape(()) if name in single else each for name, each in tensors.items()}


def reason(error: BaseException) -> Exception:
    """Return the first rank's error within one of torch.distributed.checkpoint, or the error itself."""
    failures = getattr(error, "failures", None)
    found = next(iter(failures.values()))[0] if failures else error
    return found if isinstance(found, Exception) else OSError(str(found))


@contextmanager
def quiet() -> Iterator[None]:
    """A context without torch.distributed.checkpoint's warnings of what is done here on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
