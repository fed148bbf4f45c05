"""CAME, confidence-guided adaptive memory-efficient optimization (Luo et al. 2023, arXiv 2307.02047).

CAME uses Adafactor's factored second moment. The step is smaller where the update differs from its average. For a
matrix [O, I], the squares of gradients and of these differences are stored as means of rows [O] and columns [I].

The package of CAME's authors factors the last two dimensions of a weight. Half of SANA's weights are 1x1 convolutions
[O, I, 1, 1], for which this factors nothing and stores four moments of full size. Here such a weight is the matrix
[O, I], as in NVIDIA's training (diffusion/utils/optimizer.py of NVlabs/Sana). All other weights have a full second
moment, as in NVIDIA's training: biases, norms and the 3x3 depthwise convolutions [C, 1, 3, 3]. They are 0.2 % of SANA's
weights, so factoring them would save little.

In 8 bits, the average of updates has one scale for each block of 256 elements. A code q means sign(q) * (q / 127)^2
times the largest value of its block. The square gives small values more codes, because most values of an average are
small. It loses 0.7 % (RMS) of normal values, like evenly spaced codes. In blocks with values of very different sizes it
also loses 0.7 %, while evenly spaced codes lose 2.5 %. The dynamic type of Dettmers et al. 2022 (arXiv 2110.02861)
loses 1.1 % in both cases.

pytorch_optimizer has a CAME that takes the same steps for matrices and vectors. It cannot replace this one: it stores
11.5 bytes per parameter of SANA 1.6B instead of 4, because it factors the wrong dimensions of 1x1 convolutions; it has
no 8-bit state; and it cannot train shards, because it fails on DTensors and would scale each rank's rows separately.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from ..runtime.text import Json

# Added to the squares of gradients and of differences. These and the limit of an update's RMS are the authors' values.
EPS = (1e-30, 1e-16)
CLIP = 1.0
# Weights with fewer elements, biases and norms, have their average in fp32, as in bitsandbytes and torchao.
SMALLEST = 4096
# Elements that sharded ranks update together, so that one message contains all their sums.
BUCKET = 1 << 23
State = dict[str, torch.Tensor]
Total = Callable[[torch.Tensor], torch.Tensor]
# Yields sums over the local rows [n], and receives the sums over all rows. It is a generator, so that one collective
# can serve several parameters: `update_together` joins the sums that they yield.
Update = Generator[torch.Tensor, torch.Tensor, None]
Sums = Generator[torch.Tensor, torch.Tensor, torch.Tensor]
BLOCK = 256
LARGEST = 127


class CAME(torch.optim.Optimizer):
    """CAME with decoupled weight decay. `eight_bit`: the average of updates is stored in 8 bits.

    `betas` are the rates of the averages of updates, squared gradients, and squared differences. All other state is in
    fp32, for every dtype of a parameter. As the authors define it, CAME has no bias correction, so the first steps are
    ten times `lr` and more. Use a warmup (NVIDIA: 2000 steps).
    """

    def __init__(
        self,
        parameters: Any,
        lr: float,
        betas: tuple[float, ...] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        eight_bit: bool = False,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eight_bit": eight_bit})
        # Sums a tensor over the ranks, in place. None: the weights are not sharded.
        self.total: Total | None = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            learning = [parameter for parameter in group["params"] if parameter.grad is not None]
            # The ranks add up the same parameters together, although their shards differ in size.
            for bucket in buckets(learning, 0 if self.total is None else BUCKET):
                updates = [update_parameter(parameter, self.state[parameter], group) for parameter in bucket]
                update_together(updates, self.total or (lambda sums: sums))


def buckets(parameters: Sequence[torch.Tensor], largest: int) -> Iterator[list[torch.Tensor]]:
    """Yield `parameters` in their order, in lists whose largest shards have at most `largest` elements together.

    A list has at least one parameter. All ranks yield the same lists.
    """
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        size += max(shard_sizes(parameter))
        if bucket and size > largest:
            yield bucket
            bucket, size = [], max(shard_sizes(parameter))
        bucket.append(parameter)
    if bucket:
        yield bucket


def shard_sizes(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the number of elements of each shard of the weight of `parameter`, on all ranks.

    Decisions from these sizes are the same on all ranks. The size of the shard on this rank differs where rows do not
    divide evenly.
    """
    return getattr(parameter, "shard_sizes", (parameter.numel(),))


def update_together(updates: Sequence[Update], total: Total) -> None:
    """Run `updates` to their end. Each round calls `total` once for all of them."""
    waiting = {update: next(update) for update in updates}
    while waiting:
        lengths = [len(local) for local in waiting.values()]
        sums = total(torch.cat([*waiting.values()])).split(lengths)
        for update, part in zip([*waiting], sums, strict=True):
            try:
                waiting[update] = update.send(part)
            except StopIteration:
                del waiting[update]


