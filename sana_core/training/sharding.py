"""How the ranks of a run divide a model and a step. Each rank holds the whole model (DDP) or rows of it (FSDP2).

The optimizer, moving average and rounding of a shard work on plain tensors, the rows of this rank. Ranks communicate
for sums over whole weights, such as norms of gradients and CAME's means of columns, and to gather weights for a file.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..errors import InputError, VersionError
from ..runtime.text import Json
from .optimizers import DDP
from .ranks import ALONE, Ranks
from .settings import TrainingSettings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# Names of SANA's block, the default: two from NVIDIA's code (SanaMSBlock in its training), and one from diffusers.
BLOCKS = ("", "SanaBlock", "SanaMSBlock", "SanaTransformerBlock")
# Number of classes that an error lists.
LISTED = 8
# Indices of samples of one shape, and whether they count. False: the rank computes them to accompany the others.
Microbatch = tuple[list[int], bool]


class Shards(NamedTuple):
    """A model whose weights are divided into rows."""

    # The trained weights by name.
    trained: dict[str, DTensor]
    # The transformer, and the ControlNet if one is trained.
    models: Sequence[nn.Module]
    # The same models without weights. Copies of them are filled with gathered weights.
    whole: Sequence[nn.Module]
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
    def parts(self) -> int:
        """The number of shards that the weights are divided into. 1: each rank has whole weights."""
        if self.shards is None:
            return 1
        mesh = next(iter(self.shards.trained.values())).device_mesh
        return mesh.size(mesh.ndim - 1)

    @property
    def part(self) -> int:
        """The number of this rank's shard."""
        return self.ranks.rank % self.parts

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
        local, replicas = float(nn.utils.get_total_norm(gradients)), self.ranks.size // self.parts
        norm = (self.ranks.total(local**2)[0] / replicas) ** 0.5
        nn.utils.clip_grads_with_norm_(list(parameters.values()), limit, torch.tensor(norm))
        return norm


def lay_out(models: Sequence[nn.Module], settings: TrainingSettings, ranks: Ranks) -> Layout:
    """Divide `models` among `ranks` by `settings.parallel`, if a launcher has started them."""
    if not ranks.launched:
        return Layout(ranks)
    if settings.parallel.kind == DDP:
        return Layout(ranks, replicate(models[-1]))
    return Layout(ranks, None, shard(models, settings, ranks))


class Step(nn.Module):
    """The module that DDP wraps. It has the parameters of `model`. Its forward calls a function that uses `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return compute()


def replicate(model: nn.Module) -> nn.Module:
    """Wrap `model` in DDP. Its gradients become means over the ranks and stay in the buckets that are sent."""
    from torch.nn.parallel import DistributedDataParallel

    # No buffer changes in training. torch 2.14 has renamed the argument.
    arguments = signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
    return DistributedDataParallel(Step(model), gradient_as_bucket_view=True, **{buffers: False})  # type: ignore[arg-type]


def shard(models: Sequence[nn.Module], settings: TrainingSettings, ranks: Ranks) -> Shards:
    """Divide the weights of `models`, the transformer and a ControlNet if one is trained, into rows on the ranks.

    FSDP gathers the weights of a block when it runs, and the weights outside of blocks when the model runs. Rank 0
    holds the weights at first, and broadcasts them block by block.
    """
    from torch.distributed import fsdp

    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_force_sum_reduction_for_comms"):
        raise VersionError(
            f"parallel: fsdp needs torch 2.9 or newer, got {torch.__version__}; update it, or choose ddp"
        )
    empty: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for model in models
        for parameter in model.parameters()
    }
    unsharded = copy.deepcopy(list(models), empty)
    device = ranks.device
    assert device is not None
    options = fsdp_options(settings, device, ranks)
    mesh = options["mesh"]
    for block in [*find_blocks(models, settings.parallel.block), *parts_outside(models)]:
        if not isinstance(block, fsdp.FSDPModule):
            # The dict ends with the call, so that the whole weights of a block are freed once it has its rows.
            materialize_params(block, {}, device)
            fsdp.fully_shard(block, **options)
    # The models may share what stays whole.
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
    check_sharded(trained, settings.parallel.block)
    return Shards(trained, models, unsharded, mesh if device.type == "cpu" else make_mesh("cpu", settings, ranks))


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
        slices = row_slices(len(weight), layout.parts)
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


def fsdp_options(settings: TrainingSettings, device: torch.device, ranks: Ranks) -> Json:
    """Return the arguments of `fully_shard` except the module."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    # Weights that stay gathered after a forward would be stale after a validation has replaced them by the average.
    options: Json = {
        "mesh": make_mesh(device.type, settings, ranks),
        "reshard_after_forward": True,
    }
    if settings.method.whole and settings.dtype != "float32":
        # Weights in fp32 are sent as bf16, in which the model computes. Gradients are summed in fp32.
        compute = getattr(torch, settings.dtype)
        options["mp_policy"] = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    if settings.parallel.kind == "fsdp_offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    return options


