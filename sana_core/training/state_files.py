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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import CheckpointError, InputError, OutputError, TrainingError
from ..runtime.atomic_files import digest_file, sync
from ..runtime.text import Json, brief
from .optimizers import fill
from .runs import SHARDS, TENSORS, broken, save_whole
from .sharding import Layout, row_slices

if TYPE_CHECKING:
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.tensor import DTensor

# of a group, what is no state: the schedule sets the rate at each step
SETTINGS = ("params", "optimizer", "lr")
# the one state that is a number by itself
STEP = "step"
OWN = "@"
# of CAME, the means of rows, which lie where the rows do
ROWS = "_row"
# CAME's means of columns, which are the same on all ranks.
COLUMNS = "_col"


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
    """Return all that steps have changed in an optimizer of `make_optimizer` but its rate: tensors by name, and values
    that JSON holds. The tensors are its own where they are contiguous: write or copy them before the next step."""
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
    """Give `optimizer`, which has taken no step, the state that `optimizer_state` returned, on the parameters' devices.

    Learning rate, betas and weight decay stay those of `optimizer`, so that a new phase of a run may have others. It is
    for the same parameters and of the same name, which `restore` and the run's config see to.
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
    """Return a copy of `tensor`, the state `name` of `parameter`, where the optimizer looks for it."""
    if name == STEP:
        # torch and torchao count on the CPU, for the fused kernels alone on the device; shards hold it as a list of one
        return tensor.reshape(()).to(parameter.device if group.get("fused") else "cpu", copy=True)
    if tensor.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return tensor.to(parameter.device, copy=True)


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


def owner_of(layout: Layout, name: str) -> tuple[DTensor | None, str]:
    """Return the weight in rows that the tensor of this name in a state belongs to, None where there is no such weight,
    and the tensor's own name."""
    trained = {} if layout.shards is None else layout.shards.trained
    kind, _, rest = name.partition(".")
    if kind != "optimizer":
        return trained.get(rest), ""
    number, _, key = rest.partition(".")
    return {str(index): each for index, each in enumerate(trained.values())}.get(number), key


def is_own(key: str) -> bool:
    """Whether a tensor of an optimizer's state belongs to the elements of a rank in their order, not to rows."""
    return key.endswith(("_scales", "_codes")) or "." in key


def is_shared(key: str) -> bool:
    """Whether an optimizer's tensor of a weight is the same on all ranks. The shape does not say it: the step count has
    the shape of a shard of one element."""
    return key == STEP or key.endswith(COLUMNS)


def chosen_save(layout: Layout) -> Callable[[Mapping[str, torch.Tensor], Path], dict[str, str]]:
    """Return what writes the tensors of a state: all ranks together, or where one has everything, and torch has no
    files for that yet (2.9 has), the first alone."""
    ranks = layout.ranks
    if ranks.size == 1:
        return save_whole
    import torch.distributed.checkpoint as checkpoint

    if layout.shards is None and not hasattr(checkpoint, "HuggingFaceStorageWriter"):
        return lambda tensors, part: ranks.run_on_rank0(partial(save_whole, tensors, part)) or {}
    return partial(save_shards, layout)


