"""Bytes of a training step, counted: the step of a few blocks runs on tensors that have shapes and no data.

Blocks that are alike take the same memory, except the first and the last one. So three of them are counted, and what
the second one adds and frees is repeated for the others. A count takes about a second, whatever the sizes are.
"""

from __future__ import annotations

import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..model.known_models import CROSS_HEADS, HEAD_DIM, MAX_TOKENS, TEXT_WIDTH, Architecture
from ..model.latents import CHANNELS
from ..runtime.cancellation import Poll, no_poll
from .cache import Batch
from .came import CAME
from .optimizers import OPTIMIZERS, make_optimizer, step_optimizer
from .settings import Method, TrainingSettings
from .trained_model import layer_names
from .trainer import Trainer

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

FP32_BYTES = torch.float32.itemsize
# CUDA's allocator rounds a tensor's size up to a multiple of this.
ALLOCATED = 512
# Number of equal blocks that are counted. The second one is repeated for the other blocks.
COUNTED = 3
Shape = tuple[int, ...]
# ("forward" or "backward", number of the block). None: outside of blocks.
Label = tuple[str, int] | None
# (names of the layers with an adapter in a block, number of such blocks). No names: `Method.layers` selects all.
Group = tuple[tuple[str, ...], int]
Report = Callable[[str], None]


class StepMemory(NamedTuple):
    """Bytes of forward and backward of one batch."""

    weights: int  # Parameters and buffers, trained or not.
    trained: tuple[tuple[Shape, int], ...]  # Shapes of the trained parameters, and their numbers.
    block: int  # Trained elements of a block.
    begin: int  # The peak before the first block's backward, beside weights and state.
    end: int  # The peak from there on, beside weights and state.

    @property
    def elements(self) -> int:
        """The number of trained elements."""
        return sum(number * math.prod(shape) for shape, number in self.trained)


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


def weights_dtype(settings: TrainingSettings) -> torch.dtype:
    """Return the dtype of the trained parameters and of their gradients."""
    return getattr(torch, settings.method.weights) if settings.method.whole else torch.float32


class Interval(NamedTuple):
    """Bytes between two marks: at the start and the end, and at most."""

    label: Label
    start: int
    peak: int
    end: int


class LiveBytes(TorchDispatchMode):
    """Counts the tensors that are made within it: in `alive`, and in `peak` the most at once since the last mark.

    A number that is read from a tensor without data is 0.05.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.start = 0
        self.label: Label = None
        self.intervals: list[Interval] = []
        self.known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.05 if args[0].is_floating_point() else 1
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, torch.Tensor) else tree_leaves(out):
            # The tensors inside of torchao's are counted by themselves.
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

    def mark(self, label: Label) -> None:
        """End an interval, and begin the interval of `label`."""
        self.intervals.append(Interval(self.label, self.start, self.peak, self.alive))
        self.label, self.start, self.peak = label, self.alive, self.alive


@contextmanager
def counting() -> Iterator[LiveBytes]:
    """Let this thread make tensors that have no data, and count them."""
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


def repeated_peaks(intervals: Sequence[Interval], repeats: dict[int, int]) -> list[int]:
    """Return the peak of each interval when intervals of block `number` occur `repeats[number]` more times."""
    shift, peaks = 0, []
    for label, start, peak, end in intervals:
        growth = 0 if label is None else repeats.get(label[1], 0) * (end - start)
        peaks.append(peak + shift + max(0, growth))
        shift += growth
    return peaks


def build_transformer(model: Architecture, pixels: int) -> SanaTransformer2DModel:
    """Return a transformer with random weights, for images of `pixels`."""
    from diffusers import SanaTransformer2DModel

    heads = CROSS_HEADS.get(model.width, model.width // HEAD_DIM)
    # The released model of 4096 px has a position embedding.
    large = {"interpolation_scale": 2.0, "sample_size": 128} if pixels > 2048 else {}
    return SanaTransformer2DModel(
        num_attention_heads=model.width // HEAD_DIM,
        num_layers=model.layers,
        num_cross_attention_heads=heads,
        cross_attention_head_dim=model.width // heads,
        cross_attention_dim=model.width,
        qk_norm="rms_norm_across_heads" if model.qk_norm else None,
        guidance_embeds=model.guidance_embeds,
        **large,
    )


def drop_data(models: Sequence[Any]) -> None:
    """Give `models`, which are on the meta device, parameters and buffers on the CPU that have no data."""
    # Models may share a tensor.
    fakes: dict[torch.Tensor, torch.Tensor] = {}
    for module in (module for model in models for module in model.modules()):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in fakes:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    fakes[tensor] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    fakes[fakes[tensor]] = fakes[tensor]
                if tensor is not None:
                    tensors[name] = fakes[tensor]


def block_groups(names: Iterable[str], method: Method, layers: int) -> tuple[Group, ...]:
    """Return the kinds of a transformer's blocks, by the names of the layers that get an adapter, with their number."""
    if not method.layers:
        return (((), layers),)
    pattern = re.compile(layer_names(method))
    adapted: list[list[str]] = [[] for _ in range(layers)]
    for name in names:
        layer = name.removesuffix(".weight")
        if pattern.fullmatch(layer):
            _, number, inner = layer.split(".", 2)
            adapted[int(number)].append(inner)
    first = next(number for number, inner in enumerate(adapted) if inner)
    # No gradient goes through the blocks before the first adapter.
    kinds = Counter((number >= first, tuple(sorted(inner))) for number, inner in enumerate(adapted))
    return tuple((inner, number) for (_, inner), number in kinds.items())


