"""Predicts the memory of each stage of a run, and proposes settings that fit the GPUs.

Nothing is loaded. The memory of a training step is counted by `memory_counter`. The other stages use the predictions of
`sana_core.memory` and of the decoder's planner.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import reduce
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..checkpoints import Checkpoint, find_part, inspect_checkpoint
from ..checkpoints.configs import architecture
from ..checkpoints.load import build_module
from ..decode.plan import Planner
from ..decode.stages import Stages, decoder_stages, encoder_stages
from ..errors import InputError
from ..memory import CONTEXT, count, stages_of, text_bytes, transformer_bytes, transformer_parameters
from ..model.known_models import (
    DECODERS,
    ENCODER_PARAMETERS,
    GPU_SIZES,
    MAX_TOKENS,
    TEXT_PARAMETERS,
    VARIANTS,
    WIDTHS,
    Architecture,
)
from ..model.latents import DOWNSCALE
from ..runtime.cancellation import Poll, no_poll
from .images import shapes_at
from .memory_counter import CountCache, Report, StepMemory, count_optimizer, count_step
from .optimizers import DDP, OFFLOADED, OPTIMIZERS
from .previews import preview_size
from .settings import Phase, TrainingSettings, check_method, check_parallel
from .sharding import microbatches

FP32_BYTES = torch.float32.itemsize
# Copies of the largest weight in fp32 while an adapter is added to it.
MERGED_COPIES = 2
# Models for at least this many pixels a side have a position embedding. Used if the checkpoint does not contain its
# training size.
EMBEDDED = 4096
# Blocks that FSDP gathers at once: the current block, the next block, and the communication buffer.
GATHERED = 3
# Share of a GPU's memory that a run without gradient checkpointing may be predicted to take.
FILLED = 0.9


class Base(NamedTuple):
    """The models of a run, as far as a plan needs them."""

    model: Architecture
    # The training size of the transformer in pixels. None: unknown.
    resolution: int | None
    text_parameters: int
    autoencoder_parameters: int
    encoder: Stages
    decoder: Stages
    counter: CountCache


def read_base(settings: TrainingSettings, poll: Poll = no_poll, report: Report | None = None) -> Base:
    """Read the headers and configurations of the models of `settings`.

    The plan calls `poll`, which may cancel, and `report` before it counts a step.
    """

    def part(kind: str) -> Checkpoint:
        return find_part(inspect_checkpoint(settings.source(kind)), kind)

    def parameters(info: Checkpoint) -> int:
        return count(header.shape for header in info.headers.values())

    transformer, image = part("transformer"), part("autoencoder")
    autoencoder: Any = build_module(image)
    return Base(
        architecture(transformer.headers),
        transformer.resolution,
        parameters(part("text_encoder")),
        parameters(image),
        encoder_stages(autoencoder),
        decoder_stages(autoencoder),
        CountCache(poll, report),
    )


def released_base(variant: str, poll: Poll = no_poll, report: Report | None = None) -> Base:
    """Return the released model `variant`, a name in VARIANTS, with Gemma 2 and DC-AE."""
    decoder = DECODERS["dc-ae-f32c32"]
    parameters = decoder.parameters + ENCODER_PARAMETERS
    encoder = Stages(WIDTHS, (2, 2, 2, 3, 3, 3), 3, 2, False, True)
    counter = CountCache(poll, report)
    return Base(VARIANTS[variant], None, TEXT_PARAMETERS, parameters, encoder, stages_of(decoder), counter)


class Stage(NamedTuple):
    """Bytes of one GPU in one stage of a run."""

    name: str
    # Weights of the models and of the adapter.
    weights: int
    # Gradients, the optimizer's state and the moving average.
    state: int
    # Everything else, at the peak of the stage.
    work: int
    # Bytes that a step sends to other GPUs. It receives the same number.
    sent: int = 0
    # Offloaded weights and state in the machine's memory.
    host: int = 0

    @property
    def bytes(self) -> int:
        return self.weights + self.state + self.work

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the GPU, including the driver."""
        return self.bytes + CONTEXT


