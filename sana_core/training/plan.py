"""The memory of each stage of a training run, and the time of its steps, before anything is loaded.

The time is predicted from the operations and was not measured on a GPU. A GPU is assumed to reach REACHED of its peak,
as large models do in training. Encoding, validation and communication between GPUs are not counted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from ..checkpoints import Checkpoint, find_part, inspect_checkpoint
from ..checkpoints.configs import architecture
from ..checkpoints.load import build_module
from ..decode.plan import Planner
from ..decode.stages import Stages, decoder_stages, encoder_stages
from ..errors import InputError
from ..memory import (
    CONTEXT,
    Shapes,
    count,
    text_bytes,
    transformer_bytes,
)
from ..model.known_models import (
    MAX_TOKENS,
    POSITIONED,
    TEXT_WIDTH,
    Architecture,
)
from ..model.latents import DOWNSCALE
from ..runtime.cancellation import Poll, no_poll
from ..split.cost import position_flops
from ..split.speed import SIDE, seconds_of
from .images import shapes_at
from .memory_model import (
    FP32_BYTES,
    MemoryCounter,
    Report,
    StepMemory,
    block_groups,
    count_optimizer,
    count_step,
    weights_dtype,
)
from .run_log import clock
from .settings import CONSISTENCY, Phase, TrainingSettings
from .trained_model import check_layers

# Copies of the largest weight in fp32 while an adapter is added to it.
MERGED_COPIES = 2
# Models for latents with this many columns or rows certainly have a position embedding.
EMBEDDED = 4096 // DOWNSCALE
REACHED = 0.4
# Published TFLOP/s, dense in bf16 with fp32 sums.
GPUS = {"H100": 989.0, "RTX 4090": 165.0}


class Base(NamedTuple):
    """The models of a run, as far as a plan needs them."""

    model: Architecture
    shapes: Shapes  # Shapes of the transformer's weights.
    resolution: int | None  # The training size of the transformer in pixels. None: the resolution of the run.
    text_parameters: int
    autoencoder_parameters: int
    encoder: Stages
    decoder: Stages
    counter: MemoryCounter


class Stage(NamedTuple):
    """Bytes on the GPU at once in one stage of a run."""

    name: str
    weights: int  # Weights of the models and of the adapter.
    state: int  # Gradients, the optimizer's state and the moving average.
    work: int  # Everything else, at the peak of the stage.

    @property
    def bytes(self) -> int:
        return self.weights + self.state + self.work


class Plan(NamedTuple):
    """The stages of a run, one after another."""

    stages: tuple[Stage, ...]

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.bytes)

    @property
    def card(self) -> int:
        """Bytes of the GPU, including the driver."""
        return self.largest.bytes + CONTEXT


def read_base(settings: TrainingSettings, poll: Poll = no_poll, report: Report | None = None) -> Base:
    """Read the headers and configurations of the models of `settings`.

    The plan calls `poll`, which may cancel, and `report` before it counts a step.
    """

    def part(kind: str) -> Checkpoint:
        return find_part(inspect_checkpoint(settings.source(kind)), kind)

    def shapes(info: Checkpoint) -> Shapes:
        return {name: header.shape for name, header in info.headers.items()}

    transformer, image = part("transformer"), part("autoencoder")
    autoencoder = build_module(image)
    return Base(
        architecture(transformer.headers),
        shapes(transformer),
        transformer.resolution,
        count(shapes(part("text_encoder")).values()),
        count(shapes(image).values()),
        encoder_stages(autoencoder),  # type: ignore[arg-type]  # build_module's class follows the kind
        decoder_stages(autoencoder),  # type: ignore[arg-type]
        MemoryCounter(poll, report),
    )


def plan_training(settings: TrainingSettings, base: Base, accelerator: bool = True) -> Plan:
    """Return the memory of a run with checked `settings`, on an accelerator or on the CPU.

    The work of a stage is the least with which it can run. With more memory, latents are encoded and images decoded in
    larger strips. Captions count with the largest number of tokens, images with the largest shape at their resolution.
    Raises InputError for the consistency loss.
    """
    if settings.loss.kind == CONSISTENCY:
        raise InputError("loss: got consistency, which --plan does not support, expected flow; train without --plan")
    if not settings.method.whole:
        check_layers((name.removesuffix(".weight") for name in base.shapes), settings.method)
    first = [captions_stage(settings, base), latents_stage(settings, base, accelerator)]
    stages = [] if settings.stream else first
    stages += [
        training_stage(phase, number, settings, base, accelerator) for number, phase in enumerate(settings.phase, 1)
    ]
    if settings.validation.every and settings.validation.prompts:
        stages.append(validation_stage(settings, base, accelerator))
    return Plan(tuple(stages))


def captions_stage(settings: TrainingSettings, base: Base) -> Stage:
    item = getattr(torch, settings.dtype).itemsize
    return Stage("captions", base.text_parameters * item, 0, text_bytes(1, item))


def latents_stage(settings: TrainingSettings, base: Base, accelerator: bool) -> Stage:
    """Return the stage that encodes the images, one by one and in fp32."""
    width, height = largest_shape(max(phase.largest for phase in settings.phase))
    work = Planner(base.encoder, height, width, torch.float32, accelerator).floor().peak_bytes
    return Stage("latents", base.autoencoder_parameters * FP32_BYTES, 0, work)


class Encoding(NamedTuple):
    """Bytes of the encoders of a run that streams."""

    weights: int  # Weights of both encoders.
    work: int  # The larger peak of the two.


def streaming(settings: TrainingSettings, base: Base, accelerator: bool = True) -> Encoding:
    """Return the memory that encoding adds to a training step. It is zero for a run that does not stream."""
    if not settings.stream:
        return Encoding(0, 0)
    stages = captions_stage(settings, base), latents_stage(settings, base, accelerator)
    return Encoding(sum(stage.weights for stage in stages), max(stage.work for stage in stages))


def largest_shape(resolution: int) -> tuple[int, int]:
    """Return the width and height, in latents, of the shape with the most of them at `resolution` pixels."""
    width, height = max(shapes_at(resolution), key=lambda shape: shape[0] * shape[1])
    return width // DOWNSCALE, height // DOWNSCALE


class Counted(NamedTuple):
    """What a batch takes, with the optimizer's step."""

    step: StepMemory
    weights: int  # The position embedding is among them.
    gradients: int
    state: int  # the optimizer's, with the moving average
    optimizer_work: int  # at the peak of its step beside weights, gradients and state

    @property
    def work(self) -> int:
        """Bytes at the peak of a whole step beside weights, gradients and state."""
        return max(max(self.step.begin, self.step.end) - self.gradients, self.optimizer_work)