def count_step(
    settings: TrainingSettings, model: Architecture, size: tuple[int, int], groups: tuple[Group, ...]
) -> StepMemory:
    """Return the memory of a batch of the first phase in a model whose blocks are of `groups`.

    A phase that accumulates has the gradients of an earlier batch.
    """
    method, phase = settings.method, settings.phase[0]
    few, repeats, layers = 0, {}, []
    if method.kind == "controlnet":
        copies, plain = min(method.blocks, COUNTED), min(model.layers - method.blocks, COUNTED + 1)
        few, more = copies + plain, method.blocks - copies
        # The copies are numbered after the base blocks, and their projections after them. Some base blocks come before
        # a residual, the others after the last one.
        repeats = {copies: more, copies + 2: model.layers - few - more, few + 1: more, few + copies + 1: more}
    for inner, number in () if few else groups:
        alike = min(number, COUNTED)
        repeats[few + 1] = number - alike
        layers += [f"transformer_blocks.{few + block}.{name}" for block in range(alike) for name in inner]
        few += alike
    repeats = {block: times for block, times in repeats.items() if times}
    method = replace(method, layers=tuple(layers), blocks=min(method.blocks, COUNTED))
    with torch.inference_mode(False), torch.device("meta"):
        transformer = build_transformer(model._replace(layers=few), 1024)
        dtype = getattr(torch, method.weights if method.kind == "full" else settings.dtype)
        # The library's own `to` warns of a list of modules that is empty.
        torch.nn.Module.to(transformer, dtype)
        trainer = Trainer(replace(settings, method=method))
        trainer.set_up(transformer, 1.0)
    models: list[Any] = trainer.models
    with counting() as live:
        drop_data(models)
        idle = live.alive
        blocks: list[Any] = list(transformer.transformer_blocks)
        if trainer.controlnet is not None:
            blocks += [*trainer.controlnet.transformer_blocks, *trainer.controlnet.controlnet_blocks]
        more_of = {id(tensor): times for number, times in repeats.items() for tensor in tensors_of(blocks[number])}
        tensors = {id(tensor): tensor for module in models for tensor in tensors_of(module)}
        trained = {name: parameter for name, parameter in models[-1].named_parameters() if parameter.requires_grad}
        missing = 0
        if phase.accumulate > 1:
            for parameter in trained.values():
                parameter.grad = torch.empty_like(parameter)
                missing += more_of.get(id(parameter), 0) * parameter.nbytes
        watch_blocks(live, blocks)
        live.mark(None)
        batch = fake_batch(settings, size)
        # The batch, and the empty prompt, which replaces captions that are dropped, stay during a step.
        empty = torch.empty(batch[0].embeds.shape[1:], dtype=batch[0].embeds.dtype)
        trainer.parameters = trained
        trainer.batch_loss(*batch).sum().backward()
        del empty
        live.mark(None)
        peaks = [peak - idle + missing for peak in repeated_peaks(live.intervals[1:], repeats)]
        shapes: Counter[Shape] = Counter()
        for parameter in trained.values():
            shapes[tuple(parameter.shape)] += 1 + more_of.get(id(parameter), 0)
        weights = sum(tensor.nbytes * (1 + more_of.get(key, 0)) for key, tensor in tensors.items())
        largest = max(sum(tensor.numel() for tensor in tensors_of(block) if tensor.requires_grad) for block in blocks)
    return StepMemory(weights, tuple(shapes.items()), largest, max(peaks[:-1]), peaks[-1])


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def watch_blocks(live: LiveBytes, blocks: Sequence[torch.nn.Module]) -> None:
    """Let `live` mark when the forward and the backward of each block begin."""

    def enter(number: int, *_: Any) -> None:
        if live.label is None or live.label[0] == "forward":
            live.mark(("forward", number))

    def leave(number: int, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad and live.label is not None and live.label[0] == "forward":
            output.register_hook(lambda gradient: live.mark(("backward", number)))

    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(enter, number))
        block.register_forward_hook(partial(leave, number))


