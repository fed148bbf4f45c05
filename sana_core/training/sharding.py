"""How the ranks of a run divide a model, a step, and the tensors of a saved state.

Each rank holds the whole model (DDP) or rows of it (FSDP2). The optimizer, moving average and rounding of a shard work
on plain tensors, the rows of this rank. Ranks communicate for sums over whole weights, such as norms of gradients and
CAME's means of columns, and to gather weights for a file.

Several ranks write the tensors of a state as safetensors files of torch.distributed.checkpoint. Each file records which
rows of a tensor it has, so any number of ranks can read them. One rank writes the tensors that all ranks have. A tensor
that only one rank has, such as the scales of its 8-bit values, is named with @ and the number of the shard.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..checkpoints.headers import write_tensors
from ..errors import InputError, OutputError, TrainingError, VersionError
from ..runtime.atomic_files import digest_file, sync
from ..runtime.text import Json, brief
from .optimizers import DDP, OFFLOADED, STEP
from .ranks import ALONE, Ranks
from .settings import TrainingSettings

if TYPE_CHECKING:
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# Names of SANA's block, the default: two from NVIDIA's code (SanaMSBlock in its training), and one from diffusers.
BLOCKS = ("", "SanaBlock", "SanaMSBlock", "SanaTransformerBlock")
# Number of classes that an error lists.
LISTED = 8
# The file, or the folder of several ranks, with the tensors of a state.
TENSORS, SHARDS = "state.safetensors", "shards"
# Separates the name of a tensor from the number of the only shard that has it.
SHARD_MARK = "@"
# CAME's means of rows, which are divided like the rows, and of columns, which are the same on all ranks.
ROWS, COLUMNS = "_row", "_col"
# Indices of samples of one shape, and whether the microbatch is a filler, which only accompanies the other ranks.
Microbatch = tuple[list[int], bool]


class Shards(NamedTuple):
    """A model whose weights are divided into rows."""

    # The trained weights by name.
    trained: dict[str, DTensor]
    # The transformer, and the ControlNet if one is trained.
    models: Sequence[nn.Module]
    # The same models without weights. Copies of them are filled with gathered weights.
    empty_models: Sequence[nn.Module]
    # The ranks in the order of the weights' mesh, for tensors in the CPU's memory.
    cpu_mesh: DeviceMesh

    def drop_step(self) -> None:
        """Free the gathered weights and the gradients of a failed step."""
        from torch.distributed.fsdp import FSDPModule

        for model in self.models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        for weight in self.trained.values():
            weight.grad = None


class Layout(NamedTuple):
    """How the ranks hold the model."""

    ranks: Ranks = ALONE
    # DDP only: its wrapper around the trained model.
    replica: nn.Module | None = None
    # FSDP only.
    shards: Shards | None = None

    @property
    def shard_count(self) -> int:
        """The number of shards that the weights are divided into. 1: each rank has whole weights."""
        if self.shards is None:
            return 1
        mesh = next(iter(self.shards.trained.values())).device_mesh
        return mesh.size(mesh.ndim - 1)

    @property
    def shard(self) -> int:
        """The number of this rank's shard."""
        return self.ranks.rank % self.shard_count

    @contextmanager
    def backward(self, last: bool) -> Iterator[Callable[[Callable[[], torch.Tensor]], torch.Tensor]]:
        """Give a function that computes a loss for a backward in this context. DDP sums gradients in the `last` one."""
        replica: Any = self.replica
        if replica is None:
            # FSDP sums gradients in each backward. Gradients of whole weights would take the memory of the model.
            yield lambda compute: compute()
            return
        with nullcontext() if last else replica.no_sync():
            yield replica

    def clip(self, parameters: Mapping[str, nn.Parameter], limit: float) -> float:
        """Limit the norm of all gradients together to `limit`. 0: no limit. Returns the norm before that.

        Gradients of sharded weights are moved to `parameters`, which are this rank's rows.
        """
        # torch has no value for "no clipping". Gradients stay the same bit by bit under an infinite limit.
        limit = limit or math.inf
        if self.shards is None:
            return float(nn.utils.clip_grad_norm_(list(parameters.values()), limit))
        for name, parameter in parameters.items():
            owner: Any = self.shards.trained[name]
            parameter.grad = None if owner.grad is None else owner.grad.to_local()
            owner.grad = None
        gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
        local, replicas = float(nn.utils.get_total_norm(gradients)), self.ranks.size // self.shard_count
        norm = (self.ranks.total(local**2)[0] / replicas) ** 0.5
        nn.utils.clip_grads_with_norm_(list(parameters.values()), limit, torch.tensor(norm))
        return norm


