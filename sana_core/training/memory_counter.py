"""The memory of a training step, counted: the trainer's step runs on tensors that have shapes and no data.

Equal blocks take the same memory, except for the first and the last one. So at most COUNTED of them run, and the bytes
that the second-last one adds and frees are repeated for the others. A count takes about a second, whatever the sizes.
"""

from __future__ import annotations

import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..model.known_models import MAX_TOKENS, TEXT_WIDTH, Architecture, build_transformer
from ..model.latents import CHANNELS
from ..runtime.cancellation import Poll, no_poll
from .cache import Batch
from .came import CAME, SMALLEST, bucket_size
from .loss import consistency_loss
from .optimizers import OPTIMIZERS, make_optimizer, step_optimizer
from .settings import CONSISTENCY, Method, TrainingSettings
from .trained_model import check_layers, layer_names
from .trainer import Trainer

# CUDA's allocator rounds the size of a tensor up to a multiple of this.
ALLOCATED = 512
# The most equal blocks that are counted.
COUNTED = 3
# `LiveBytes.block` outside of a block. SETUP: before the step. BEGIN: in the step, before the first block. END: after
# the step.
SETUP, BEGIN, END = -1, -2, -3
Shape = tuple[int, ...]
Report = Callable[[str], None]
# Names of the layers in a block that get an adapter, the number of such blocks, and how many of them are counted.
EqualBlocks = tuple[tuple[str, ...], int, int]


class StepMemory(NamedTuple):
    """Bytes of the forward and backward of one batch."""

    # Parameters and buffers, trained or not.
    weights: int
    # The dtype of the trained parameters and of their gradients.
    dtype: torch.dtype
    # The number of trained parameters of each shape.
    trained: tuple[tuple[Shape, int], ...]
    # Trained elements of the block that has the most of them.
    largest_block: int
    # Peak bytes without weights and gradients, before the backward of block 0. Negative if gradients that do not exist
    # yet are larger than everything else.
    peak_before_first_block: int
    # The same, during and after the backward of block 0.
    peak_from_first_block: int

    @property
    def elements(self) -> int:
        """The number of trained elements."""
        return sum(number * math.prod(shape) for shape, number in self.trained)

    @property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return self.elements * self.dtype.itemsize


class CountCache:
    """Calls each count once per case. Before a count it calls `poll`, which may cancel, and `report`."""

    def __init__(self, poll: Poll = no_poll, report: Report | None = None) -> None:
        self.poll, self.report = poll, report
        self.counted: dict[tuple, Any] = {}

    def count(self, title: str, function: Callable[..., Any], *case: Any) -> Any:
        key = (function, *case)
        if key not in self.counted:
            self.poll()
            if self.report is not None:
                self.report(f"estimating the memory of {title}")
            self.counted[key] = function(*case)
        return self.counted[key]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are created within it: `alive` now, and `peak` since the last mark.

    Reading a number (`.item()`) from a tensor without data returns 0.05, or 1 for integers and booleans.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.start = 0
        self.block = SETUP
        # (number of the block, bytes at the start, at the peak and at the end), from mark to mark.
        self.intervals: list[tuple[int, int, int, int]] = []
        self.known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.05 if args[0].is_floating_point() else 1
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, torch.Tensor) else tree_leaves(out):
            # A tensor of torchao has no memory. The tensors inside of it are counted.
            if isinstance(tensor, torch.Tensor) and not is_traceable_wrapper_subclass(tensor):
                self.track(tensor.untyped_storage())
        return out

    def track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known:
            size = -(-storage.nbytes() // ALLOCATED) * ALLOCATED
            self.alive += size
            self.peak = max(self.peak, self.alive)
            self.known[key] = weakref.ref(storage, partial(self.release, key, size))

    def release(self, key: int, size: int, reference: weakref.ref) -> None:
        del self.known[key]
        self.alive -= size

    def mark(self, block: int) -> None:
        """End the interval, and begin an interval of `block`, unless it has begun."""
        if block != self.block:
            self.intervals.append((self.block, self.start, self.peak, self.alive))
            self.block, self.start, self.peak = block, self.alive, self.alive

    def watch(self, blocks: Sequence[torch.nn.Module]) -> None:
        """Mark when the forward and the backward of each of `blocks` begin.

        With gradient checkpointing, the backward of a block runs its forward again, in the same interval.
        """

        def end_forward(number: int, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: self.mark(number))

        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda module, inputs, number=number: self.mark(number))
            block.register_forward_hook(partial(end_forward, number))