def count_batch(
    settings: TrainingSettings,
    base: Base,
    phase: Phase | None = None,
    batch: int | None = None,
    accumulated: bool | None = None,
) -> StepMemory:
    """Return the memory of forward and backward of a batch, by default a batch of the first phase.

    `accumulated`: the gradients of an earlier batch are there.
    """
    phase, method = settings.phase[0] if phase is None else phase, settings.method
    width, height = largest_shape(phase.largest)
    batch = phase.batch if batch is None else batch
    accumulated = phase.accumulate > 1 if accumulated is None else accumulated
    case = TrainingSettings(
        model="",
        out="",
        phase=(Phase((), batch=batch, accumulate=1 + accumulated),),
        dtype=settings.dtype,
        method=replace(method, start="", layers=()),
        checkpoint_gradients=settings.checkpoint_gradients,
    )
    groups = block_groups(base.shapes, method, base.model.layers)
    title = f"{method.kind}, {width * DOWNSCALE}x{height * DOWNSCALE} px, batch {batch}"
    return base.counter.count(title, count_step, case, base.model, (height, width), groups)


def add_optimizer(settings: TrainingSettings, base: Base, step: StepMemory, shards: int = 1) -> Counted:
    """Return `step` with the memory of the optimizer, which has whole weights or the rows of one of `shards`."""
    name, dtype = settings.optimizer.name, weights_dtype(settings)
    state, work = base.counter.count(name, count_optimizer, name, step.trained, dtype, shards)
    average = step.elements * FP32_BYTES // shards if settings.optimizer.ema else 0
    weights = step.weights + position_bytes(settings, base)
    return Counted(step, weights, step.elements * dtype.itemsize, state + average, work)


