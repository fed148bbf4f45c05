"""Bytes of a training step, from the shapes of a transformer's weights and the settings: nothing is loaded.

What is kept for the backward is counted in maps [batch, positions, width] of the forward's dtype. How many there are
was found by counting one and two blocks in the trainer's own step; benchmarks/train_memory.json holds the counted peaks
of whole models beside these predictions. torch's own MemTracker cannot count here: it hooks every parameter, which
torch refuses for frozen ones. To count two and three blocks on fake tensors for each plan, and go on from there, would
be as exact (0.3 %), but takes seconds, and --plan compares dozens of settings in less than one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from ..memory import Shapes, count
from ..model.known_models import MAX_TOKENS, TEXT_WIDTH, Architecture
from .adapters import layer_names
from .optimizers import OPTIMIZERS
from .settings import Method, Phase, TrainingSettings

FP32_BYTES = torch.float32.itemsize


def trained_shapes(shapes: Shapes, method: Method) -> list[tuple[int, ...]]:
    """Return the shapes of what `method` trains on a transformer with weights of `shapes`."""
    if method.kind == "full":
        return list(shapes.values())
    if method.kind == "controlnet":
        return controlnet_shapes(shapes, method.blocks)
    found: list[tuple[int, ...]] = []
    for out, inner in adapted_layers(shapes, method):
        if method.kind == "lokr":
            found += lokr_shapes(out, inner, method.rank)
        else:
            found += [(method.rank, inner), (out, method.rank)]
        if method.kind == "dora":
            found.append((out,))
    return found


def controlnet_shapes(shapes: Shapes, blocks: int) -> list[tuple[int, ...]]:
    """Return the shapes of copies of the first `blocks`, and of a projection before them and one after each."""
    copied = tuple(f"transformer_blocks.{number}." for number in range(blocks))
    (width,) = shapes["caption_norm.weight"]
    found = [shape for name, shape in shapes.items() if name.startswith(copied)]
    return found + (blocks + 1) * [(width, width), (width,)]


def frozen_bytes(shapes: Shapes, settings: TrainingSettings) -> int:
    """Return the bytes of the weights of `shapes` under what is trained, which are all there is without "full"."""
    item = getattr(torch, settings.dtype).itemsize

    def size(name: str, shape: tuple[int, ...]) -> int:
        is_layer = name.startswith("transformer_blocks.") and name.endswith(".weight") and len(shape) > 1
        if settings.method.base == "full" or not is_layer or math.prod(shape[2:]) > 1:
            return math.prod(shape) * item
        # a byte a number, and a scale a row
        return math.prod(shape) + shape[0] * item

    return sum(size(name, shape) for name, shape in shapes.items())


def adapted_layers(shapes: Shapes, method: Method) -> list[tuple[int, int]]:
    """Return outputs and inputs of the layers that get an adapter."""
    pattern = re.compile(layer_names(method))
    weights = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")}
    return [(shape[0], shape[1]) for name, shape in weights.items() if pattern.fullmatch(name)]


def lokr_shapes(out: int, inner: int, rank: int) -> list[tuple[int, ...]]:
    """Return the shapes of a LoKr of a layer: the factors of a Kronecker product, the second of low rank where that is
    smaller (LyCORIS, arXiv 2309.14859, section 3.3; peft's LoKrLayer)."""
    (rows, out), (columns, inner) = nearest_factors(out), nearest_factors(inner)
    if 2 * rank >= max(out, inner):
        return [(rows, columns), (out, inner)]
    return [(rows, columns), (out, rank), (rank, inner)]


def nearest_factors(number: int) -> tuple[int, int]:
    """Return the two factors of `number` that are nearest to each other, the smaller one first."""
    small = next(each for each in range(math.isqrt(number), 0, -1) if number % each == 0)
    return small, number // small


def state_bytes(optimizer: str, shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the bytes of the state of the optimizer of that name for parameters of `shapes`."""
    return sum(round(OPTIMIZERS[optimizer].state_bytes(shape)) for shape in shapes)


def maps(cells: float, tokens: float, weights: float = 0.0) -> np.ndarray:
    """Return as a vector bytes in maps of all latents [B, N, D], in maps of all tokens [B, 300, D], and in a block's
    weights."""
    return np.array([cells, tokens, weights])


class Held(NamedTuple):
    """What a forward and its backward hold, in the forward's dtype."""

    block: np.ndarray  # of each block, without gradient checkpointing
    beside: np.ndarray  # at the peak beside what the blocks hold
    checkpointed: np.ndarray  # at the peak beside what the blocks hold with gradient checkpointing
    kept: np.ndarray = maps(1, 0)  # of each block, with gradient checkpointing
    # of small images the peak is where the last block's weights are worked on: so many of them, and `small` maps
    heavy: float = 0.0
    small: float = 20.0


# by kind and targets, of a forward in bf16, in which adapters are in fp32
HELD = {
    ("lora", "attention"): Held(maps(47.3, 6), maps(5, 0), maps(52.3, 7)),
    ("lora", "feed_forward"): Held(maps(42.3, 2), maps(-8.3, -2), maps(48.3, 3)),
    ("lora", "both"): Held(maps(54.3, 6), maps(6, 0), maps(60.3, 7)),
    ("dora", "attention"): Held(maps(65.3, 12), maps(5, 0), maps(70.3, 13), heavy=0.94),
    ("dora", "feed_forward"): Held(maps(60.3, 2), maps(-9.1, -1, 0.76), maps(66.3, 3, 0.76), heavy=1.98),
    ("dora", "both"): Held(maps(90.3, 12), maps(5.1, 1, 0.76), maps(96.4, 13, 0.76), heavy=2.29),
    ("lokr", "attention"): Held(maps(47.3, 6, 0.77), maps(5, 0, -0.39), maps(52.3, 7, 0.77)),
    ("lokr", "feed_forward"): Held(maps(42.3, 2, 0.97), maps(-7.7, -2, 0.41), maps(48.8, 3, 1.37), heavy=1.97),
    ("lokr", "both"): Held(maps(54.3, 6, 1.74), maps(6.6, 0, 0.02), maps(60.8, 7, 2.15), heavy=2.87),
    ("full", "bfloat16"): Held(maps(42.3, 2), maps(3.5, 7, 0.16), maps(44.8, 9, 0.16)),
    # fp32 weights, cast where they are used
    ("full", "float32"): Held(maps(44.2, 4, 1), maps(4.1, 7, 0.63), maps(43.7, 13, 1.79), maps(2, 0)),
}

HELD_FP32 = {
    ("lora", "attention"): Held(maps(34.2, 2), maps(5, 1), maps(39.2, 3)),
    ("lora", "feed_forward"): Held(maps(31.2, 2), maps(-3.2, -2), maps(37.2, 3)),
    ("lora", "both"): Held(maps(34.2, 2), maps(6, 1), maps(40.2, 3)),
    ("dora", "attention"): Held(maps(46.2, 6), maps(5, 1), maps(51.2, 7), heavy=0.34),
    ("dora", "feed_forward"): Held(maps(43.2, 2), maps(-10.1, -1, 0.48), maps(43.2, 3, 0.49), heavy=0.96),
    ("dora", "both"): Held(maps(58.2, 6), maps(-1, 1, 0.48), maps(58.2, 7, 0.49), heavy=1.1),
    ("lokr", "attention"): Held(maps(34.2, 2, 0.39), maps(5, 1, -0.19), maps(39.2, 3, 0.39), heavy=0.54),
    ("lokr", "feed_forward"): Held(maps(31.2, 2, 0.49), maps(-5.7, -2, 0.32), maps(34.7, 3, 0.81), heavy=0.96),
    ("lokr", "both"): Held(maps(34.2, 2, 0.87), maps(3.5, 1), maps(37.7, 3, 1.19), heavy=1.37),
    ("full", "float32"): Held(maps(38.2, 2), maps(3.5, 5, 0.16), maps(40.7, 7, 0.16)),
}

# over a base in 8 bits, whose weights are made again for each product
HELD_INT8 = {
    ("lora", "attention"): Held(maps(43.7, 6), maps(7.5, 1.5), maps(51.3, 8.3), heavy=0.66, small=40.3),
    ("lora", "feed_forward"): Held(maps(36.7, 2), maps(-0.6, 0), maps(48.3, 4.3), heavy=0.61, small=30.7),
    ("lora", "both"): Held(maps(49.7, 6), maps(10.6, 2.3), maps(60.3, 8.3), heavy=0.65, small=42.7),
    ("lokr", "attention"): Held(
        maps(43.7, 6, 0.77), maps(7.5, 1.5, -0.39), maps(51.3, 8.3, 0.77), heavy=1.43, small=40.3
    ),
    ("lokr", "feed_forward"): Held(
        maps(36.7, 2, 0.97), maps(0, 0, 0.41), maps(48.8, 4.3, 1.37), heavy=1.98, small=30.7
    ),
    ("lokr", "both"): Held(maps(49.7, 6, 1.74), maps(11.2, 2.3, 0.02), maps(60.8, 8.3, 2.15), heavy=2.8, small=42.7),
}

HELD_INT8_FP32 = {
    ("lora", "attention"): Held(maps(30.6, 2), maps(7.5, 2), maps(38.5, 3), heavy=0.62, small=25.2),
    ("lora", "feed_forward"): Held(maps(30.8, 2), maps(-1.4, 0), maps(36.5, 3), heavy=0.63, small=21.9),
    ("lora", "both"): Held(maps(34.1, 2), maps(5, 2), maps(39.5, 3), heavy=0.63, small=24.9),
    ("lokr", "attention"): Held(maps(30.6, 2, 0.39), maps(7.5, 2, -0.19), maps(38.5, 3, 0.39), heavy=1.01, small=25.2),
    ("lokr", "feed_forward"): Held(maps(30.8, 2, 0.49), maps(0, 0, 0.32), maps(36.5, 3, 0.81), heavy=1.44, small=21.9),
    ("lokr", "both"): Held(maps(34.1, 2, 0.87), maps(5, 2), maps(39.5, 3, 1.19), heavy=1.82, small=24.9),
}


class Steering(NamedTuple):
    """What a forward of a ControlNet and of the model that it steers, and their backward, hold."""

    copy: np.ndarray  # of each trained block with its projection, without gradient checkpointing
    base: np.ndarray  # of each frozen block that gradients go through, without gradient checkpointing
    beside: np.ndarray
    reworked: np.ndarray  # at the peak with gradient checkpointing, when a copy's forward is done again
    kept: np.ndarray  # of each copy, with gradient checkpointing: its input, its residual and the gradient of that
    base_reworked: np.ndarray  # at the peak while the model's blocks are worked on, with gradient checkpointing
    passed: np.ndarray = maps(1, 0)  # of each of those blocks, with gradient checkpointing


# by the precision of the trained weights and that of the forward
STEERING = {
    ("float32", "bfloat16"): Steering(
        maps(45.1, 3, 0.94), maps(31.1, 2), maps(2.1, 0), maps(44.2, 4, 1.1), maps(4, 0), maps(33.7, 3)
    ),
    ("bfloat16", "bfloat16"): Steering(
        maps(42.2, 3), maps(35.3, 2), maps(8.1, 0), maps(45, 4.3, 0.16), maps(2, 0), maps(33.5, 3)
    ),
    ("float32", "float32"): Steering(
        maps(39.2, 2), maps(31.1, 2), maps(7, 0), maps(38.8, 2.5, 0.17), maps(2, 0), maps(33.5, 3)
    ),
}

# the first residual acts after the second block, before which the frozen model needs no gradients
UNSTEERED = 2

# what the norms of query and key, which SANA-1.5 has, add in a block: of frozen ones in bf16, of trained ones, of those
# that are in fp32 beside bf16, and where all is in fp32
NORMED, TRAINED_NORMS, MIXED_NORMS, FP32_NORMS = maps(9, 3), maps(12, 4), maps(18, 5), maps(3.3, 1)

# layers with an adapter in a block whose inputs, times A, are kept in fp32: of all latents, and of the tokens
RANK_MAPS = {"attention": (6, 2), "feed_forward": (2, 0), "both": (8, 2)}

# what the adapters of a block take as their inputs, in maps of all latents (2.5 for the second convolution) and of
# all tokens. Of each, dropout keeps a byte a number, and beside a forward in fp32 what it has left in
INPUTS = {"attention": maps(6, 2), "feed_forward": maps(3.5, 0), "both": maps(9.5, 2)}

# Further copies if the parameter is in bf16: the parameter and its gradient during the step, then the parameter and the
# random bits for rounding.
ROUNDING_COPIES, ROUNDED = 2, 3


class StepMemory(NamedTuple):
    """Bytes at the peak of a step beside the weights and what is kept between steps."""

    gradients: int
    work: int


def step_memory(
    settings: TrainingSettings, model: Architecture, shapes: Shapes, phase: Phase, cells: int
) -> StepMemory:
    """Return what a step of `phase` takes whose images have `cells` latents and whose captions MAX_TOKENS tokens."""
    trained = trained_shapes(shapes, settings.method)
    dtype = weights_dtype(settings)
    gradients = count(trained) * dtype.itemsize
    backward = backward_bytes(settings, model, shapes, phase, cells, gradients)
    step = gradients + step_bytes(settings.optimizer.name, trained, dtype)
    return StepMemory(gradients, max(backward, step) - gradients)


def weights_dtype(settings: TrainingSettings) -> torch.dtype:
    """Return the dtype of what is trained, and of its gradients."""
    return getattr(torch, settings.method.weights) if settings.method.whole else torch.float32


def backward_bytes(
    settings: TrainingSettings, model: Architecture, shapes: Shapes, phase: Phase, cells: int, gradients: int
) -> int:
    """Return the peak of forward and backward, with the gradients that are there then."""
    method, item = settings.method, getattr(torch, settings.dtype).itemsize
    block = {name: shape for name, shape in shapes.items() if name.startswith("transformer_blocks.0.")}
    row = phase.batch * model.width * item
    # the bytes of one of each
    units = maps(row * cells, row * MAX_TOKENS, count(block.values()) * item)
    # what comes from the cache: latents and noise are small beside the captions
    given = phase.batch * MAX_TOKENS * TEXT_WIDTH * item
    if method.kind == "controlnet":
        of_block = count(block.values()) * weights_dtype(settings).itemsize
        return round(given + steering_bytes(settings, model, phase, units, gradients, of_block))
    held = held_by(settings, model)
    ranks = 0
    if method.kind in ("lora", "dora"):
        of_cells, of_tokens = RANK_MAPS[method.targets]
        ranks = phase.batch * (of_cells * cells + of_tokens * MAX_TOKENS) * method.rank * FP32_BYTES
    if settings.checkpoint_gradients:
        kept, beside = units @ held.kept, units @ held.checkpointed + ranks
    else:
        kept, beside = units @ held.block + ranks, units @ held.beside
    if held.heavy:
        beside = max(beside, units @ maps(held.small, 0, held.heavy) - kept)
    if phase.accumulate > 1:
        return round(given + gradients + model.layers * kept + beside)
    # the gradients come about as what is kept goes
    per_block = count(trained_shapes(block, method)) * weights_dtype(settings).itemsize
    return round(given + max(model.layers * kept, (model.layers - 1) * per_block + kept) + beside)


def steering_bytes(
    settings: TrainingSettings, model: Architecture, phase: Phase, units: np.ndarray, gradients: int, of_block: int
) -> float:
    """Return what a ControlNet and the model that it steers hold at the peak, with the gradients that are there then.

    `of_block` are the bytes of the gradients of one copy.
    """
    method = settings.method
    steering = STEERING[method.weights, settings.dtype]
    before = gradients if phase.accumulate > 1 else 0
    if not settings.checkpoint_gradients:
        blocks = method.blocks * units @ steering.copy + (model.layers - UNSTEERED) * units @ steering.base
        return before + blocks + units @ steering.beside
    # first the model's blocks are worked on backwards, then the copies, whose gradients come about as they are
    kept = method.blocks * units @ steering.kept
    base = kept + model.layers * units @ steering.passed + units @ steering.base_reworked
    last = gradients - of_block + units @ (steering.reworked + maps(2, 0))
    return max(before + base, before + kept + units @ steering.reworked, last)


def held_by(settings: TrainingSettings, model: Architecture) -> Held:
    """Return what a forward and its backward hold."""
    method, full = settings.method, settings.method.kind == "full"
    mixed = full and method.weights != settings.dtype
    tables = (HELD, HELD_FP32) if method.base == "full" else (HELD_INT8, HELD_INT8_FP32)
    table = tables[settings.dtype == "float32"]
    held = table[method.kind, method.weights if full else method.targets]
    if method.dropout:
        dropped = (1.25 if settings.dtype == "float32" else 0.5) * INPUTS[method.targets]
        held = held._replace(block=held.block + dropped, checkpointed=held.checkpointed + dropped)
    if not model.qk_norm:
        return held
    norms = NORMED if not full else MIXED_NORMS if mixed else TRAINED_NORMS
    norms = FP32_NORMS if settings.dtype == "float32" else norms
    return held._replace(block=held.block + norms, checkpointed=held.checkpointed + norms)


def step_bytes(optimizer: str, trained: Iterable[tuple[int, ...]], dtype: torch.dtype, shards: int = 1) -> int:
    """Return what the optimizer's step takes beside gradients and state, of the weights' rows on one of `shards`."""
    spec = OPTIMIZERS[optimizer]
    sizes = [math.prod(shape) // shards for shape in trained]
    if spec.copies_of_all:
        return spec.copies_of_all * FP32_BYTES * sum(sizes)
    together = max(sizes)
    if shards > 1:
        together = max(together, min(spec.bucket, sum(sizes)))
    copies = spec.step_copies
    if dtype == torch.bfloat16:
        copies = max(copies + ROUNDING_COPIES, ROUNDED)
    return copies * FP32_BYTES * together
