"""The table OPTIMIZERS, stochastic rounding, the moving average of the weights, and an optimizer's saved state.

bf16 has 8 bits of precision, so rounding to the nearest value always loses an update of less than 1/512 of a weight.
The update is therefore computed in fp32 and rounded up or down at random, with the probability of each neighbour
proportional to its nearness. In expectation no update is lost (Zamirai et al. 2020, arXiv 2010.06192). There is no fp32
copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypedDict

import torch

from ..errors import InputError, TrainingError, VersionError, first_line
from ..runtime.text import Json, brief
from .came import CAME, SMALLEST, buckets, shard_sizes

# How several GPUs can train one model: the values of `parallel.kind`.
DDP, FSDP, OFFLOADED = KINDS = ("ddp", "fsdp", "fsdp_offload")
# Bits of fp32's fraction that bf16 leaves out.
DROPPED_BITS = 16
Tensors = Mapping[str, torch.Tensor]


class OptimizerSpec(NamedTuple):
    """A row of OPTIMIZERS: everything that distinguishes one optimizer from another."""

    # (groups, settings) -> the optimizer. `settings` has lr, weight_decay and betas.
    make: Callable[[list[dict], Json], torch.optim.Optimizer]
    # The decay of the moving averages, as the authors recommend.
    betas: tuple[float, ...]
    # The package that contains it. None: torch or this package.
    library: str | None = None
    # A step can treat one parameter at a time, so that updates of bf16 weights can be rounded stochastically. Otherwise
    # the step sums over all parameters, and only fp32 weights can be trained.
    per_parameter: bool = True
    # How GPUs may divide the training. tests/unit/test_training_rank_optimizers.py compares each of these kinds with
    # one process: an optimizer that is not made for shards trains something else without an error.
    parallel: tuple[str, ...] = (DDP,)
    # It updates the parameters of a bucket together, see `buckets`.
    in_buckets: bool = False
    # Its step computes one parameter after another.
    loops: bool = False
    # It finds the learning rate itself, from the settings d0 and d_coef.
    finds_rate: bool = False
    # It trains other weights than it saves. The saved weights are their average.
    averages: bool = False


def make_adamw(groups: list[dict], settings: Json) -> torch.optim.Optimizer:
    # The fused step reads each parameter once and allocates no temporary tensors.
    devices = {parameter.device for group in groups for parameter in group["params"]}
    return torch.optim.AdamW(groups, fused=True if all(map(has_fused, devices)) else None, **settings)


def make_adamw8bit(groups: list[dict], settings: Json) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    class ShardedAdamW8bit(AdamW8bit):
        """AdamW8bit that stores the moments of a weight in 8 bits on all ranks or on none."""

        def _new_buffer(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
            # torchao stores a tensor in 8 bits from 4096 elements, in whole blocks.
            if all(size >= SMALLEST and size % self.block_size == 0 for size in shard_sizes(parameter)):
                return super()._new_buffer(parameter, signed)
            return torch.zeros_like(parameter)

    return ShardedAdamW8bit(groups, **settings)


def make_came(groups: list[dict], settings: Json, eight_bit: bool = False) -> torch.optim.Optimizer:
    return CAME(groups, eight_bit=eight_bit, **settings)


def make_from_library(name: str, groups: list[dict], settings: Json, **options: bool) -> torch.optim.Optimizer:
    """Return the optimizer of the class `name` of pytorch_optimizer."""
    import pytorch_optimizer

    return getattr(pytorch_optimizer, name)(groups, **settings, **options)


OPTIMIZERS = {
    "adamw": OptimizerSpec(make_adamw, betas=(0.9, 0.999), parallel=KINDS),
    "adamw8bit": OptimizerSpec(
        make_adamw8bit,
        betas=(0.9, 0.999),
        library="torchao",
        # Offloaded, its step would need a compiler for the CPU.
        parallel=(DDP, FSDP),
        loops=True,
    ),
    "came": OptimizerSpec(make_came, betas=(0.9, 0.999, 0.9999), parallel=KINDS, in_buckets=True),
    "came8bit": OptimizerSpec(
        partial(make_came, eight_bit=True), betas=(0.9, 0.999, 0.9999), parallel=KINDS, in_buckets=True
    ),
    "prodigy": OptimizerSpec(
        # The authors also advise safeguard_warmup for diffusion. With bias correction, it divides the estimates of the
        # first hundred steps by up to ten, and a short run ends before the rate has grown. `foreach` is the library's
        # default on CUDA only. Here it is set for all devices, because it takes a copy of all weights, which the
        # prediction of memory counts on the CPU.
        partial(make_from_library, "Prodigy", bias_correction=True, foreach=True),
        betas=(0.9, 0.999),
        library="pytorch_optimizer",
        per_parameter=False,
        finds_rate=True,
    ),
    "schedulefree": OptimizerSpec(
        partial(make_from_library, "ScheduleFreeAdamW"),
        betas=(0.9, 0.999),
        library="pytorch_optimizer",
        per_parameter=False,
        parallel=KINDS,
        averages=True,
    ),
}


def make_optimizer(
    name: str,
    parameters: Iterable[torch.nn.Parameter],
    learning_rate: float,
    weight_decay: float = 0.0,
    d0: float = 1e-6,
    d_coef: float = 1.0,
) -> torch.optim.Optimizer:
    """Return the optimizer `name` of OPTIMIZERS. All `parameters` are in one group, whose key "optimizer" is the name.

    `weight_decay` is decoupled from the gradient in all optimizers. If the optimizer finds the rate itself,
    `learning_rate` is a factor of that rate, usually 1, `d0` is the first estimate of the distance, and `d_coef` is a
    factor of the estimates.
    """
    spec = OPTIMIZERS[name]
    parameters = list(parameters)
    trained = (torch.float32, torch.bfloat16) if spec.per_parameter else (torch.float32,)
    for parameter in parameters:
        if parameter.dtype not in trained:
            got, expected = (str(dtype).removeprefix("torch.") for dtype in (parameter.dtype, trained[-1]))
            raise InputError(
                f"optimizer: got parameters in {got} for {name}, expected {expected}; train in fp32, or choose "
                "came8bit for weights in bf16"
            )
    settings: Json = {"lr": learning_rate, "weight_decay": weight_decay, "betas": spec.betas}
    if spec.finds_rate:
        settings |= {"d0": d0, "d_coef": d_coef}
    try:
        return spec.make([{"params": parameters, "optimizer": name}], settings)
    except (ImportError, AttributeError) as error:
        # A torchao that is too new for torch raises AttributeError.
        if spec.library is None:
            raise
        built_in = [other for other, row in OPTIMIZERS.items() if row.library is None]
        raise VersionError(
            f"optimizer: {name} needs {spec.library}, which cannot be imported ({error!s:.80}); "
            f"pip install '.[optimizers]', or choose {alternatives(built_in)}"
        ) from error


def alternatives(names: list[str]) -> str:
    """Return names as "a, b or c"."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def has_fused(device: torch.device) -> bool:
    """Whether torch has a fused AdamW for `device`. torch reports this only at the first step."""
    probe = torch.zeros(1, device=device, requires_grad=True)
    probe.grad = torch.zeros_like(probe)
    try:
        torch.optim.AdamW([probe], fused=True).step()
    except RuntimeError:
        return False
    return True


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give all parameters of `optimizer` the rate `learning_rate` from the next step on."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            # torchao's compiled step reads the rate from a tensor.
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def step_optimizer(optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """Take a step from the gradients of the parameters. It may change the gradients.

    Updates of parameters in bf16 are computed in fp32, for parameters of equal shape together, and rounded
    stochastically with `generator`, which is on their device. Parameters in fp32 do not use it. Seed it with the number
    of the step, so that a resumed run and all replicas of a model round equally.
    """
    (group,) = optimizer.param_groups
    is_fp32 = all(parameter.dtype == torch.float32 for parameter in group["params"])
    try:
        if isinstance(optimizer, CAME):
            optimizer.step(None if is_fp32 else partial(round_stochastically, generator=generator))
        elif is_fp32:
            optimizer.step()
        else:
            for bucket in buckets(parameter for parameter in group["params"] if parameter.grad is not None):
                step_rounded(optimizer, group, bucket, generator)
    except RuntimeError as error:
        # The errors of a missing compiler differ by platform and version, but torch defines them in these modules.
        compiling = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
        if compiling and group["optimizer"] == "adamw8bit":
            raise VersionError(
                f"optimizer: adamw8bit cannot be compiled ({type(error).__name__}), expected Triton, or a C++ compiler "
                "on a CPU; choose came8bit, which needs neither"
            ) from error
        raise


@contextmanager
def restoring() -> Iterator[None]:
    """Raise TrainingError with `weights_lost` for any error of this context, which restores the trained weights."""
    try:
        yield
    except BaseException as error:
        raise TrainingError(
            f"training: the weights were not restored after a validation ({first_line(error):.100}), so this step is "
            "not saved; the same command resumes",
            weights_lost=True,
        ) from error


@contextmanager
def validation_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the weights for validation and saving into the parameters, and restore the training weights bit for bit.

    They differ only for schedulefree, whose average is the model (Defazio et al. 2024, arXiv 2405.15682). Inside the
    context the training weights are in the CPU's memory.
    """
    (group,) = optimizer.param_groups
    if "train_mode" not in group:
        yield
        return
    with kept_weights(group["params"]):
        try:
            # The registry's scanner takes a call of a method with this name for the builtin.
            switch = optimizer.eval  # type: ignore[attr-defined]
            switch()
            yield
        finally:
            with restoring():
                optimizer.train()  # type: ignore[attr-defined]


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round fp32 `values` in place to bf16 values, up or down at random, so that the expectation is unchanged.

    `generator` is on the device of `values`. Values of bf16, infinity and NaN do not change.
    """
    bits = values.view(torch.int32)
    # The sum below can overflow for a NaN, as CUDA's 0x7FFFFFFF, and become a finite number.
    not_numbers = values.isnan()
    bits.add_(torch.randint(1 << DROPPED_BITS, bits.shape, generator=generator, dtype=torch.int32, device=bits.device))
    bits.bitwise_and_(-1 << DROPPED_BITS)
    return values.masked_fill_(not_numbers, torch.nan)


@torch.no_grad()
def step_rounded(
    optimizer: torch.optim.Optimizer, group: Json, bucket: list[torch.Tensor], generator: torch.Generator
) -> None:
    """Take the step of parameters of `group` of equal shape in fp32, and round it stochastically to their bf16.

    The optimizer must treat each parameter separately. Its states are then in fp32 and belong to the parameters.
    """
    weights = torch.stack(bucket).float()
    gradients = torch.stack([parameter.grad for parameter in bucket]).float()  # type: ignore[misc]
    masters = [torch.nn.Parameter(weight) for weight in weights]
    for parameter, master, gradient in zip(bucket, masters, gradients, strict=True):
        master.grad = gradient
        # Copies the attribute `shard_sizes`, which the optimizer reads.
        vars(master).update(vars(parameter))
        optimizer.state[master] = optimizer.state.pop(parameter, {})
    groups, optimizer.param_groups = optimizer.param_groups, [{**group, "params": masters}]
    # An error ends the run, which then saves nothing.
    optimizer.step()
    for parameter, master in zip(bucket, masters, strict=True):
        optimizer.state[parameter] = optimizer.state.pop(master)
    optimizer.param_groups = groups
    torch._foreach_copy_(bucket, round_stochastically(weights, generator).unbind())


def start_average(parameters: Tensors) -> dict[str, torch.Tensor]:
    """Return the average of `parameters` before the first step: copies in fp32, by name."""
    return {name: parameter.detach().float().clone() for name, parameter in parameters.items()}


def average_decay(decay: float, step: int) -> float:
    """Return the decay of the average in step number `step`, which begins at 0.

    min(decay, (1 + step) / (10 + step)), so that a short run does not average its first weights (TensorFlow's
    ExponentialMovingAverage, diffusers' EMAModel).
    """
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(average: Tensors, parameters: Tensors, decay: float) -> None:
    """Replace `average` by decay * average + (1 - decay) * parameters, in place, after a step of the optimizer."""
    averages = {parameter: average[name] for name, parameter in parameters.items()}
    for bucket in buckets(parameters.values()):
        weights = bucket if bucket[0].dtype == torch.float32 else torch.stack(bucket).float().unbind()
        torch._foreach_lerp_([averages[parameter] for parameter in bucket], weights, 1.0 - decay)


@contextmanager
def averaged_weights(parameters: Tensors, average: Tensors) -> Iterator[None]:
    """Write the average into `parameters` inside the context, and restore the trained weights after it bit for bit."""
    with kept_weights(parameters.values()):
        fill(parameters, average)
        yield


@contextmanager
def kept_weights(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the values of `parameters` after the context, bit for bit. Inside it, copies are in the CPU's memory."""
    parameters = list(parameters)
    saved_values = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    try:
        yield
    finally:
        with restoring():
            fill(dict(enumerate(parameters)), dict(enumerate(saved_values)))


@torch.no_grad()
def fill(targets: Mapping, values: Mapping) -> None:
    """Copy the tensors `values` into the tensors `targets` with the same keys."""
    for name, target in targets.items():
        target.copy_(values[name])


# Keys of a parameter group that are not saved. The schedule sets the rate at each step.
NOT_SAVED = ("params", "optimizer", "lr")
# The only state that is a single number.
STEP = "step"


class ParameterValues(TypedDict):
    """The state of a parameter that is no tensor."""

    values: Json
    # The attributes of each tensor subclass, such as torchao's 8-bit values. A dtype is its name in torch.
    subclasses: dict[str, list[Any]]


class OptimizerValues(TypedDict):
    """The state of an optimizer that is no tensor."""

    group: Json
    parameters: list[ParameterValues]


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], OptimizerValues]:
    """Return the state of an optimizer of `make_optimizer` except its rate: tensors by name, and values for JSON.

    A tensor is named "<number of the parameter>.<name of the state>", or "group.<name>" if it belongs to all
    parameters. The inner tensors of a subclass have ".<name>" after that. Contiguous tensors are not copied. Write or
    copy them before the next step.

    set_optimizer_state_dict of torch.distributed.checkpoint casts a state to its parameter's dtype: 8-bit codes to
    fp32, and fp32 moments to bf16. A resumed run would differ.
    """
    (group,) = optimizer.param_groups
    tensors: dict[str, torch.Tensor] = {}
    parameters: list[ParameterValues] = []
    for index, parameter in enumerate(group["params"]):
        entry: ParameterValues = {"values": {}, "subclasses": {}}
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                entry["values"][name] = value
            elif hasattr(value, "__tensor_flatten__"):
                inner_names, attributes = value.__tensor_flatten__()
                entry["subclasses"][name] = [
                    str(attribute) if isinstance(attribute, torch.dtype) else attribute for attribute in attributes
                ]
                for inner_name in inner_names:
                    tensors[f"{index}.{name}.{inner_name}"] = getattr(value, inner_name).contiguous()
            else:
                tensors[f"{index}.{name}"] = value.contiguous()
        parameters.append(entry)
    values: Json = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and name not in NOT_SAVED:
            tensors[f"group.{name}"] = value.contiguous()
        elif name not in NOT_SAVED and value != optimizer.defaults.get(name):
            values[name] = value
    return tensors, {"group": values, "parameters": parameters}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], values: OptimizerValues
) -> None:
    """Restore the state of `optimizer`, which has taken no step, on the devices of its parameters.

    `optimizer` keeps its learning rate, betas and weight decay, because a new phase of a run may have others.
    """
    (group,) = optimizer.param_groups
    for index, (parameter, entry) in enumerate(zip(group["params"], values["parameters"], strict=True)):
        state = dict(entry["values"])
        inner: dict[str, dict[str, torch.Tensor]] = {name: {} for name in entry["subclasses"]}
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            if number != str(index):
                continue
            name, _, inner_name = name.partition(".")
            if inner_name:
                inner[name][inner_name] = tensor.to(parameter.device, copy=True)
            elif name == STEP:
                # torch and torchao count steps on the CPU. Only the fused kernels count on the device. Shards store the
                # count as a tensor with one element.
                state[name] = tensor.reshape(()).to(parameter.device if group.get("fused") else "cpu", copy=True)
            elif tensor.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
            else:
                state[name] = tensor.to(parameter.device, copy=True)
        for name, attributes in entry["subclasses"].items():
            from torchao.optim.subclass_8bit import OptimState8bit

            decoded = [
                getattr(torch, attribute.removeprefix("torch.")) if isinstance(attribute, str) else attribute
                for attribute in attributes
            ]
            state[name] = OptimState8bit.__tensor_unflatten__(inner[name], decoded)
        if state:
            optimizer.state[parameter] = state
    for name, value in values["group"].items():
        if isinstance(group.get(name), float) and not isinstance(value, float | int):
            raise ValueError(f"values.group.{name}: got {brief(value)}, expected a number")
        group[name] = value
    for key, tensor in tensors.items():
        if key.startswith("group."):
            group[key.removeprefix("group.")] = tensor.to(group["params"][0].device, copy=True)