@contextmanager
def counting() -> Iterator[LiveBytes]:
    """Let this thread create tensors that have no data, and count them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    live = LiveBytes()
    # torchao would compile its step. ComfyUI runs nodes in inference mode.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
        FakeTensorMode(allow_non_fake_inputs=True),
        live,
    ):
        yield live


def block_groups(method: Method, model: Architecture) -> list[EqualBlocks]:
    """Return the groups of equal blocks of the transformer in their order."""
    if method.kind == "controlnet":
        # The residual of a copied block is added after the next block. The last block with a residual is repeated, so
        # the block after it is counted in the same group.
        unsteered = max(0, model.layers - method.blocks - 2)
        steered = model.layers - unsteered, min(model.layers, min(method.blocks, COUNTED) + 2)
        return [((), *steered), ((), unsteered, min(unsteered, COUNTED - 1))]
    with torch.device("meta"):
        (block,) = build_transformer(model._replace(layers=1)).transformer_blocks
    names = [name for name, _ in block.named_modules()]
    paths = [[f"transformer_blocks.{number}.{name}" for name in names] for number in range(model.layers)]
    check_layers(chain.from_iterable(paths), method)
    is_adapted = re.compile(layer_names(method)).fullmatch
    adapted = [tuple(compress(names, map(is_adapted, block_paths))) for block_paths in paths]
    # No gradient goes through the blocks before the first adapter.
    first = next(number for number, layers in enumerate(adapted) if layers)
    kinds = Counter((number >= first, layers) for number, layers in enumerate(adapted))
    return [(layers, total, min(total, COUNTED)) for (_, layers), total in kinds.items()]


def count_step(
    settings: TrainingSettings,
    model: Architecture,
    pixels: int | None,
    size: tuple[int, int],
    gathered: bool = False,
    accelerator: bool = False,
) -> StepMemory:
    """Return the memory of a batch of the first phase, whose latents have this `size` (rows, columns).

    The model was trained on images of `pixels`. A phase that accumulates has the gradients of an earlier batch.
    With `gathered`, the trained weights have the precision of the computation, in which FSDP gathers them. With
    `accelerator`, autocast chooses the dtypes of GPUs.
    """
    method, phase, compute = settings.method, settings.phase[0], getattr(torch, settings.dtype)
    groups, copies = block_groups(method, model), min(method.blocks, COUNTED)
    counted_blocks = sum(counted for _, _, counted in groups)
    if method.kind == "controlnet":
        # Its copies of blocks, and their projections.
        groups += [((), method.blocks, copies)] * 2
    # {number of a counted block: how often its bytes are repeated}
    repeats: dict[int, int] = {}
    layers: list[str] = []
    first = 0
    for names, total, counted in groups:
        numbers = range(first, first + counted)
        layers += [f"transformer_blocks.{number}.{name}" for number in numbers for name in names]
        if total > counted:
            # The second-last counted block represents the blocks that are not counted.
            repeats[numbers[-2]] = total - counted
        first += counted
    with torch.inference_mode(False), torch.device("meta"):
        transformer = build_transformer(model._replace(layers=counted_blocks), pixels)
        for parameter in transformer.parameters():
            parameter.data = parameter.data.to(getattr(torch, method.weights) if method.kind == "full" else compute)
        trainer = Trainer(replace(settings, method=replace(method, layers=tuple(layers), blocks=copies)))
        trainer.set_up(transformer, 1.0)
        for parameter in trainer.models[-1].parameters() if gathered and settings.uses_autocast else ():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(compute)
    with counting() as live:
        to_fake(trainer.models, "cpu")
        if accelerator and settings.uses_autocast:
            compute_norms_in_fp32(trainer.models)
        idle = live.alive
        blocks: list[Any] = list(transformer.transformer_blocks)
        if trainer.controlnet is not None:
            blocks += [*trainer.controlnet.transformer_blocks, *trainer.controlnet.controlnet_blocks]
        # How often a tensor exists in the whole model.
        times = {tensor: 1 for module in trainer.models for tensor in tensors_of(module)}
        for number, more in repeats.items():
            for tensor in tensors_of(blocks[number]):
                times[tensor] += more
        trained = [parameter for parameter in trainer.models[-1].parameters() if parameter.requires_grad]
        gradients = sum(times[parameter] * parameter.nbytes for parameter in trained)
        # Bytes of the blocks that were not run: gradients of an earlier batch, then everything they would have kept.
        skipped = 0
        if phase.accumulate > 1:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
                skipped += (times[parameter] - 1) * parameter.nbytes
        live.watch(blocks)
        live.mark(BEGIN)
        latents, noise = (torch.empty(phase.batch, CHANNELS, *size) for _ in range(2))
        embeds = torch.empty(phase.batch, MAX_TOKENS, TEXT_WIDTH, dtype=compute)
        mask = torch.empty(phase.batch, MAX_TOKENS, dtype=torch.int64)
        control = None if trainer.controlnet is None else torch.empty_like(latents)
        batch, timesteps = Batch(latents, embeds, mask, None, [], control), torch.empty(phase.batch)
        # The prompt that replaces dropped captions stays in memory.
        empty_prompt = torch.empty_like(embeds[0])
        if settings.loss.kind == CONSISTENCY:
            point, prompt, weight = trainer.on_trajectory(batch, noise, timesteps, torch.empty(phase.batch))
            losses = consistency_loss(transformer, point, prompt, 1.0, weight)
        else:
            losses = trainer.batch_loss(batch, noise, timesteps)
        losses.sum().backward()
        del empty_prompt
        live.mark(END)
        peaks = []
        for number, start, peak, end in live.intervals[1:]:
            blocks_growth = repeats.get(number, 0) * (end - start)
            whole_model_peak = peak + skipped + max(0, blocks_growth)
            peaks.append(whole_model_peak - idle - gradients)
            skipped += blocks_growth
        shapes: Counter[Shape] = Counter()
        for parameter in trained:
            shapes[tuple(parameter.shape)] += times[parameter]
        weights = sum(number * tensor.nbytes for tensor, number in times.items())
        largest = max(sum(tensor.numel() for tensor in tensors_of(block) if tensor.requires_grad) for block in blocks)
    return StepMemory(weights, trained[0].dtype, tuple(shapes.items()), largest, max(peaks[:-1]), peaks[-1])


def to_fake(models: Sequence[torch.nn.Module], device: str) -> None:
    """Replace the meta tensors of `models` by fake tensors on `device`, which `counting` counts.

    `torch.nn.Module.to_empty` fails for modules that two models share.
    """
    for module in {module for model in models for module in model.modules()}:
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, torch.nn.Parameter(empty, parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def compute_norms_in_fp32(models: Sequence[torch.nn.Module]) -> None:
    """Let the layer norms of `models` compute in fp32, as autocast does on GPUs. On the CPU they compute in bf16."""
    for module in {module for model in models for module in model.modules()}:
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_pre_hook(lambda norm, inputs: (inputs[0].float(),))


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def count_optimizer(
    name: str, trained: Sequence[tuple[Shape, int]], dtype: torch.dtype, shards: int
) -> tuple[int, int]:
    """Return the bytes of the optimizer's state, and the extra bytes at the peak of its step.

    `trained`: (shape, number) of the parameters. With `shards` > 1, one GPU's rows of them.

    Measured on one parameter of each shape and on two of the largest: bytes that the second one adds exist for all
    parameters at once, all other bytes for one at a time. If a step updates buckets of equal parameters, they exist for
    each parameter of a bucket.
    """

    def first_step(shapes: Sequence[Shape]) -> tuple[int, int]:
        parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
            if shards > 1:
                parameter.shard_sizes = (parameter.numel(),) * shards  # type: ignore[attr-defined]
        optimizer = make_optimizer(name, parameters, 1e-4)
        if shards > 1 and isinstance(optimizer, CAME):
            optimizer.total = lambda sums: sums
        before = live.peak = live.alive
        step_optimizer(optimizer, torch.Generator().manual_seed(0))
        return live.alive - before, live.peak - live.alive

    # torchao computes its table of 8-bit values once per process. Compute it here, from tensors that have data.
    with torch.inference_mode(False), torch.compiler.set_stance("force_eager"):
        parameter = torch.nn.Parameter(torch.zeros(SMALLEST))
        parameter.grad = torch.zeros_like(parameter)
        make_optimizer(name, [parameter], 1e-4).step()
    local: Counter[Shape] = Counter()
    for (rows, *columns), number in trained:
        local[(-(-rows // shards), *columns)] += number
    with counting() as live:
        counted = {shape: first_step([shape]) for shape in local}
        largest = max(local, key=math.prod)
        (_, alone), (_, double) = counted[largest], first_step([largest, largest])
    state, work = (sum(number * counted[shape][part] for shape, number in local.items()) for part in (0, 1))
    if OPTIMIZERS[name].in_buckets or dtype != torch.float32:
        together = bucket_size(sum(number * math.prod(shape) for shape, number in local.items()))
        largest_bucket = 0
        for shape, number in local.items():
            work = counted[shape][1]
            # fp32 weights, gradients and random numbers of a bucket exist at once, the rest unless the step is a loop.
            of_each = 12 * math.prod(shape) if OPTIMIZERS[name].loops else work
            members = min(number, max(1, together // math.prod(shape)))
            largest_bucket = max(largest_bucket, work + (members - 1) * of_each)
        return state, largest_bucket
    share = max(0.0, double / max(1, alone) - 1)
    return state, round(share * work + (1 - share) * alone)