class Plan(NamedTuple):
    """The stages of a run, one after another."""

    stages: tuple[Stage, ...]

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.bytes)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the GPU, including the driver."""
        return self.largest.gpu_bytes

    @property
    def sent(self) -> int:
        return max(stage.sent for stage in self.stages)

    @property
    def host(self) -> int:
        return max(stage.host for stage in self.stages)


def plan_training(settings: TrainingSettings, base: Base, cards: int = 1, accelerator: bool = True) -> Plan:
    """Return the memory of each of `cards` GPUs in a run with checked `settings`. Without `accelerator`: of the CPU.

    `Stage.work` is the minimum with which the stage can run. With more memory, latents are encoded and images decoded
    in larger strips. Captions count with the largest number of tokens, images with the largest shape at their
    resolution.
    """
    item = getattr(torch, settings.dtype).itemsize
    width, height = largest_shape(max(phase.largest for phase in settings.phase))
    # Images are encoded one by one, in fp32.
    encoder_work = Planner(base.encoder, height, width, torch.float32, accelerator).floor().peak_bytes
    encoding = (
        Stage("captions", base.text_parameters * item, 0, text_bytes(1, item)),
        Stage("latents", base.autoencoder_parameters * FP32_BYTES, 0, encoder_work),
    )
    training = [training_stage(settings, base, number, cards, accelerator) for number in range(len(settings.phase))]
    if settings.validation.every and settings.validation.prompts:
        training.append(validation_stage(settings, base, cards, accelerator))
    if not settings.stream:
        return Plan((*encoding, *training))
    # A run that streams encodes in each step, so both encoders stay in memory.
    weights, work = sum(stage.weights for stage in encoding), max(stage.work for stage in encoding)
    together = (stage._replace(weights=stage.weights + weights, work=max(stage.work, work)) for stage in training)
    return Plan(tuple(together))


def largest_shape(resolution: int) -> tuple[int, int]:
    """Return the width and height, in latents, of the shape with the most of them at `resolution` pixels."""
    width, height = max(shapes_at(resolution), key=lambda shape: shape[0] * shape[1])
    return width // DOWNSCALE, height // DOWNSCALE


def count_batch(
    settings: TrainingSettings,
    base: Base,
    phase: Phase,
    batch: int,
    accumulated: bool,
    gathered: bool = False,
    accelerator: bool = False,
) -> StepMemory:
    """Return the memory of forward and backward of `batch` images of the largest shape in `phase`.

    `accumulated`: the gradients of an earlier batch exist. `gathered`: the trained weights have the precision of the
    computation, in which FSDP gathers them. `accelerator`: autocast chooses the dtypes of GPUs.
    """
    width, height = largest_shape(phase.largest)
    method, largest = settings.method, max(phase.largest for phase in settings.phase)
    resolution = base.resolution or (largest if largest >= EMBEDDED else None)
    # Only settings that change the memory, so that equal cases are counted once.
    case = TrainingSettings(
        model="",
        out="",
        phase=(Phase((), batch=batch, accumulate=1 + accumulated),),
        dtype=settings.dtype,
        method=replace(method, start="", weights="float32" if method.is_adapter else method.weights),
        loss=settings.loss,
        checkpoint_gradients=settings.checkpoint_gradients,
    )
    title = f"{method.kind}, {width * DOWNSCALE}x{height * DOWNSCALE} px, batch {batch}"
    return base.counter.count(title, count_step, case, base.model, resolution, (height, width), gathered, accelerator)


def count_update(settings: TrainingSettings, base: Base, step: StepMemory, shards: int) -> tuple[int, int]:
    """As `count_optimizer`, plus the moving average."""
    name = settings.optimizer.name
    state, work = base.counter.count(name, count_optimizer, name, step.trained, step.dtype, shards)
    return state + (step.elements * FP32_BYTES // shards if settings.optimizer.ema else 0), work


def training_stage(
    settings: TrainingSettings, base: Base, number: int = 0, cards: int = 1, accelerator: bool = False
) -> Stage:
    """Return the memory of a step of phase `number` on one of `cards` GPUs, without the encoders.

    Without `accelerator`: of the CPU, whose autocast chooses other dtypes.
    """
    phase, parallel = settings.phase[number], settings.parallel
    name = f"phase {number + 1}: {phase.largest} px, batch {phase.batch}"
    rounds, batch = rank_share(phase, cards)
    shards = shards_of(settings, cards)
    # Several GPUs have gradients from the beginning: DDP in its buckets, and FSDP in the rows of its shards.
    accumulated = rounds > 1 or cards > 1 or parallel.kind != DDP
    step = count_batch(settings, base, phase, batch, accumulated, accelerator=accelerator)
    state, optimizer_work = count_update(settings, base, step, shards)
    if parallel.kind == DDP:
        sent = round(ring(cards) * 2 * step.gradients)
        peak = max(step.peak_before_first_block, step.peak_from_first_block, optimizer_work)
        return Stage(name, step.weights, step.gradients + state, peak, sent)
    item = getattr(torch, settings.dtype).itemsize
    model_bytes = transformer_parameters(base.model) * item
    outside_bytes = transformer_parameters(base.model._replace(layers=0)) * item
    block_bytes = (model_bytes - outside_bytes) // base.model.layers
    # While a block is computed, its gathered weights, the layers outside of blocks and its fp32 gradients are whole.
    gathered = outside_bytes + step.largest_block * FP32_BYTES
    compute = count_batch(settings, base, phase, batch, accumulated, gathered=True, accelerator=accelerator)
    # At the end all gradients exist. At the beginning of the first microbatch none do.
    begin = compute.peak_before_first_block + gathered + GATHERED * block_bytes
    begin -= step.gradients // shards if rounds == 1 else 0
    work = max(begin, compute.peak_from_first_block + gathered + block_bytes)
    reduced = step.elements * FP32_BYTES
    # Each microbatch gathers the weights for the forward and for the backward, and sums its gradients.
    sent = round(ring(shards) * rounds * (2 * model_bytes + reduced))
    if parallel.replicas > 1:
        sent += round(ring(parallel.replicas) * 2 * reduced * rounds / shards)
    weights, state = step.weights // shards, step.gradients // shards + state
    if parallel.kind == OFFLOADED:
        return Stage(name, 0, 0, work, sent, weights + state + optimizer_work)
    return Stage(name, weights, state, max(work, optimizer_work), sent)


def shards_of(settings: TrainingSettings, cards: int) -> int:
    """Return the number of GPUs that share one copy of the weights. DDP: 1."""
    return 1 if settings.parallel.kind == DDP else cards // settings.parallel.replicas


def rank_share(phase: Phase, cards: int) -> tuple[int, int]:
    """Return the number of microbatches of a GPU in a step, and the number of images of the largest microbatch."""
    step = [range(phase.batch)] * phase.accumulate
    shares = [microbatches(step, rank, cards) for rank in range(cards)]
    return len(shares[0]), max(len(indices) for share in shares for indices, _ in share)


def ring(cards: int) -> float:
    """Return the share of a tensor that each GPU sends in a ring all-gather or reduce-scatter."""
    return (cards - 1) / cards


def validation_stage(settings: TrainingSettings, base: Base, cards: int, accelerator: bool) -> Stage:
    """Return the memory of the first of `cards` GPUs while it generates the validation's images.

    The trained model and the optimizer's state stay in memory.
    """
    method, dtype = settings.method, getattr(torch, settings.dtype)
    width, height = (pixels // DOWNSCALE for pixels in preview_size(settings))
    together = len(settings.validation.prompts) if accelerator else 1
    kind, phase = settings.parallel.kind, settings.phase[0]
    shards = shards_of(settings, cards)
    step = count_batch(settings, base, phase, 1, False, accelerator=accelerator)
    weights, (state, _) = step.weights, count_update(settings, base, step, shards)
    if kind != DDP:
        # The whole model is gathered in the precision of the forward, beside the rows of this GPU.
        weights = count_batch(settings, base, phase, 1, False, gathered=True, accelerator=accelerator).weights
        if kind == OFFLOADED:
            state = 0
        else:
            weights += step.weights // shards
    elif settings.uses_autocast:
        # Images are generated with a copy of the trained weights, in the precision in which they are saved.
        weights += step.elements * dtype.itemsize
    elif method.base != "full":
        # Images are generated with the whole model and an adapter, beside the model in 8 bits.
        weights += transformer_parameters(base.model) * dtype.itemsize + step.elements * FP32_BYTES
    sampling = transformer_bytes(base.model, height, width, together, dtype, accelerator)
    if method.is_adapter:
        # An adapter is added to one layer at a time. The largest weight is conv_inverted: width x (2 x 2.5 width).
        feed_forward_weight = 5 * base.model.width**2
        sampling = max(sampling, MERGED_COPIES * FP32_BYTES * feed_forward_weight)
    if method.kind == "controlnet":
        # The prompt and the negative prompt need its residuals, and the keys and values of its blocks.
        prompts = 2
        residuals = prompts * together * (method.blocks + 1) * height * width
        keys_and_values = prompts * 2 * method.blocks * MAX_TOKENS
        sampling += (residuals + keys_and_values) * base.model.width * dtype.itemsize
    decoding = base.autoencoder_parameters * dtype.itemsize
    decoding += Planner(base.decoder, height, width, dtype, accelerator).floor().peak_bytes
    return Stage("validation's images", weights, state, max(sampling, decoding))


def decide_checkpointing(settings: TrainingSettings, base: Base, room: float, cards: int = 1) -> TrainingSettings:
    """Return `settings` without gradient checkpointing, if they fit GPUs of `room` bytes without it."""
    without = replace(settings, checkpoint_gradients=False)
    return without if plan_training(without, base, cards).gpu_bytes <= FILLED * room else settings


def merge_batches(settings: TrainingSettings) -> TrainingSettings:
    """Divide `accumulate` by its smallest factor in each phase. A step then has fewer and larger batches."""

    def merge(phase: Phase) -> Phase:
        factor = next((divisor for divisor in range(2, phase.accumulate + 1) if phase.accumulate % divisor == 0), 1)
        return replace(phase, batch=phase.batch * factor, accumulate=phase.accumulate // factor)

    return replace(settings, phase=tuple(map(merge, settings.phase)))


def propose_larger(settings: TrainingSettings, base: Base, room: float, cards: int = 1) -> list[str]:
    """Return the changes to the largest batches that fit `cards` GPUs of `room` bytes each, as text.

    A GPU then has fewer microbatches in a step, so its host starts fewer operations. This does not pay if a batch needs
    gradient checkpointing that smaller ones do without.
    """

    def microbatches_of(candidate: TrainingSettings) -> int:
        return sum(rank_share(phase, cards)[0] for phase in candidate.phase)

    checkpointing = decide_checkpointing(settings, base, room, cards).checkpoint_gradients
    chosen, last, following = settings, settings, merge_batches(settings)
    while following != last and plan_training(following, base, cards).gpu_bytes <= room:
        if decide_checkpointing(following, base, room, cards).checkpoint_gradients != checkpointing:
            break
        if microbatches_of(following) < microbatches_of(chosen):
            chosen = following
        last, following = following, merge_batches(following)
    return differences(settings, chosen)


def divide_batches(settings: TrainingSettings) -> TrainingSettings:
    """Divide the batches that need the most memory by their smallest factor. A step then has more of them."""
    most = max(phase.batch * phase.largest**2 if phase.batch > 1 else 0 for phase in settings.phase)

    def divide(phase: Phase) -> Phase:
        if phase.batch == 1 or phase.batch * phase.largest**2 < most:
            return phase
        factor = next(divisor for divisor in range(2, phase.batch + 1) if phase.batch % divisor == 0)
        return replace(phase, batch=phase.batch // factor, accumulate=phase.accumulate * factor)

    return replace(settings, phase=tuple(map(divide, settings.phase)))


# The fields that `propose` changes, and their values. Those that slow a run down least come first.
CHANGES: dict[str, Any] = {
    "checkpoint_gradients": True,
    # `divide_batches` changes this field.
    "phase": None,
    # The optimizer with the least state.
    "optimizer.name": "came8bit",
    "optimizer.ema": 0.0,
    "method.weights": "bfloat16",
    "method.base": "int8",
}


def change(settings: TrainingSettings, path: str) -> TrainingSettings:
    """Return `settings` with the value of CHANGES for the field `path`."""
    if path == "phase":
        return divide_batches(settings)
    table, _, name = path.rpartition(".")
    if not table:
        return replace(settings, **{name: CHANGES[path]})
    return replace(settings, **{table: replace(getattr(settings, table), **{name: CHANGES[path]})})


def is_allowed(settings: TrainingSettings) -> bool:
    """Whether the method, the optimizer, and the kind of parallel training fit each other."""
    try:
        check_method(settings)
        check_parallel(settings)
    except InputError:
        return False
    is_rounded = not settings.method.is_adapter and settings.method.weights != "float32"
    return OPTIMIZERS[settings.optimizer.name].per_parameter or not is_rounded


class Proposal(NamedTuple):
    """Settings that may fit a GPU."""

    settings: TrainingSettings
    # The differences from the original settings, as text.
    changes: tuple[str, ...]
    # The memory of `settings`.
    plan: Plan


def propose(settings: TrainingSettings, base: Base, room: float, cards: int = 1) -> Proposal:
    """Return settings that fit `cards` GPUs of `room` bytes, with the fewest changes.

    If nothing fits, return the settings that need the least. The changes are tried in the order of CHANGES.
    """

    def needed_bytes(paths: list[str]) -> float:
        proposed = reduce(change, paths, settings)
        return plan_training(proposed, base, cards).gpu_bytes if is_allowed(proposed) else math.inf

    chosen: list[str] = []
    while needed_bytes(chosen) > room:
        now = reduce(change, chosen, settings)
        # Several GPUs send more with smaller batches, so their batches are divided only once.
        untried = [path for path in CHANGES if cards == 1 or path not in chosen]
        following = [path for path in untried if change(now, path) != now and is_allowed(change(now, path))]
        if not following:
            break
        chosen.append(following[0])
    enough = max(room, needed_bytes(chosen))
    # A later change may make earlier ones unnecessary. Drop those, the most expensive first.
    for index in reversed(range(len(chosen))):
        without = chosen[:index] + chosen[index + 1 :]
        if needed_bytes(without) <= enough:
            chosen = without
    proposed = reduce(change, chosen, settings)
    return Proposal(proposed, tuple(differences(settings, proposed)), plan_training(proposed, base, cards))


def differences(before: TrainingSettings, after: TrainingSettings) -> list[str]:
    """Return the fields of CHANGES that differ, with their values in `after`, as in a settings file."""
    texts = []
    for path in CHANGES:
        table, _, name = path.rpartition(".")
        old, new = (attrgetter(path)(settings) for settings in (before, after))
        if path == "phase":
            for number, (one, other) in enumerate(zip(old, new, strict=True), 1):
                if one != other:
                    texts.append(f"batch = {other.batch} and accumulate = {other.accumulate} in phase {number}")
        elif old != new:
            texts.append(f"{name} = {json.dumps(new)}" + (f" in [{table}]" if table else ""))
            if path == "optimizer.name":
                texts[-1] += ", with a warmup of some hundred steps"
    return texts


def table_lines(plan: Plan) -> list[str]:
    """Return the stages of `plan` as a table. "host" and "sent" are columns only if they have values."""
    columns = ["weights", "state", "work", "together", *(["host", "sent"] if plan.host or plan.sent else [])]
    lines = [f"{'GB':46}" + "".join(f"{column:>10}" for column in columns)]
    for stage in plan.stages:
        sizes = stage.weights, stage.state, stage.work, stage.bytes, stage.host, stage.sent
        lines.append(f"{stage.name:46}" + "".join(f"{size / 1e9:10.2f}" for size in sizes[: len(columns)]))
    return lines


def fit_lines(settings: TrainingSettings, base: Base, plan: Plan, room: float | None, cards: int = 1) -> list[str]:
    """Describe whether the `plan` of `settings` fits each of `cards` GPUs of `room` bytes. If not, propose settings.

    Without a GPU (`room` is None), name the smallest of GPU_SIZES that it fits.
    """
    needed = f"{plan.gpu_bytes / 1e9:.1f} GB with {CONTEXT / 1e9:.1f} GB for the driver"
    if room is None:
        fitting = [size for size in GPU_SIZES if plan.gpu_bytes <= size * 2**30]
        return [f"{needed}: " + (f"fits a GPU of {fitting[0]} GB" if fitting else f"more than {GPU_SIZES[-1]} GB")]
    name = f"a GPU of {room / 2**30:.4g} GB"
    if plan.gpu_bytes <= room:
        larger = "; ".join(propose_larger(settings, base, room, cards))
        return [f"{needed}: fits {name}", *([f"fits too, with fewer batches a step: {larger}"] if larger else [])]
    proposal = propose(settings, base, room, cards)
    changes, least = "; ".join(proposal.changes), f"{proposal.plan.gpu_bytes / 1e9:.1f} GB"
    lines = [f"{needed}, for {plan.largest.name}: does not fit {name}"]
    if proposal.plan.gpu_bytes <= room:
        return [*lines, f"fits with {changes}: {least}"]
    least += f", for {proposal.plan.largest.name}" + (f", with {changes}" if changes else "")
    return [*lines, f"the least that these settings can come to: {least}"]
