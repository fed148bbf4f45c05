"""How the ranks of a run hold a model: whole on each (DDP), or its weights in rows, a share on each (FSDP2).

A shard's optimizer, moving average and rounding see plain tensors: the rows that lie on this rank. Only what is counted
over whole weights (norms of gradients, CAME's columns) and what others load has to ask the other ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..checkpoints.files import Json
from ..errors import InputError, VersionError
from .ranks import ALONE, Ranks
from .settings import DDP, TrainingSettings

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# what others call SANA's block: the first two are NVIDIA's (SanaMSBlock in its training), the last is diffusers'
BLOCKS = ("", "SanaBlock", "SanaMSBlock", "SanaTransformerBlock")
# classes that an error lists
LISTED = 8


class Shards(NamedTuple):
    """Weights that lie in rows on the ranks."""

    trained: dict[str, DTensor]
    models: Sequence[nn.Module]  # transformer, and a ControlNet where that is trained
    whole: Sequence[nn.Module]  # the same without weights, to be filled on one rank
    names: Mapping[int, str]  # of each parameter of `whole`, by its id, the name in `everything`
    everything: dict[str, nn.Parameter]  # DTensors, and what is whole on every rank


class Layout(NamedTuple):
    """How the ranks hold what is trained: each all of it, within DDP's `replica`, or its rows, in `shards`."""

    ranks: Ranks = ALONE
    replica: nn.Module | None = None
    shards: Shards | None = None

    @property
    def parts(self) -> int:
        """In how many the weights lie: 1 where each rank has all of them."""
        if self.shards is None:
            return 1
        mesh = next(iter(self.shards.trained.values())).device_mesh
        return mesh.size(mesh.ndim - 1)

    @property
    def part(self) -> int:
        """Which of the parts is this rank's."""
        return self.ranks.rank % self.parts

    @contextmanager
    def backward(self, last: bool) -> Iterator[Callable[[Callable[[], torch.Tensor]], torch.Tensor]]:
        """Give what computes a loss; its backward is in this context, the `last` one of a step sums whole gradients."""
        replica: Any = self.replica
        if replica is None:
            # the gradients of shards are summed in each, for a sum of whole ones would take the memory of the model
            yield lambda compute: compute()
            return
        with nullcontext() if last else replica.no_sync():
            yield replica

    def clip(self, parameters: Mapping[str, nn.Parameter], limit: float) -> float:
        """Bound the norm of all gradients together, and return what it was; those of shards are moved to their rows."""
        if self.shards is None:
            return float(nn.utils.clip_grad_norm_(list(parameters.values()), limit))
        collect_sharded_grads(self.shards, parameters)
        return clip_sharded(parameters, limit, self.ranks, self.ranks.size // self.parts)


def lay_out(models: Sequence[nn.Module], settings: TrainingSettings, ranks: Ranks) -> Layout:
    """Return how `ranks` hold `models` from now on, as `settings.parallel` says where a launcher has started them.

    Raises as `shard` does.
    """
    if not ranks.launched:
        return Layout(ranks)
    if settings.parallel.kind == DDP:
        return Layout(ranks, replicate(models[-1]))
    return Layout(ranks, None, shard(models, settings, ranks))


class Step(nn.Module):
    """What DDP wraps: `model` as what is trained, and whatever computes a loss with it as the forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return compute()


def replicate(model: nn.Module) -> nn.Module:
    """Return DDP around `model`, whose gradients are then means over the ranks, kept in the buckets they travel in."""
    from torch.nn.parallel import DistributedDataParallel

    # nothing that learns here changes a buffer; torch 2.14 has another name for that
    known = signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(Step(model), gradient_as_bucket_view=True, **{buffers: False})  # type: ignore[arg-type]


def shard(models: Sequence[nn.Module], settings: TrainingSettings, ranks: Ranks) -> Shards:
    """Put the weights of `models`, the transformer and a ControlNet if that is trained, in rows on the ranks.

    Each block is gathered when it is computed with, and what is in no block of a transformer that is trained or
    adapted with the whole model. Rank 0 holds the weights, and broadcasts them block by
    block. Raises VersionError for a torch that is too old, and InputError for a class of
    blocks that is not there or leaves trained weights outside.
    """
    try:
        from torch.distributed.fsdp import FSDPModule, fully_shard
    except ImportError:
        raise too_old() from None
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise too_old()
    names, memo = name_parameters(models), empty_parameters(models)
    skeleton = copy.deepcopy(list(models), memo)
    of_skeleton = {id(memo[key]): name for key, (name, _) in names.items()}
    options = fsdp_options(settings, ranks)
    given: dict[nn.Parameter, nn.Parameter] = {}
    for block in [*find_blocks(models, settings.parallel.block), *parts_outside(models)]:
        if not isinstance(block, FSDPModule):
            materialize_params(block, given)
            fully_shard(block, **options)
    for model in models:
        materialize_params(model, given)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # gloo's mean of a reduce-scatter has been its sum (pytorch issue 162338); sums are the same everywhere
                module.set_force_sum_reduction_for_comms(True)
    everything = {name: parameter for name, parameter in name_parameters(models).values()}
    trained: dict[str, Any] = {name: each for name, each in models[-1].named_parameters() if each.requires_grad}
    check_sharded(trained, settings.parallel.block)
    return Shards(trained, models, skeleton, of_skeleton, everything)


def materialize_params(module: nn.Module, given: dict[nn.Parameter, nn.Parameter]) -> None:
    """Give all ranks the first one's parameters of `module` that are in no rows yet, on the CPU where they have no
    numbers; `given` is what they have become, for those that several modules share."""
    from torch.distributed.tensor import DTensor

    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter not in given:
                whole = parameter.detach()
                if whole.is_meta:
                    whole = torch.empty_like(whole, device="cpu")
                torch.distributed.broadcast(whole, src=0)
                made = nn.Parameter(whole, parameter.requires_grad) if parameter.is_meta else parameter
                given[parameter] = given[made] = made
            owner._parameters[name] = given[parameter]


def too_old() -> VersionError:
    return VersionError(f"parallel: fsdp needs torch 2.9 or newer, got {torch.__version__}; update it, or choose ddp")


def name_parameters(models: Sequence[nn.Module]) -> dict[int, tuple[str, nn.Parameter]]:
    """Return the name of each parameter, with the number of its first model before it, and itself, by its id."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            found.setdefault(id(parameter), (f"{number}.{name}", parameter))
    return found


def empty_parameters(models: Sequence[nn.Module]) -> dict[int, object]:
    """Return the memo by which copy.deepcopy makes models with empty parameters."""
    memo: dict[int, object] = {}
    for model in models:
        for parameter in model.parameters():
            if id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return memo


def fsdp_options(settings: TrainingSettings, ranks: Ranks) -> Json:
    """Return what `fully_shard` takes besides a module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    assert ranks.device is not None
    own, kind = settings.parallel, ranks.device.type
    shape, names = (ranks.size,), ("shard",)
    if own.replicas > 1:
        shape, names = (own.replicas, ranks.size // own.replicas), ("replicate", "shard")  # type: ignore[assignment]
    # what stays gathered after a forward would not notice that validation has put the average in its place
    options: Json = {
        "mesh": init_device_mesh(kind, shape, mesh_dim_names=names),
        "reshard_after_forward": True,
    }
    if settings.method.whole and settings.dtype != "float32":
        # weights in fp32 travel as the bf16 that is computed in; gradients are summed in fp32
        compute = getattr(torch, settings.dtype)
        options["mp_policy"] = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    if own.kind == "fsdp_offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=kind != "cpu")
    return options


def find_blocks(models: Sequence[nn.Module], name: str) -> list[nn.Module]:
    """Return the modules of the class `name`, without one SANA's blocks. Raises InputError where there are none."""
    kind = type(models[0].transformer_blocks[0]).__name__  # type: ignore[index,union-attr]
    wanted = kind if name in BLOCKS else name
    found = [module for model in models for module in model.modules() if type(module).__name__ == wanted]
    if not found:
        raise InputError(f"block: got {name:.60}, expected one of {list_classes(models[0])}; {kind} is the default")
    return found


def list_classes(model: nn.Module) -> str:
    """Return the classes of the modules within `model`, the largest first, with their number and parameters."""
    sizes: dict[str, list[int]] = {}
    for module in list(model.modules())[1:]:
        count = sum(parameter.numel() for parameter in module.parameters())
        if count and not isinstance(module, nn.ModuleList):
            sizes.setdefault(type(module).__name__, []).append(count)
    largest = sorted(sizes.items(), key=lambda each: -max(each[1]))[:LISTED]
    return ", ".join(f"{name} ({len(counts)} of {max(counts):,} parameters)" for name, counts in largest)


def parts_outside(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return what is gathered besides blocks: the transformer with all that is left, or a ControlNet's projections.

    A ControlNet and the model that it steers share the embeddings around their blocks, and call them by themselves, so
    those stay whole.
    """
    if len(models) == 1:
        return [models[0]]
    controlnet: Any = models[1]
    return [controlnet.input_block, *controlnet.controlnet_blocks]


def check_sharded(trained: Mapping[str, nn.Parameter], name: str) -> None:
    """Raise InputError where a trained weight lies whole on each rank: nobody would sum its gradients."""
    from torch.distributed.tensor import DTensor

    left = [key for key, parameter in trained.items() if not isinstance(parameter, DTensor)]
    if left:
        raise InputError(f"block: got {name:.60}, which leaves {left[0]:.80} whole on each rank; choose {BLOCKS[-1]}")


def describe_layout(layout: Layout, parameters: Mapping[str, nn.Parameter], device: torch.device) -> str:
    """Return as text how the ranks really hold the trained `parameters`, from the modules as they are."""
    from torch.nn.parallel import DistributedDataParallel

    ranks, shards = layout.ranks, layout.shards
    backend = torch.distributed.get_backend()
    if shards is None:
        assert isinstance(layout.replica, DistributedDataParallel)
        count = sum(parameter.numel() for parameter in parameters.values())
        return f"DDP over {backend}: {ranks.size} processes, {count:,} trained parameters, all of them on each"
    blocks = find_blocks_wrapped(shards.models)
    whole = sum(parameter.numel() for parameter in shards.everything.values())
    here = sum(local_size(parameter) for parameter in shards.everything.values())
    offloaded = any(each.device.type == "cpu" for each in parameters.values()) and device.type != "cpu"
    return (
        f"FSDP over {backend}: {ranks.size} processes, {blocks} gathered modules, {whole:,} parameters, of which "
        f"{here:,} lie on this one" + (", in the memory of the CPU" if offloaded else "")
    )


def find_blocks_wrapped(models: Sequence[nn.Module]) -> int:
    from torch.distributed.fsdp import FSDPModule

    return len({id(module) for model in models for module in model.modules() if isinstance(module, FSDPModule)})


def local_size(parameter: torch.Tensor) -> int:
    from torch.distributed.tensor import DTensor

    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def local_parameters(shards: Shards) -> dict[str, nn.Parameter]:
    """Return the rows of this rank of what is trained, by name: they share their memory with the model's."""
    return {name: nn.Parameter(parameter.to_local().detach()) for name, parameter in shards.trained.items()}


def collect_sharded_grads(shards: Shards, parameters: Mapping[str, nn.Parameter]) -> None:
    """Give the rows of this rank their gradients, which the model does not keep."""
    for name, parameter in parameters.items():
        owner = shards.trained[name]
        parameter.grad = None if owner.grad is None else owner.grad.to_local()  # type: ignore[attr-defined]
        owner.grad = None


def clip_sharded(parameters: Mapping[str, nn.Parameter], limit: float, ranks: Ranks, replicas: int) -> float:
    """Scale the gradients of the rows so that the norm of all gradients together is at most `limit`; return it."""
    own = [parameter for parameter in parameters.values() if parameter.grad is not None]
    local = float(nn.utils.get_total_norm([parameter.grad for parameter in own if parameter.grad is not None]))
    norm = (ranks.total(local**2)[0] / replicas) ** 0.5
    nn.utils.clip_grads_with_norm_(own, limit, torch.tensor(norm))
    return norm


def gather(shards: Shards, device: torch.device, first: bool, names: Callable[[str], bool]) -> list[nn.Module] | None:
    """Return, on the first rank, the models with whole weights on `device`; None on the others, which have to call it.

    Weights whose names `names` does not want stay empty.
    """
    filled: dict[str, nn.Parameter] = {}
    for name, parameter in shards.everything.items():
        if not names(name):
            continue
        whole = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        if first:
            filled[name] = nn.Parameter(whole.to(device, copy=True), parameter.requires_grad)
    if not first:
        return None
    memo = {key: filled[name] for key, name in shards.names.items() if name in filled}
    models = copy.deepcopy(list(shards.whole), memo)
    for model in models:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
    return models