def position_bytes(settings: TrainingSettings, base: Base) -> int:
    """Return the bytes of the position embedding, in fp32, of models for large images."""
    if base.resolution is None:
        side = max(phase.largest for phase in settings.phase) // DOWNSCALE
        return side**2 * base.model.width * FP32_BYTES if side >= EMBEDDED else 0
    return (base.resolution // DOWNSCALE) ** 2 * base.model.width * FP32_BYTES if base.resolution >= POSITIONED else 0


def training_stage(
    phase: Phase, number: int, settings: TrainingSettings, base: Base, accelerator: bool = True
) -> Stage:
    counted = add_optimizer(settings, base, count_batch(settings, base, phase))
    encoding = streaming(settings, base, accelerator)
    name = f"phase {number}: {phase.largest} px, batch {phase.batch}"
    state = counted.state + counted.gradients
    return Stage(name, counted.weights + encoding.weights, state, max(counted.work, encoding.work))


def validation_stage(settings: TrainingSettings, base: Base, accelerator: bool) -> Stage:
    """Return the stage that generates the prompts while the trained model, and the optimizer's state, stay."""
    validation, local = settings.validation, add_optimizer(settings, base, count_batch(settings, base))
    trained = local.step.elements
    dtype = getattr(torch, settings.dtype)
    side = settings.phase[-1].resolution
    width, height = (validation.width or side) // DOWNSCALE, (validation.height or side) // DOWNSCALE
    together = len(validation.prompts) if accelerator else 1
    sampling = transformer_bytes(base.model, height, width, together, dtype, accelerator)
    decoding = base.autoencoder_parameters * dtype.itemsize
    decoding += Planner(base.decoder, height, width, dtype, accelerator).floor().peak_bytes
    copies = 0
    if not settings.method.whole:
        # an adapter is added to the layers, one at a time
        sampling = max(sampling, MERGED_COPIES * FP32_BYTES * max(map(math.prod, base.shapes.values())))
        if settings.method.base != "full":
            # the whole model, with an adapter, beside the one in 8 bits
            copies = count(base.shapes.values()) * dtype.itemsize + trained * FP32_BYTES
    elif settings.method.weights != settings.dtype:
        # weights in fp32 are generated with in a copy, as they are saved
        copies = trained * dtype.itemsize
    if settings.method.kind == "controlnet":
        sampling += controlnet_bytes(settings.method.blocks, base.model, height, width, together, dtype)
    copies += streaming(settings, base, accelerator).weights
    return Stage("validation's images", local.weights + copies, local.state, max(sampling, decoding))


def controlnet_bytes(blocks: int, model: Architecture, height: int, width: int, batch: int, dtype: torch.dtype) -> int:
    """Return the bytes that a ControlNet adds to `transformer_bytes`: its residuals, and the keys and values of its
    blocks for prompt and negative prompt."""
    residuals = (blocks + 1) * batch * 2 * height * width
    prompts = 2 * blocks * 2 * MAX_TOKENS
    return (residuals + prompts) * model.width * dtype.itemsize


def step_operations(settings: TrainingSettings, base: Base, phase: Phase) -> int:
    """Return the operations of a step of `phase`. A product and its sum are two operations.

    The step has the forward, a second forward with gradient checkpointing, the gradients of the inputs of every layer,
    and the gradients of the trained weights.
    """
    sizes = [largest_shape(side) for side in (phase.resolution, *phase.resolutions)]
    mean = sum(image_operations(settings, base, width * height) for width, height in sizes) / len(sizes)
    return round(mean * phase.batch * phase.accumulate)


def image_operations(settings: TrainingSettings, base: Base, cells: int) -> float:
    """Return the operations of a step for one image of `cells` latents."""
    method, width, layers = settings.method, base.model.width, base.model.layers
    forwards = 2 if settings.checkpoint_gradients else 1
    once = cells * position_flops(width, layers)
    # Training computes keys and values of the text in each step. Only full training has gradients below them.
    text = 2 * MAX_TOKENS * (TEXT_WIDTH * width + width**2 + 2 * layers * width**2)
    if method.kind == "full":
        return (forwards + 2) * (once + text)
    if method.kind == "controlnet":
        copied = method.blocks / layers
        return (forwards + 1) * once + forwards * text + (forwards + 2) * copied * (once + text)
    adapter = 2 * cells * count_batch(settings, base).elements
    return (forwards + 1) * once + forwards * text + (forwards + 2) * adapter


def duration_lines(settings: TrainingSettings, base: Base, cards: int = 1) -> list[str]:
    """Return the time of the steps of each phase on `cards` GPUs of each kind in GPUS."""
    lines = []
    for number, phase in enumerate(settings.phase, 1):
        operations = step_operations(settings, base, phase)
        times = []
        for name, tflops in GPUS.items():
            seconds = operations / (tflops * 1e12 * REACHED * cards)
            total = "" if phase.steps is None else f", {clock(max(1.0, seconds * phase.steps))} in all"
            duration = f"{seconds:.2g} s" if seconds >= 0.01 else "less than 0.01 s"
            times.append(f"{duration} on {f'{cards} {name}s' if cards > 1 else f'one {name}'}{total}")
        speed = f"at {REACHED * 100:.0f} % of the speed"
        lines.append(f"phase {number}: a step of {operations / 1e12:.3g} TFLOP takes {'; '.join(times)} ({speed})")
    return lines


def measured_seconds(settings: TrainingSettings, base: Base, device: torch.device, done: int) -> float:
    """Return how long the steps after the first `done` take on `device`, whose speed is measured in half a second."""
    square = torch.ones(SIDE, SIDE, device=device, dtype=getattr(torch, settings.dtype))
    reached = REACHED * 2 * SIDE**3 / seconds_of(lambda: square @ square, [device])
    seconds = 0.0
    for phase in settings.phase:
        remaining = max(0, (phase.steps or 0) - done)
        done = max(0, done - (phase.steps or 0))
        seconds += remaining * step_operations(settings, base, phase) / reached
    return seconds
