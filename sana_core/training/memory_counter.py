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
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..model.known_models import MAX_TOKENS, TEXT_WIDTH, Architecture, build_transformer
from ..model.latents import CHANNELS
from ..runtime.cancellation import Poll, no_poll
from .cache import Batch
from .came import CAME
from .loss import consistency_loss
from .optimizers import OPTIMIZERS, make_optimizer, step_optimizer
from .settings import CONSISTENCY, Method, TrainingSettings
from .trained_model import check_layers, layer_names
from .trainer import Trainer

# CUDA's allocator rounds the size of a tensor up to a multiple of this.
ALLOCATED = 512
# The most equal blocks that are counted.
COUNTED = 3
Shape = tuple[int, ...]
Report = Callable[[str], None]


class StepMemory(NamedTuple):
    """Bytes of the forward and backward of one batch."""

    # Parameters and buffers, trained or not.
    weights: int
    # The dtype of the trained parameters and of their gradients.
    dtype: torch.dtype
    # The number of trained parameters of each shape.
    trained: tuple[tuple[Shape, int], ...]
    # The number of trained elements in a block.
    block: int
    # The peak before the first block's backward, without the weights and all gradients. It is negative if gradients
    # that do not exist yet are larger than everything else.
    begin: int
    # The same from there on.
    end: int

    @property
    def elements(self) -> int:
        """The number of trained elements."""
        return sum(number * math.prod(shape) for shape, number in self.trained)

    @property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return self.elements * self.dtype.itemsize


