"""The tensors and values of a state, bit for bit, written by one process or by several ranks, each its part.

Several ranks write safetensors files of torch.distributed.checkpoint, of which each says where in the whole its rows
belong, and any number of them reads those. What is whole on every rank is written by one of them; what is a rank's own,
such as the scales of 8-bit values, has its number behind an @.

An optimizer's tensors are named "<number of the parameter>.<name of the state>", and "group.<name>" for what belongs to
all parameters. One that is a subclass, as torchao's 8-bit values, is written as the tensors that it consists of, with
".<name>" behind. torch.distributed.checkpoint's set_optimizer_state_dict is not used: it casts a state to its
parameter's dtype, codes in 8 bits to fp32 and moments in fp32 beside weights in bf16 to bf16, so that no resumed run is
the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..checkpoints.files import Json, brief
from ..errors import CheckpointError, InputError, OutputError
from ..runtime.atomic_files import digest_file, sync
from .optimizers import restore_average
from .runs import SHARDS, TENSORS, save_whole
from .sharding import Shards
from .train_state import TrainState

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

REMEDY = "resume with the settings that it was saved with, or start again"
# of a group, what is no state: the schedule sets the rate at each step
SETTINGS = ("params", "optimizer", "lr")
OWN = "@"
# of CAME, the means of rows, which lie where the rows do
ROWS = "_row"


def tensors_of(state: TrainState) -> tuple[dict[str, torch.Tensor], Json]:
    """Return all that a state needs of `state`: tensors by name, and values for JSON."""
    own, values = optimizer_state(state.optimizer)
    tensors = {f"parameter.{name}": parameter.detach() for name, parameter in state.parameters.items()}
    tensors.update({f"optimizer.{name}": tensor for name, tensor in own.items()})
    tensors.update({f"average.{name}": tensor for name, tensor in (state.average or {}).items()})
    return tensors, values


def restore(state: TrainState, tensors: dict[str, torch.Tensor], values: Json, name: str) -> None:
    """Give `state` what `tensors_of` returned; `name` is the state's. Raises CheckpointError for another model's."""

    def group(prefix: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(prefix): each for key, each in tensors.items() if key.startswith(prefix)}

    stored = group("parameter.")
    for key, parameter in state.parameters.items():
        if key not in stored or stored[key].shape != parameter.shape:
            raise CheckpointError(f"{name}: {key} is missing or of another shape; remove that folder, or name another")
        with torch.no_grad():
            parameter.copy_(stored[key])
    restore_optimizer(state.optimizer, group("optimizer."), values)
    if state.average is not None:
        restore_average(state.average, group("average."))


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], Json]:
    """Return all that steps have changed in an optimizer of `make_optimizer` but its rate: tensors by name, and values
    that JSON holds. The tensors are its own where they are contiguous: write or copy them before the next step."""
    (group,) = optimizer.param_groups
    tensors: dict[str, torch.Tensor] = {}
    parameters: list[Json] = []
    for index, parameter in enumerate(group["params"]):
        entry: Json = {"shape": list(parameter.shape), "values": {}, "subclasses": {}}
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
    layout = {name: [encode(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    return tensors, {"optimizer": group["optimizer"], "group": values, "parameters": parameters, "tensors": layout}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], values: Json) -> None:
    """Give `optimizer`, which has taken no step, the state that `optimizer_state` returned, on the parameters' devices.

    Learning rate, betas and weight decay stay those of `optimizer`, so that a new phase of a run may have others.
    Raises InputError for the state of another optimizer or of other parameters, and for tensors that are missing or
    differ from what `values` say; `optimizer` is then as it was.
    """
    (group,) = optimizer.param_groups
    check(group, tensors, values)
    for index, (parameter, entry) in enumerate(zip(group["params"], values["parameters"], strict=True)):
        state = dict(entry["values"])
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            if number == str(index) and "." not in name:
                state[name] = placed(tensor, parameter, group)
        for name, attributes in entry["subclasses"].items():
            state[name] = eight_bit(f"{index}.{name}.", tensors, attributes, parameter.device)
        if state:
            optimizer.state[parameter] = state
    group.update(values["group"])
    for key, tensor in tensors.items():
        if key.startswith("group."):
            group[key.removeprefix("group.")] = tensor.to(group["params"][0].device, copy=True)


def check(group: Json, tensors: Mapping[str, torch.Tensor], values: Json) -> None:
    """Raise InputError unless the state is one of the optimizer with `group`, and whole."""
    if values["optimizer"] != group["optimizer"]:
        raise InputError(
            f"optimizer: got the state of {values['optimizer']!s:.40}, expected one of {group['optimizer']}; {REMEDY}"
        )
    saved = [entry["shape"] for entry in values["parameters"]]
    own = [list(parameter.shape) for parameter in group["params"]]
    if saved != own:
        number = next((i for i, pair in enumerate(zip(saved, own, strict=False)) if pair[0] != pair[1]), None)
        got, expected = (
            f"{len(shapes)} parameters" if number is None else f"parameter {number} of shape {shapes[number]}"
            for shapes in (saved, own)
        )
        raise InputError(f"optimizer: got the state of {got}, expected that of {expected}; {REMEDY}")
    found = {name: [encode(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    for name in {**values["tensors"], **found}:
        have, needed = found.get(name), values["tensors"].get(name)
        if have != needed:
            raise InputError(f"optimizer: got {have} as tensor {name:.80}, expected {needed}; {REMEDY}")


def placed(tensor: torch.Tensor, parameter: torch.Tensor, group: Json) -> torch.Tensor:
    """Return a copy of `tensor`, a part of the state of `parameter`, where the optimizer looks for it."""
    if tensor.shape == parameter.shape and tensor.ndim:
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    # torch and torchao count steps on the CPU, for the fused kernels alone on the device
    counts = not tensor.ndim and not group.get("fused")
    return tensor.to("cpu" if counts else parameter.device, copy=True)


def eight_bit(
    prefix: str, tensors: Mapping[str, torch.Tensor], attributes: list[object], device: torch.device
) -> torch.Tensor:
    """Return torchao's state of which the tensors with `prefix` are the parts; it is the only subclass there is."""
    from torchao.optim.subclass_8bit import OptimState8bit

    parts = {
        name.removeprefix(prefix): tensor.to(device, copy=True)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    return OptimState8bit.__tensor_unflatten__(parts, [decode(attribute) for attribute in attributes])


def encode(attribute: object) -> object:
    """Return an attribute of a tensor as JSON has it: a dtype by its name in torch."""
    return str(attribute) if isinstance(attribute, torch.dtype) else attribute


def decode(attribute: object) -> object:
    return getattr(torch, attribute.removeprefix("torch.")) if isinstance(attribute, str) else attribute


def owner_of(name: str, shards: Shards) -> tuple[DTensor | None, str]:
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


def chosen_save(state: TrainState) -> Callable[[Mapping[str, torch.Tensor], Path], dict[str, str]]:
    """Return what writes the tensors of a state: all ranks together, or where one has everything, and torch has no
    files for that yet (2.9 has), the first alone."""
    if state.ranks.size == 1:
        return save_whole
    import torch.distributed.checkpoint as checkpoint

    if state.layout.shards is None and not hasattr(checkpoint, "HuggingFaceStorageWriter"):
        return save_whole if state.ranks.first else lambda tensors, part: {}
    return partial(save_shards, state)


def save_shards(state: TrainState, tensors: Mapping[str, torch.Tensor], part: Path) -> dict[str, str]:
    """Write this rank's part of `tensors`, those of a state, into the folder `part`; all ranks have to.

    Returns the digests of its files by their names in `part`. Raises OutputError on all of them where one cannot write.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    shown = {}
    for name, tensor in tensors.items():
        # a number by itself has no place in those files
        tensor = tensor.detach().reshape(tensor.shape or (1,)).contiguous()
        if state.layout.shards is not None:
            name, tensor = as_part(name, tensor, state, state.layout.shards)
        shown[name] = tensor
    writer = HuggingFaceStorageWriter(str(part / SHARDS), save_distributed=True)
    try:
        with quiet():
            save(shown, storage_writer=writer)
    except CheckpointException as error:
        raise OutputError(
            f"out: cannot write the state ({brief(reason(error))}); see its rights and its disk"
        ) from None
    files = sorted((part / SHARDS).glob(f"shard-{state.ranks.rank + 1:05d}-*"))
    for file in files:
        # each rank waits for its own disk
        sync(file)
    return {f"{SHARDS}/{file.name}": digest_file(file) for file in files}


def as_part(name: str, tensor: torch.Tensor, state: TrainState, shards: Shards) -> tuple[str, torch.Tensor]:
    """Return the name in the files, and the rows of this rank as a part of the whole tensor."""
    owner, key = owner_of(name, shards)
    if owner is None:
        return name, tensor
    if is_own(key):
        return f"{name}{OWN}{state.layout.part}", tensor
    shape = whole_shape(owner, key, tensor.shape)
    return name, tensor if shape is None else in_rows(tensor, owner, shape)


def whole_shape(owner: DTensor, key: str, shape: torch.Size) -> torch.Size | None:
    """Return the shape of all rows of a tensor with the `shape` here, None where it is the same on every rank."""
    if key.endswith(ROWS):
        return owner.shape[:1]
    return owner.shape if shape == owner.to_local().shape else None


def in_rows(tensor: torch.Tensor, owner: DTensor, shape: torch.Size) -> DTensor:
    """Return `tensor` as this rank's rows of one of `shape`, divided as `owner` is."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, owner.device_mesh, owner.placements, run_check=False, shape=shape, stride=stride)


def read_tensors(state: TrainState, folder: Path, count: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the state in `folder` as `state` holds them here; they were in `count` shares.

    Raises CheckpointError for one that is broken, InputError for 8-bit values that were in other shards.
    """
    if (folder / SHARDS).is_dir():
        return read_shards(state, folder, count)
    from safetensors import safe_open

    found = {}
    with safe_open(folder / TENSORS, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            start, end = own_rows(state, name, view.get_shape())
            found[name] = file.get_tensor(name) if end is None else view[start:end]
    return found


def own_rows(state: TrainState, name: str, shape: list[int]) -> tuple[int, int | None]:
    """Return the first row of this rank of a whole tensor, and the one after the last; (0, None) for all of it.

    Raises InputError for the state of an optimizer in 8 bits.
    """
    if state.layout.parts == 1 or state.layout.shards is None:
        return 0, None
    owner, key = owner_of(name, state.layout.shards)
    if owner is None or not shape:
        return 0, None
    if is_own(key):
        raise of_others(1, state.layout.parts)
    if not key.endswith(ROWS) and list(owner.shape) != shape:
        return 0, None
    # torch.chunk's division, which is FSDP's
    each = -(-shape[0] // state.layout.parts)
    start = min(shape[0], state.layout.part * each)
    return start, min(shape[0], start + each)


def read_shards(state: TrainState, folder: Path, count: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load

    place = str(folder / SHARDS)
    try:
        known = HuggingFaceStorageReader(place).read_metadata().state_dict_metadata
        wanted: dict[str, torch.Tensor] = {}
        for name, about in known.items():
            plain, _, number = name.partition(OWN)
            if number and count != state.layout.parts:
                raise of_others(count, state.layout.parts)
            if not number or int(number) == state.layout.part:
                shape, dtype = about.size, about.properties.dtype  # type: ignore[union-attr]
                whole = torch.empty(shape, dtype=dtype)
                wanted[name] = whole if number else empty_part(state, plain, whole)
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


def empty_part(state: TrainState, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return what is filled with this rank's part of a tensor like `whole`."""
    start, end = own_rows(state, name, list(whole.shape))
    owner = None if state.layout.shards is None else owner_of(name, state.layout.shards)[0]
    if end is None or owner is None:
        return whole
    return in_rows(whole[start:end].to(owner.to_local().device, copy=True), owner, whole.shape)


def of_others(got: int, expected: int) -> InputError:
    return InputError(
        f"optimizer: got 8-bit values in {got} shards for {expected}, expected as many; continue with {got} processes, "
        "or in another folder"
    )


def whole_values(state: TrainState, values: Json) -> Json:
    """Return the `values` of `optimizer_state`, whose shapes are those of this rank's rows, with those of the whole."""
    if state.layout.shards is None:
        return values
    owners = list(state.layout.shards.trained.values())
    parameters = [
        {**entry, "shape": list(owner.shape)} for entry, owner in zip(values["parameters"], owners, strict=True)
    ]
    layout = {}
    for name, (dtype, own) in values["tensors"].items():
        owner, key = owner_of(f"optimizer.{name}", state.layout.shards)
        shape = None if owner is None or is_own(key) else whole_shape(owner, key, torch.Size(own))
        layout[name] = [dtype, own if shape is None else list(shape)]
    return {**values, "parameters": parameters, "tensors": layout}


def own_values(state: TrainState, values: Json, tensors: Mapping[str, torch.Tensor]) -> Json:
    """Return the `values` of a state with the shapes of this rank's rows, which `tensors` have; shapes of another model
    stay, and are refused where they are compared."""
    if state.layout.shards is None:
        return values
    owners = list(state.layout.shards.trained.values())
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


def unpacked(tensors: dict[str, torch.Tensor], values: Json) -> dict[str, torch.Tensor]:
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