def fake_batch(settings: TrainingSettings, size: tuple[int, int]) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Return a batch with the longest captions, its noise and its sigmas."""
    number, dtype = settings.phase[0].batch, getattr(torch, settings.dtype)
    latents = torch.empty(number, CHANNELS, *size)
    embeds = torch.empty(number, MAX_TOKENS, TEXT_WIDTH, dtype=dtype)
    mask = torch.empty(number, MAX_TOKENS, dtype=torch.int64)
    control = torch.empty_like(latents) if settings.method.kind == "controlnet" else None
    return Batch(latents, embeds, mask, None, [], control), torch.empty_like(latents), torch.empty(number)


def count_optimizer(
    name: str, trained: Sequence[tuple[Shape, int]], dtype: torch.dtype, shards: int
) -> tuple[int, int]:
    """Return the bytes of the optimizer's state, and at the peak of its step beside weights, gradients and state.

    It has parameters of these shapes and numbers in `dtype`, or their rows on one of `shards`.

    One parameter of each shape is counted, and two parameters of the largest shape. The bytes that the second one adds
    to a step exist for all parameters at once, the other bytes for one parameter at a time.
    """
    local = [((-(-rows // shards), *columns), number) for (rows, *columns), number in trained]
    with counting() as live:
        counted = [(number, *optimizer_bytes(name, [shape], dtype, shards, live)) for shape, number in local]
        shape, _ = max(local, key=lambda pair: math.prod(pair[0]))
        (_, alone), (_, double) = (optimizer_bytes(name, [shape] * copies, dtype, shards, live) for copies in (1, 2))
    share = max(0.0, double / max(1, alone) - 1)
    if OPTIMIZERS[name].bucket:
        share *= min(1.0, OPTIMIZERS[name].bucket / sum(number * math.prod(shape) for shape, number in local))
    together = sum(number * work for number, _, work in counted)
    return sum(number * state for number, state, _ in counted), round(share * together + (1 - share) * alone)


def optimizer_bytes(
    name: str, shapes: Sequence[Shape], dtype: torch.dtype, shards: int, live: LiveBytes
) -> tuple[int, int]:
    """Return the bytes that the first step for parameters of `shapes` leaves as state, and takes beside it."""
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