class MemoryCounter:
    """Counts each case once. It calls `poll`, which may cancel, and `report` before a count."""

    def __init__(self, poll: Poll = no_poll, report: Report | None = None) -> None:
        self.poll, self.report = poll, report
        self.counted: dict[tuple, Any] = {}

    def count(self, title: str, function: Callable[..., Any], *case: Any) -> Any:
        key = (function, *case)
        if key not in self.counted:
            self.poll()
            if self.report is not None:
                self.report(f"counting the memory of {title}")
            self.counted[key] = function(*case)
        return self.counted[key]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are created within it: `alive` now, and `peak` since the last mark.

    A number that is read from a tensor without data is 0.05.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.start = 0
        self.block: int | None = None
        # (number of the block or None, bytes at the start, at the peak and at the end), from mark to mark.
        self.intervals: list[tuple[int | None, int, int, int]] = []
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
            held = -(-storage.nbytes() // ALLOCATED) * ALLOCATED
            self.alive += held
            self.peak = max(self.peak, self.alive)
            self.known[key] = weakref.ref(storage, partial(self.release, key, held))

    def release(self, key: int, held: int, reference: weakref.ref) -> None:
        del self.known[key]
        self.alive -= held

    def mark(self, block: int | None) -> None:
        """End an interval, and begin an interval of `block`."""
        self.intervals.append((self.block, self.start, self.peak, self.alive))
        self.block, self.start, self.peak = block, self.alive, self.alive

    def watch(self, blocks: Sequence[torch.nn.Module]) -> None:
        """Mark when the forward and the backward of each of `blocks` begin."""
        in_backward = False

        def begin_forward(number: int, *_: Any) -> None:
            # With gradient checkpointing, the backward of a block runs its forward again. Both are one interval.
            if not in_backward:
                self.mark(number)

        def begin_backward(number: int, _: torch.Tensor) -> None:
            nonlocal in_backward
            in_backward = True
            self.mark(number)

        def end_forward(number: int, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(partial(begin_backward, number))

        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(begin_forward, number))
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


class BlockGroup(NamedTuple):
    """Equal blocks of a model."""

    # The names of the layers in a block that get an adapter.
    layers: tuple[str, ...]
    # The number of these blocks in the model.
    total: int
    # How many of them are counted.
    counted: int


def block_groups(method: Method, model: Architecture) -> list[BlockGroup]:
    """Return the groups of the transformer's blocks. For a ControlNet, its copies and its projections follow."""
    if method.kind == "controlnet":
        copies, unsteered = min(method.blocks, COUNTED), max(0, model.layers - method.blocks - 2)
        # The residual of a copied block is added after the next block. The last block with a residual is repeated, so
        # the block after it is counted in the same group.
        steered = BlockGroup((), model.layers - unsteered, min(model.layers, copies + 2))
        copied = BlockGroup((), method.blocks, copies)
        return [steered, BlockGroup((), unsteered, min(unsteered, COUNTED - 1)), copied, copied]
    with torch.device("meta"):
        (block,) = build_transformer(model._replace(layers=1)).transformer_blocks
    names = [
        [f"transformer_blocks.{number}.{name}" for name, _ in block.named_modules()] for number in range(model.layers)
    ]
    check_layers([name for block_names in names for name in block_names], method)
    is_adapted = re.compile(layer_names(method)).fullmatch
    adapted = [tuple(name.split(".", 2)[2] for name in filter(is_adapted, block_names)) for block_names in names]
    # No gradient goes through the blocks before the first adapter.
    first = next(number for number, layers in enumerate(adapted) if layers)
    kinds = Counter((number >= first, layers) for number, layers in enumerate(adapted))
    return [BlockGroup(layers, total, min(total, COUNTED)) for (_, layers), total in kinds.items()]


def count_step(
    settings: TrainingSettings, model: Architecture, pixels: int | None, size: tuple[int, int]
) -> StepMemory:
    """Return the memory of a batch of the first phase, whose latents have this `size` (rows, columns).

    The model was trained on images of `pixels`. A phase that accumulates has the gradients of an earlier batch.
    """
    method, phase, compute = settings.method, settings.phase[0], getattr(torch, settings.dtype)
    groups = block_groups(method, model)
    # {number of a counted block: how often its bytes are repeated}
    repeats: dict[int, int] = {}
    layers: list[str] = []
    first = 0
    for group in groups:
        layers += [
            f"transformer_blocks.{first + block}.{name}" for block in range(group.counted) for name in group.layers
        ]
        if group.total > group.counted:
            repeats[first + group.counted - 2] = group.total - group.counted
        first += group.counted
    few = first
    if method.kind == "controlnet":
        few, method = groups[0].counted + groups[1].counted, replace(method, blocks=groups[2].counted)
    with torch.inference_mode(False), torch.device("meta"):
        transformer = build_transformer(model._replace(layers=few), pixels)
        for parameter in transformer.parameters():
            parameter.data = parameter.data.to(getattr(torch, method.weights) if method.kind == "full" else compute)
        trainer = Trainer(replace(settings, method=replace(method, layers=tuple(layers))))
        trainer.set_up(transformer, 1.0)
    with counting() as live:
        # Replace the tensors on the meta device by tensors on the CPU. A ControlNet and its transformer share modules.
        for module in {module for trained_model in trainer.models for module in trained_model.modules()}:
            for tensors_by_name in (module._parameters, module._buffers):
                for name, tensor in tensors_by_name.items():
                    if tensor is not None:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        tensors_by_name[name] = (
                            torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                        )
        idle = live.alive
        blocks: list[Any] = list(transformer.transformer_blocks)
        if trainer.controlnet is not None:
            blocks += [*trainer.controlnet.transformer_blocks, *trainer.controlnet.controlnet_blocks]
        # How often a tensor exists in the whole model, by its id.
        copies = Counter({id(tensor): 1 for module in trainer.models for tensor in tensors_of(module)})
        for number, more in repeats.items():
            copies.update({id(tensor): more for tensor in tensors_of(blocks[number])})
        tensors = {id(tensor): tensor for module in trainer.models for tensor in tensors_of(module)}
        trained = [parameter for parameter in trainer.models[-1].parameters() if parameter.requires_grad]
        gradients = sum(copies[id(parameter)] * parameter.nbytes for parameter in trained)
        # Gradients of an earlier batch that repeated blocks have.
        missing = 0
        if phase.accumulate > 1:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            missing = gradients - sum(parameter.nbytes for parameter in trained)
        live.watch(blocks)
        live.mark(None)
        latents = torch.empty(phase.batch, CHANNELS, *size)
        embeds = torch.empty(phase.batch, MAX_TOKENS, TEXT_WIDTH, dtype=compute)
        mask = torch.empty(phase.batch, MAX_TOKENS, dtype=torch.int64)
        control = torch.empty_like(latents) if trainer.controlnet is not None else None
        batch = Batch(latents, embeds, mask, None, [], control)
        noise, times = torch.empty_like(latents), torch.empty(phase.batch)
        # The prompt that replaces dropped captions stays in memory.
        empty_prompt = torch.empty_like(embeds[0])
        if settings.loss.kind == CONSISTENCY:
            point, prompt, weight = trainer.on_trajectory(batch, noise, times, torch.empty(phase.batch))
            losses = consistency_loss(transformer, point, prompt, 1.0, weight)
        else:
            losses = trainer.batch_loss(batch, noise, times)
        losses.sum().backward()
        del empty_prompt
        live.mark(None)
        grown, peaks = missing - idle - gradients, []
        for interval_block, start, peak, end in live.intervals[1:]:
            growth = 0 if interval_block is None else repeats.get(interval_block, 0) * (end - start)
            peaks.append(peak + grown + max(0, growth))
            grown += growth
        shapes: Counter[Shape] = Counter()
        for parameter in trained:
            shapes[tuple(parameter.shape)] += copies[id(parameter)]
        weights = sum(copies[key] * tensor.nbytes for key, tensor in tensors.items())
        largest = max(sum(tensor.numel() for tensor in tensors_of(block) if tensor.requires_grad) for block in blocks)
    return StepMemory(weights, trained[0].dtype, tuple(shapes.items()), largest, max(peaks[:-1]), peaks[-1])


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def count_optimizer(
    name: str, trained: Sequence[tuple[Shape, int]], dtype: torch.dtype, shards: int
) -> tuple[int, int]:
    """Return the bytes of the optimizer's state, and of its step at the peak without weights, gradients and state.

    It has these numbers of parameters of these shapes in `dtype`, or their rows on one of `shards` GPUs.

    One parameter of each shape is counted, and two parameters of the largest shape. The bytes that the second one adds
    to a step exist for all parameters at once, the other bytes for one parameter at a time.
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
        before = live.alive
        live.mark(None)
        step_optimizer(optimizer, torch.Generator().manual_seed(0))
        return live.alive - before, live.peak - live.alive

    local: Counter[Shape] = Counter()
    for (rows, *columns), number in trained:
        local[(-(-rows // shards), *columns)] += number
    with counting() as live:
        counted = {shape: first_step([shape]) for shape in local}
        largest = max(local, key=math.prod)
        (_, alone), (_, double) = counted[largest], first_step([largest, largest])
    state, work = (sum(number * counted[shape][part] for shape, number in local.items()) for part in (0, 1))
    share = max(0.0, double / max(1, alone) - 1)
    if OPTIMIZERS[name].bucket:
        share *= min(1.0, OPTIMIZERS[name].bucket / sum(number * math.prod(shape) for shape, number in local.items()))
    return state, round(share * work + (1 - share) * alone)
