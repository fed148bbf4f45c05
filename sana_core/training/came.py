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

Parameters of equal shape are updated together, as tensors [n, *shape]. One after another, those of SANA 1.6B would take
26,000 small operations in a step, for which Python needs twice the time of forward and backward.

pytorch_optimizer has a CAME that takes the same steps for matrices and vectors. It cannot replace this one: it stores
11.5 bytes per parameter of SANA 1.6B instead of 4, because it factors the wrong dimensions of 1x1 convolutions; it has
no 8-bit state; and it cannot train shards, because it fails on DTensors and would scale each rank's rows separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional

from ..runtime.text import Json

# Added to the squares of gradients and of differences. These are the authors' values.
EPS = (1e-30, 1e-16)
# Weights with fewer elements, biases and norms, have their average in fp32, as in bitsandbytes and torchao.
SMALLEST = 4096
# Most elements that are updated together: four of the largest weights in the blocks of SANA 1.6B. An update takes up to
# 13 bytes for each. A model with fewer weights is updated in as many parts as SANA 1.6B, so that it takes less memory.
BUCKET = 4 * 11_200 * 2_240
PARTS = 15
# Smaller buckets would save little memory.
SMALLEST_BUCKET = 1 << 23
State = dict[str, torch.Tensor]
Total = Callable[[torch.Tensor], torch.Tensor]
# Rounds fp32 values to bf16 in place.
Round = Callable[[torch.Tensor], torch.Tensor]
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
        # By the first parameter of a bucket: the bucket's states as tensors [n, ...], and their rows, which are the
        # states of the parameters.
        self.stacks: dict[torch.Tensor, tuple[State, list[State]]] = {}

    @torch.no_grad()
    def step(self, to_bfloat16: Round | None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient. If they are in bf16, `to_bfloat16` rounds their new values."""
        for group in self.param_groups:
            for bucket in buckets(parameter for parameter in group["params"] if parameter.grad is not None):
                self.step_bucket(bucket, group, to_bfloat16)

    def step_bucket(self, bucket: list[torch.Tensor], group: Json, to_bfloat16: Round | None) -> None:
        rate, decay = group["lr"], 1.0 - group["lr"] * group["weight_decay"]
        updates = self.updates(bucket, self.stack_state(bucket, group["eight_bit"]), group["betas"])
        if to_bfloat16 is None:
            torch._foreach_mul_(bucket, decay)
            torch._foreach_add_(bucket, updates.unbind(), alpha=-rate)
        else:
            weights = torch.stack(bucket).float().mul_(decay).add_(updates, alpha=-rate)
            torch._foreach_copy_(bucket, to_bfloat16(weights).unbind())

    def stack_state(self, bucket: list[torch.Tensor], eight_bit: bool) -> State:
        """Return the states of the parameters of a bucket as tensors [n, ...], whose rows they become."""
        stack, rows = self.stacks.get(bucket[0], ({}, []))
        if [id(row) for row in rows] != [id(self.state[parameter]) for parameter in bucket]:
            # At the first step, and after a state was restored.
            states = [self.state[parameter] or new_state(parameter, eight_bit) for parameter in bucket]
            stack = {name: torch.stack([state[name] for state in states]) for name in states[0]}
            rows = [{name: values[number] for name, values in stack.items()} for number in range(len(bucket))]
            self.state.update(zip(bucket, rows, strict=True))
            self.stacks[bucket[0]] = stack, rows
        return stack

    def updates(self, bucket: list[torch.Tensor], state: State, betas: tuple[float, ...]) -> torch.Tensor:
        """Return the updates [n, *shape] of a bucket before the learning rate. In shards: of this rank's rows."""
        beta_update, beta_square, beta_difference = betas
        gradients = torch.stack([parameter.grad for parameter in bucket]).float()  # type: ignore[misc]
        update = self.inverse_root(gradients.square().add_(EPS[0]), state, "exp_avg_sq", beta_square).mul_(gradients)
        # Its memory is needed below.
        del gradients
        values = update.flatten(1)
        squares = torch.linalg.vector_norm(values, dim=1).square_()
        # The authors limit the RMS of an update to 1.
        size = self.mean(squares, values.shape[1]).sqrt_()
        update = values.div_(size.clamp_(min=1.0)[:, None]).view(update.shape)
        if "exp_avg" in state:
            average = state["exp_avg"].lerp_(update, 1.0 - beta_update)
        else:
            codes, scales = state["exp_avg_codes"], state["exp_avg_scales"]
            average = dequantise(codes, scales).lerp_(update, 1.0 - beta_update)
            quantise(average, codes, scales)
        if not is_matrix(update[0]):
            return average
        differences = update.sub_(average).square_().add_(EPS[1])
        return self.inverse_root(differences, state, "exp_avg_res", beta_difference).mul_(average)

    def inverse_root(self, squares: torch.Tensor, state: State, name: str, beta: float) -> torch.Tensor:
        """Move the moments `name` of `state` towards `squares` [n, *shape]. Returns 1 / sqrt(moment) in their shape.

        The moment of a matrix is the product of its rows' and columns' means, over the mean of all.
        """
        if f"{name}_row" not in state:
            return state[name].mul_(beta).add_(squares, alpha=1.0 - beta).rsqrt()
        rows, columns = state[f"{name}_row"], state[f"{name}_col"]
        matrices = squares.flatten(2)
        rows.mul_(beta).add_(matrices.mean(2), alpha=1.0 - beta)
        columns.mul_(beta).add_(self.mean(matrices.sum(1), matrices.shape[1]), alpha=1.0 - beta)
        # The mean of the rows is the same, but some rows may be on other ranks.
        factors = (rows / columns.mean(1, keepdim=True)).rsqrt_()
        return torch.mul(factors[:, :, None], columns.rsqrt()[:, None]).view(squares.shape)

    def mean(self, sums: torch.Tensor, count: int) -> torch.Tensor:
        """Return `sums` over this rank's `count` values as means over the values of all ranks."""
        if self.total is None:
            return sums / count
        joined = self.total(torch.cat([sums.flatten(), sums.new_full((1,), count)]))
        return (joined[:-1] / joined[-1]).view(sums.shape)


def bucket_size(total: int) -> int:
    """Return the most elements of a bucket, if all parameters have `total` elements."""
    return min(BUCKET, max(SMALLEST_BUCKET, total // PARTS))


def buckets(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of parameters of equal shape with at most `bucket_size` elements, but one parameter or more.

    All ranks yield the same lists.
    """
    equal: dict[Any, list[torch.Tensor]] = {}
    total = 0
    for parameter in parameters:
        sizes = shard_sizes(parameter)
        total += max(sizes)
        equal.setdefault((parameter.shape, parameter.dtype, sizes), []).append(parameter)
    for (*_, sizes), members in equal.items():
        count = max(1, bucket_size(total) // max(1, *sizes))
        yield from (members[start : start + count] for start in range(0, len(members), count))


def shard_sizes(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the number of elements of each shard of the weight of `parameter`, on all ranks.

    Decisions from these sizes are the same on all ranks. The size of the shard on this rank differs where rows do not
    divide evenly.
    """
    return getattr(parameter, "shard_sizes", (parameter.numel(),))


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


def empty_codes(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [like.shape] int8 and scales [blocks] fp32 of zeros."""
    return torch.zeros_like(like, dtype=torch.int8), like.new_zeros(-(-like.numel() // BLOCK), dtype=torch.float32)


def quantise(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write `values`, fp32, into `codes` and `scales` [..., blocks]. A block of zeros has scale 0."""
    blocks = split(values, scales)
    scales.copy_(torch.linalg.vector_norm(blocks, torch.inf, dim=-1))
    # A block of zeros is divided by the smallest normal number.
    fractions = blocks.abs().div_(scales.clamp(min=torch.finfo(blocks.dtype).tiny)[..., None])
    rounded = fractions.sqrt_().mul_(LARGEST).round_().copysign_(blocks)
    codes.copy_(join(rounded, codes))


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values [codes.shape] in fp32 of `codes` and `scales`."""
    blocks = split(codes.float(), scales)
    return join(blocks.mul_(blocks.abs()).mul_(scales.div(LARGEST**2)[..., None]), codes)


def split(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `values` in blocks [*scales.shape, BLOCK]. The last block is padded with zeros."""
    first = scales.ndim - 1
    missing = scales.shape[-1] * BLOCK - math.prod(values.shape[first:])
    # Padding with nothing would copy the values.
    padded = functional.pad(values.flatten(first), (0, missing)) if missing else values
    return padded.reshape(*scales.shape, BLOCK)


def join(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values of `blocks` [..., blocks, BLOCK] in the shape of `like`, without the padding."""
    count = math.prod(like.shape[blocks.ndim - 2 :])
    return (blocks.flatten(-2)[..., :count] if count % BLOCK else blocks).reshape(like.shape)