def update_parameter(parameter: torch.Tensor, state: State, group: Json) -> Update:
    """Take the step of one parameter from its gradient. In a sharded model, the parameter has the rows of this rank."""
    assert parameter.grad is not None
    if not state:
        state.update(new_state(parameter, group["eight_bit"]))
    beta_update, beta_square, beta_difference = group["betas"]

    root = yield from inverse_root(parameter.grad.float().square().add_(EPS[0]), state, "exp_avg_sq", beta_square)
    update = root.mul_(parameter.grad)
    size = yield from rms(update)
    update.div_((size / CLIP).clamp_(min=1.0))
    if "exp_avg" in state:
        average = state["exp_avg"].lerp_(update, 1.0 - beta_update)
    else:
        codes, scales = state["exp_avg_codes"], state["exp_avg_scales"]
        average = dequantise(codes, scales).lerp_(update, 1.0 - beta_update)
        quantise(average, codes, scales)
    if is_matrix(parameter):
        differences = update.sub_(average).square_().add_(EPS[1])
        root = yield from inverse_root(differences, state, "exp_avg_res", beta_difference)
        step = root.mul_(average)
    else:
        step = average

    parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"])


def is_matrix(weight: torch.Tensor) -> bool:
    """Whether `weight` is a matrix [O, I] or the weight of a 1x1 convolution [O, I, 1, ...]."""
    return weight.ndim >= 2 and all(size == 1 for size in weight.shape[2:])


def new_state(parameter: torch.Tensor, eight_bit: bool) -> State:
    """Return the state of a parameter before its first step. It contains zeros."""
    state: State = {}
    if eight_bit and sum(shard_sizes(parameter)) >= SMALLEST:
        state["exp_avg_codes"], state["exp_avg_scales"] = empty_codes(parameter)
    else:
        state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
    if is_matrix(parameter):
        for name in ("exp_avg_sq", "exp_avg_res"):
            state[f"{name}_row"] = parameter.new_zeros(parameter.shape[0], dtype=torch.float32)
            state[f"{name}_col"] = parameter.new_zeros(parameter.shape[1], dtype=torch.float32)
    else:
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
    return state


def inverse_root(squares: torch.Tensor, state: State, name: str, beta: float) -> Sums:
    """Move the moment `name` of `state` towards `squares`, and return 1 / sqrt(moment) in their shape.

    The moment of a matrix is the product of its rows' and columns' means, over the mean of all.
    """
    if f"{name}_row" not in state:
        return state[name].mul_(beta).add_(squares, alpha=1.0 - beta).rsqrt()
    rows, columns = state[f"{name}_row"], state[f"{name}_col"]
    matrix = squares.flatten(1)
    sums = yield torch.cat([matrix.sum(0), matrix.new_full((1,), len(matrix))])
    rows.mul_(beta).add_(matrix.mean(1), alpha=1.0 - beta)
    columns.mul_(beta).add_(sums[:-1] / sums[-1], alpha=1.0 - beta)
    # The mean of the rows is the same, but some rows may be on other ranks.
    factors = (rows / columns.mean()).rsqrt_()
    return torch.mul(factors[:, None], columns.rsqrt()[None]).view(squares.shape)


def rms(values: torch.Tensor) -> Sums:
    """Return the root mean square of `values` over all ranks."""
    sums = yield torch.stack([values.norm().square(), values.new_full((), values.numel())])
    return (sums[0] / sums[1]).sqrt()


def empty_codes(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [like.shape] int8 and scales [blocks] fp32 of zeros."""
    return torch.zeros_like(like, dtype=torch.int8), like.new_zeros(-(-like.numel() // BLOCK), dtype=torch.float32)


def quantise(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write `values`, fp32, into `codes` and `scales`. A block of zeros has scale 0."""
    blocks = split(values)
    largest = blocks.abs().amax(dim=1)
    scales.copy_(largest)
    # A block of zeros is divided by the smallest normal number.
    fractions = blocks.abs().div_(largest.clamp(min=torch.finfo(blocks.dtype).tiny)[:, None])
    rounded = fractions.sqrt_().mul_(LARGEST).round_().copysign_(blocks)
    codes.copy_(rounded.flatten()[: values.numel()].view(values.shape))


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values [codes.shape] in fp32 of `codes` and `scales`."""
    blocks = split(codes.float())
    values = blocks.mul_(blocks.abs()).mul_(scales.div(LARGEST**2)[:, None])
    return values.flatten()[: codes.numel()].view(codes.shape)


def split(values: torch.Tensor) -> torch.Tensor:
    """Return `values` in blocks [n, BLOCK]. The last block is padded with zeros."""
    missing = -values.numel() % BLOCK
    # Padding with nothing would copy the values.
    padded = functional.pad(values.flatten(), (0, missing)) if missing else values
    return padded.reshape(-(-values.numel() // BLOCK), BLOCK)