def lay_out(models: Sequence[nn.Module], settings: TrainingSettings, ranks: Ranks) -> Layout:
    """Divide `models` among `ranks` by `settings.parallel`, if a launcher has started them."""
    if not ranks.launched:
        return Layout(ranks)
    if settings.parallel.kind != DDP:
        return Layout(ranks, None, shard(models, settings, ranks))
    from torch.nn.parallel import DistributedDataParallel

    # No buffer changes in training. torch 2.14 has renamed the argument.
    arguments = signature(DistributedDataParallel.__init__).parameters
    options: Json = {"forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers": False}
    # Gradients become means over the ranks and stay in the buckets that are sent.
    return Layout(ranks, DistributedDataParallel(DDPModule(models[-1]), gradient_as_bucket_view=True, **options))


class DDPModule(nn.Module):
    """The module that DDP wraps. It has the parameters of `model`. Its forward calls a function that uses `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return compute()


def shard(models: Sequence[nn.Module], settings: TrainingSettings, ranks: Ranks) -> Shards:
    """Divide the weights of `models`, the transformer and a ControlNet if one is trained, into rows on the ranks.

    FSDP gathers the weights of a block when it runs, and the weights outside of blocks when the model runs. Rank 0
    holds the weights at first, and broadcasts them block by block.
    """
    from torch.distributed import fsdp
    from torch.distributed.tensor import DTensor

    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_force_sum_reduction_for_comms"):
        raise VersionError(
            f"parallel: fsdp needs torch 2.9 or newer, got {torch.__version__}; update it, or choose ddp"
        )
    empty: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for model in models
        for parameter in model.parameters()
    }
    empty_models = copy.deepcopy(list(models), empty)
    device = ranks.device
    assert device is not None
    mesh = make_mesh(device.type, settings, ranks)
    # Weights that stay gathered after a forward would be stale after a validation has replaced them by the average.
    options: Json = {"mesh": mesh, "reshard_after_forward": True}
    if not settings.method.is_adapter and settings.dtype != "float32":
        # Weights in fp32 are sent as bf16, in which the model computes. Gradients are summed in fp32.
        compute = getattr(torch, settings.dtype)
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    if settings.parallel.kind == OFFLOADED:
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=device.type != "cpu")
    if len(models) == 1:
        outside = [models[0]]
    else:
        # A ControlNet and its transformer share the embeddings around their blocks and call them directly, so the
        # embeddings stay whole.
        controlnet: Any = models[1]
        outside = [controlnet.input_block, *controlnet.controlnet_blocks]
    for block in [*find_blocks(models, settings.parallel.block), *outside]:
        if not isinstance(block, fsdp.FSDPModule):
            # The dict ends with the call, so that the whole weights of a block are freed once it has its rows.
            materialize_params(block, {}, device)
            fsdp.fully_shard(block, **options)
    # The models may share parameters that are not divided.
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for model in models:
        # FSDP moves only the parameters that it divides and the buffers of their modules.
        materialize_params(model, replacements, device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
            if isinstance(module, fsdp.FSDPModule):
                # gloo has returned sums as means of a reduce-scatter (pytorch issue 162338). Sums are right everywhere.
                module.set_force_sum_reduction_for_comms(True)
    trained: dict[str, Any] = {
        name: parameter for name, parameter in models[-1].named_parameters() if parameter.requires_grad
    }
    for name, parameter in trained.items():
        # Its gradients would not be summed.
        if not isinstance(parameter, DTensor):
            raise InputError(
                f"block: got {settings.parallel.block:.60}, which leaves {name:.80} whole on each rank; choose "
                f"{BLOCKS[-1]}"
            )
    return Shards(trained, models, empty_models, mesh if device.type == "cpu" else make_mesh("cpu", settings, ranks))


def row_slices(rows: int, parts: int) -> list[slice]:
    """Return the rows of each part as FSDP and torch.chunk divide them. The last parts may have fewer rows, or none."""
    size = -(-rows // parts)
    starts = [min(rows, part * size) for part in range(parts)]
    return [slice(start, min(rows, start + size)) for start in starts]


def local_parameters(layout: Layout) -> dict[str, nn.Parameter]:
    """Return the rows of the trained weights on this rank, as parameters that share the memory of the model.

    Their attribute `shard_sizes` has the number of elements on each rank. Optimizers decide by these numbers.
    """
    assert layout.shards is not None
    parameters = {}
    for name, weight in layout.shards.trained.items():
        parameter = nn.Parameter(weight.to_local().detach())
        slices = row_slices(len(weight), layout.shard_count)
        row_size = weight.numel() // len(weight)
        parameter.shard_sizes = tuple((rows.stop - rows.start) * row_size for rows in slices)  # type: ignore[attr-defined]
        parameters[name] = parameter
    return parameters


def materialize_params(module: nn.Module, replacements: dict[nn.Parameter, nn.Parameter], device: torch.device) -> None:
    """Copy the parameters of `module` that are not divided yet from the first rank to `device` on all ranks.

    `replacements` maps parameters to their replacements, because several modules may share one.
    """
    from torch.distributed.tensor import DTensor

    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter not in replacements:
                full = parameter.detach()
                if full.is_meta:
                    full = torch.empty_like(full, device="cpu")
                torch.distributed.broadcast(full, src=0)
                replacement = nn.Parameter(full.to(device), parameter.requires_grad)
                replacements[parameter] = replacements[replacement] = replacement
            owner._parameters[name] = replacements[parameter]


def make_mesh(kind: str, settings: TrainingSettings, ranks: Ranks) -> DeviceMesh:
    """Return the ranks as `settings.parallel` arranges them, for tensors on devices of this `kind`."""
    from torch.distributed.device_mesh import init_device_mesh

    replicas = settings.parallel.replicas
    if replicas > 1:
        return init_device_mesh(kind, (replicas, ranks.size // replicas), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(kind, (ranks.size,), mesh_dim_names=("shard",))


def find_blocks(models: Sequence[nn.Module], name: str) -> list[nn.Module]:
    """Return the modules of the class `name`. Empty: SANA's blocks."""
    kind = type(models[0].transformer_blocks[0]).__name__  # type: ignore[index,union-attr]
    class_name = kind if name in BLOCKS else name
    matching_blocks = [module for model in models for module in model.modules() if type(module).__name__ == class_name]
    if not matching_blocks:
        sizes: dict[str, list[int]] = {}
        for module in list(models[0].modules())[1:]:
            count = sum(parameter.numel() for parameter in module.parameters())
            if count and not isinstance(module, nn.ModuleList):
                sizes.setdefault(type(module).__name__, []).append(count)
        # The largest classes with their number and parameters.
        largest = sorted(sizes.items(), key=lambda size: -max(size[1]))[:LISTED]
        classes = ", ".join(f"{name} ({len(counts)} of {max(counts):,} parameters)" for name, counts in largest)
        raise InputError(f"block: got {name:.60}, expected one of {classes}; {kind} is the default")
    return matching_blocks