def save_shards(layout: Layout, tensors: Mapping[str, torch.Tensor], part: Path) -> dict[str, str]:
    """Write this rank's part of `tensors`, those of a state, into the folder `part`; all ranks have to.

    Returns the digests of its files by their names in `part`. Where one rank fails all raise: OutputError if the
    system refuses to write, TrainingError for other errors, and KeyboardInterrupt.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    def show() -> dict[str, torch.Tensor]:
        # a number by itself has no place in those files
        plain = {name: tensor.detach().reshape(tensor.shape or (1,)) for name, tensor in tensors.items()}
        return dict(as_part(layout, name, tensor.contiguous()) for name, tensor in plain.items())

    def finish() -> dict[str, str]:
        files = sorted((part / SHARDS).glob(f"shard-{layout.ranks.rank + 1:05d}-*"))
        for file in files:
            # each rank waits for its own disk
            sync(file)
        return {f"{SHARDS}/{file.name}": digest_file(file) for file in files}

    shown = layout.ranks.run_on_all(show)
    failure: BaseException | None = None
    writer = HuggingFaceStorageWriter(str(part / SHARDS), save_distributed=True)
    try:
        with quiet():
            save(shown, storage_writer=writer)
    except CheckpointException as error:
        # all ranks raise it together
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
    """Return the name in the files, and what this rank has of the tensor: all of it, or its rows as a part of it."""
    owner, key = owner_of(layout, name)
    if owner is None:
        return name, tensor
    if is_own(key):
        return f"{name}{OWN}{layout.part}", tensor
    if is_shared(key):
        return name, tensor
    return name, in_rows(layout, tensor, owner, whole_shape(owner, key))


def whole_shape(owner: DTensor, key: str) -> torch.Size:
    """Return the shape of all rows of a tensor that is divided as `owner` is."""
    return owner.shape[:1] if key.endswith(ROWS) else owner.shape


def in_rows(layout: Layout, tensor: torch.Tensor, owner: DTensor, shape: torch.Size) -> DTensor:
    """Return `tensor` as this rank's rows of one of `shape`, divided as `owner` is, in the memory where it is."""
    from torch.distributed.tensor import DTensor

    assert layout.shards is not None
    # A mesh of GPUs would move a tensor of the CPU to the GPU.
    mesh = layout.shards.cpu_mesh if tensor.device.type == "cpu" else owner.device_mesh
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, mesh, owner.placements, run_check=False, shape=shape, stride=stride)


def read_tensors(layout: Layout, folder: Path, count: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the state in `folder` as `state` holds them here; they were in `count` shares.

    Raises InputError for 8-bit values that were in other shards, and as `read_state` takes it for a broken state.
    """
    if (folder / SHARDS).is_dir():
        return read_shards(layout, folder / SHARDS, count)
    from safetensors import safe_open

    found = {}
    with safe_open(folder / TENSORS, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            rows = own_rows(layout, name, view.get_shape())
            found[name] = file.get_tensor(name) if rows is None else view[rows]
    return found


def own_rows(layout: Layout, name: str, shape: Sequence[int]) -> slice | None:
    """Return the rows of this rank of a tensor of the whole `shape`, None for all of it.

    Raises InputError for the state of an optimizer in 8 bits.
    """
    owner, key = owner_of(layout, name)
    if owner is None or layout.parts == 1:
        return None
    if is_own(key):
        raise of_others(1, layout.parts)
    if is_shared(key):
        return None
    return row_slices(shape[0], layout.parts)[layout.part]


def read_shards(layout: Layout, folder: Path, count: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load

    wanted: dict[str, torch.Tensor] = {}
    for name, about in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        plain, _, number = name.partition(OWN)
        if number and count != layout.parts:
            raise of_others(count, layout.parts)
        if number and int(number) != layout.part:
            continue
        wanted[name] = torch.empty(about.size, dtype=about.properties.dtype)  # type: ignore[union-attr]
        owner, _ = owner_of(layout, plain)
        rows = None if number else own_rows(layout, plain, wanted[name].shape)
        if owner is not None and rows is not None:
            # A copy, so that the whole tensor is freed.
            wanted[name] = in_rows(layout, wanted[name][rows].clone(), owner, wanted[name].shape)
    try:
        with quiet():
            load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise broken(folder.parent, str(reason(error))) from None
    return {
        name.partition(OWN)[0]: each.to_local() if hasattr(each, "to_local") else each for name, each in wanted.items()
    }


def of_others(got: int, expected: int) -> InputError:
    return InputError(
        f"optimizer: got 8-bit values in {got} shards for {expected}, expected as many; continue with {got} processes, "
        "or in another folder"
    )


def reason(error: CheckpointException) -> BaseException:
    """Return the first rank's error within one of torch.distributed.checkpoint."""
    return next(iter(error.failures.values()))[0]


@contextmanager
def quiet() -> Iterator[None]:
    """A context without torch.distributed.checkpoint's warnings of what is done here on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