def find_blocks(models: Sequence[nn.Module], name: str) -> list[nn.Module]:
    """Return the modules of the class `name`. Empty: SANA's blocks."""
    kind = type(models[0].transformer_blocks[0]).__name__  # type: ignore[index,union-attr]
    class_name = kind if name in BLOCKS else name
    matching_blocks = [module for model in models for module in model.modules() if type(module).__name__ == class_name]
    if not matching_blocks:
        raise InputError(f"block: got {name:.60}, expected one of {list_classes(models[0])}; {kind} is the default")
    return matching_blocks


def list_classes(model: nn.Module) -> str:
    """Return as text the classes of modules in `model`, the largest first, with their number and parameters."""
    sizes: dict[str, list[int]] = {}
    for module in list(model.modules())[1:]:
        count = sum(parameter.numel() for parameter in module.parameters())
        if count and not isinstance(module, nn.ModuleList):
            sizes.setdefault(type(module).__name__, []).append(count)
    largest = sorted(sizes.items(), key=lambda each: -max(each[1]))[:LISTED]
    return ", ".join(f"{name} ({len(counts)} of {max(counts):,} parameters)" for name, counts in largest)


def parts_outside(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the sharded modules other than blocks: the transformer itself, or a ControlNet's projections.

    A ControlNet and its transformer share the embeddings around their blocks and call them directly, so the embeddings
    stay whole.
    """
    if len(models) == 1:
        return [models[0]]
    controlnet: Any = models[1]
    return [controlnet.input_block, *controlnet.controlnet_blocks]


def check_sharded(trained: Mapping[str, nn.Parameter], name: str) -> None:
    """Raise InputError if a trained weight is not divided, because its gradients would not be summed."""
    from torch.distributed.tensor import DTensor

    unsharded = [key for key, parameter in trained.items() if not isinstance(parameter, DTensor)]
    if unsharded:
        raise InputError(
            f"block: got {name:.60}, which leaves {unsharded[0]:.80} whole on each rank; choose {BLOCKS[-1]}"
        )


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
    shards: Shards, device: torch.device, dtype: torch.dtype | None, first: bool, trained_alone: bool
) -> list[nn.Module]:
    """Return the models with whole weights on `device` on the first rank, no models on the others.

    Trained weights are converted to `dtype`. None: they keep theirs. One weight after another is gathered. With
    `trained_alone` frozen weights stay empty.
    """
    models = copy.deepcopy(list(shards.whole)) if first else []
    for number, model in enumerate(shards.models):
        filled = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or not trained_alone:
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


def microbatches(group: Sequence[Sequence[int]], rank: int, count: int) -> list[Microbatch]:
    """Return the microbatches of rank number `rank` in a step with the batches `group`.

    All `count` ranks get the same number, because ranks with fewer would leave the others waiting for gradients. Whole
    batches are dealt out. If there are fewer batches than ranks, they are split. A rank without a batch for the last
    round computes one image whose loss does not count.
    """
    pieces = list(group)
    if len(group) < count:
        parts = -(-count // len(group))
        pieces = [piece for batch in group for piece in split(batch, parts)]
    rounds = -(-len(pieces) // count)
    counted = [(list(piece), True) for piece in pieces[rank::count]]
    return counted + [(list(pieces[0][:1]), False)] * (rounds - len(counted))


def split(batch: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Return `batch` in at most `parts` parts, whose lengths differ by at most one."""
    parts = min(parts, len(batch))
    bounds = [number * len(batch) // parts for number in range(parts + 1)]
    return [batch[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