def describe_layout(layout: Layout, parameters: Mapping[str, nn.Parameter], device: torch.device) -> str:
    """Describe how the ranks hold the trained `parameters`, by looking at the modules."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    ranks, shards = layout.ranks, layout.shards
    backend = torch.distributed.get_backend()
    if shards is None:
        count = sum(parameter.numel() for parameter in parameters.values())
        return f"DDP over {backend}: {ranks.size} processes, {count:,} trained parameters, all of them on each"
    modules = {module for model in shards.models for module in model.modules()}
    held = {parameter for model in shards.models for parameter in model.parameters()}
    blocks = sum(isinstance(module, FSDPModule) for module in modules)
    total = sum(parameter.numel() for parameter in held)
    local = sum((parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel() for parameter in held)
    offloaded = any(parameter.device.type == "cpu" for parameter in parameters.values()) and device.type != "cpu"
    return (
        f"FSDP over {backend}: {ranks.size} processes, {blocks} gathered modules, {total:,} parameters, of which "
        f"{local:,} lie on this one" + (", in the memory of the CPU" if offloaded else "")
    )


def gather(
    shards: Shards, device: torch.device, dtype: torch.dtype | None, first: bool, only_trained: bool
) -> list[nn.Module]:
    """Return the models with whole weights on `device` on the first rank, no models on the others.

    Trained weights are converted to `dtype`. None: they keep theirs. One weight after another is gathered. With
    `only_trained` only the trained weights are gathered, and the embeddings that a ControlNet shares with its
    transformer. All other weights stay empty.
    """
    models = copy.deepcopy(list(shards.empty_models)) if first else []
    for number, model in enumerate(shards.models):
        filled = {}
        shares_embeddings = number > 0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or shares_embeddings or not only_trained:
                full = parameter.detach()
                if parameter.requires_grad and dtype is not None:
                    # Converted before it is gathered, so that no rank holds it in both dtypes.
                    full = full.to(dtype)
                full = full.full_tensor() if hasattr(full, "full_tensor") else full
                if first:
                    filled[name] = full.to(device, copy=True)
        if first:
            models[number].load_state_dict(filled, strict=False, assign=True)
    for module in (module for model in models for module in model.modules()):
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return models


def check_launch(settings: TrainingSettings, ranks: Ranks) -> None:
    """Raise InputError if `ranks` cannot train together as `settings` say."""
    check_steps(settings, ranks.size)
    if settings.parallel.kind != DDP and not ranks.launched:
        raise InputError(
            f"parallel: got {settings.parallel.kind} in a process that no launcher has started, expected several; "
            "start with torchrun, see docs/training-command.md, or choose ddp"
        )


def check_steps(settings: TrainingSettings, count: int) -> None:
    """Raise InputError unless each step has an image for each of `count` ranks, and the replicas are of equal size."""
    for number, phase in enumerate(settings.phase, 1):
        images = phase.batch * phase.accumulate
        if images < count:
            raise InputError(
                f"batch: got {phase.batch} and accumulate {phase.accumulate} in phase {number} for {count} processes, "
                f"expected {count} images in a step; set accumulate to {-(-count // phase.batch)}"
            )
    if count % settings.parallel.replicas:
        raise InputError(
            f"replicas: got {settings.parallel.replicas} for {count} processes, expected a number that divides them"
        )


def microbatches(step_batches: Sequence[Sequence[int]], rank: int, count: int) -> list[Microbatch]:
    """Return the microbatches of rank number `rank` in a step with the batches `step_batches`.

    All `count` ranks get the same number, because ranks with fewer would leave the others waiting for gradients. Whole
    batches are dealt out. If there are fewer batches than ranks, they are split. A rank without a batch for the last
    round gets a filler of one image, whose loss is multiplied by 0.
    """
    batches = list(step_batches)
    if len(step_batches) < count:
        parts = -(-count // len(step_batches))
        batches = [part for batch in step_batches for part in split(batch, parts)]
    rounds = -(-len(batches) // count)
    learned = [(list(batch), False) for batch in batches[rank::count]]
    return learned + [(list(batches[0][:1]), True)] * (rounds - len(learned))


def split(batch: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Return `batch` in at most `parts` parts, whose lengths differ by at most one."""
    parts = min(parts, len(batch))
    bounds = [number * len(batch) // parts for number in range(parts + 1)]
    return [batch[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


# The tensors of a state


def save_tensors(layout: Layout, tensors: Mapping[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Write the `tensors` of a state into `folder`. Returns the digests of the files that have been taken.

    Several ranks write together. Only if every rank has all tensors and torch is older than 2.9, rank 0 writes alone.
    """
    if layout.ranks.size > 1:
        import torch.distributed.checkpoint as checkpoint

        if layout.shards is not None or hasattr(checkpoint, "HuggingFaceStorageWriter"):
            return save_shards(layout, tensors, folder)
    layout.ranks.run_on_rank0(lambda: write_tensors(folder / TENSORS, tensors))
    return {}


def save_shards(layout: Layout, tensors: Mapping[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Write this rank's part of the `tensors` of a state into `folder`. All ranks call this.

    Returns the digests of the files of this rank by name. If one rank fails, all ranks raise an error.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    def divide() -> dict[str, torch.Tensor]:
        # Those files cannot have tensors without a dimension.
        plain = {name: tensor.detach().reshape(tensor.shape or (1,)) for name, tensor in tensors.items()}
        return dict(divide_tensor(layout, name, tensor.contiguous()) for name, tensor in plain.items())

    def finish() -> dict[str, str]:
        files = sorted((folder / SHARDS).glob(f"shard-{layout.ranks.rank + 1:05d}-*"))
        for file in files:
            # Each rank waits for its own disk.
            sync(file)
        return {f"{SHARDS}/{file.name}": digest_file(file) for file in files}

    divided = layout.ranks.run_on_all(divide)
    failure: BaseException | None = None
    try:
        with without_warnings():
            save(divided, storage_writer=HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True))
    except CheckpointException as error:
        # All ranks raise it together.
        cause = first_failure(error)
        if isinstance(cause, KeyboardInterrupt):
            failure = cause
        elif isinstance(cause, OSError):
            failure = OutputError(f"out: cannot write the state ({brief(cause)}); see its rights and its disk")
        else:
            text = brief(str(cause) or type(cause).__name__)
            failure = TrainingError(f"training: cannot write the state ({text}); the same command resumes")
    layout.ranks.agree(failure)
    return layout.ranks.run_on_all(finish)


def divide_tensor(layout: Layout, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return the tensor's name in the files, and the tensor that this rank writes: the whole one or its rows."""
    weight, key = find_weight(layout, name)
    if weight is None or is_shared(key):
        return name, tensor
    if is_of_one_shard(key):
        return f"{name}{SHARD_MARK}{layout.shard}", tensor
    return name, as_rows(layout, tensor, weight, weight.shape[:1] if key.endswith(ROWS) else weight.shape)


def find_weight(layout: Layout, name: str) -> tuple[DTensor | None, str]:
    """Return the sharded weight that the state's tensor `name` belongs to, and the rest of the name.

    The rest is the key of the optimizer's state, or "". None: the tensor belongs to no sharded weight.
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


def as_rows(layout: Layout, tensor: torch.Tensor, weight: DTensor, shape: torch.Size) -> DTensor:
    """Return `tensor`, without a copy, as this rank's rows of a tensor of `shape` that is divided like `weight`."""
    from torch.distributed.tensor import DTensor

    assert layout.shards is not None
    # A mesh of GPUs would move a tensor of the CPU to the GPU.
    mesh = layout.shards.cpu_mesh if tensor.device.type == "cpu" else weight.device_mesh
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, mesh, weight.placements, run_check=False, shape=shape, stride=stride)


def read_tensors(layout: Layout, folder: Path, count: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the state in `folder` that this rank has in `layout`. They were saved in `count` shards."""
    if (folder / SHARDS).is_dir():
        return read_shards(layout, folder / SHARDS, count)
    from safetensors import safe_open

    tensors = {}
    with safe_open(folder / TENSORS, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            rows = rows_of_rank(layout, name, view.get_shape())
            tensors[name] = file.get_tensor(name) if rows is None else view[rows]
    return tensors


def read_shards(layout: Layout, folder: Path, count: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load

    tensors: dict[str, torch.Tensor] = {}
    for name, about in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        plain, _, number = name.partition(SHARD_MARK)
        if number and count != layout.shard_count:
            raise other_shard_count(count, layout.shard_count)
        if number and int(number) != layout.shard:
            continue
        tensors[name] = torch.empty(about.size, dtype=about.properties.dtype)  # type: ignore[union-attr]
        weight, _ = find_weight(layout, plain)
        rows = None if number else rows_of_rank(layout, plain, tensors[name].shape)
        if weight is not None and rows is not None:
            # A copy, so that the whole tensor is freed.
            tensors[name] = as_rows(layout, tensors[name][rows].clone(), weight, tensors[name].shape)
    try:
        with without_warnings():
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise RuntimeError(str(first_failure(error))) from None
    return {
        name.partition(SHARD_MARK)[0]: tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for name, tensor in tensors.items()
    }


def rows_of_rank(layout: Layout, name: str, shape: Sequence[int]) -> slice | None:
    """Return the rows that this rank has of a tensor of the whole `shape`. None: it has the whole tensor."""
    weight, key = find_weight(layout, name)
    if weight is None or is_shared(key) or layout.shard_count == 1:
        return None
    if is_of_one_shard(key):
        raise other_shard_count(1, layout.shard_count)
    return row_slices(shape[0], layout.shard_count)[layout.shard]


def other_shard_count(got: int, expected: int) -> InputError:
    return InputError(
        f"optimizer: got 8-bit values in {got} shards for {expected}, expected as many; continue with {got} processes, "
        "or in another folder"
    )


def first_failure(error: CheckpointException) -> BaseException:
    """Return the error of the first rank that failed."""
    return next(iter(error.failures.values()))[0]


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hide warnings of torch.distributed.checkpoint about things that are done here on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
