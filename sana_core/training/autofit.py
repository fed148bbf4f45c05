"""The settings nearest to those of a run that fit a GPU, or each of several in every way to hold the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from ..errors import InputError
from ..memory import CONTEXT, count
from ..model.known_models import CARDS
from .memory_model import FP32_BYTES, weights_dtype
from .optimizers import DDP, FSDP, KINDS, OFFLOADED
from .plan import (
    Base,
    Plan,
    add_optimizer,
    count_batch,
    plan_training,
    streaming,
    validation_stage,
)
from .settings import QUANTISED, Parallel, Phase, TrainingSettings, check_parallel

# of the optimizers the one with the least state
LEAST = "came8bit"
Change = Callable[[TrainingSettings], TrainingSettings]
# the blocks that are gathered at once: the one that is worked on, the next one, and the buffer that it travels in
GATHERED = 3
GIGABYTE = 10**9


class Proposal(NamedTuple):
    """TrainingSettings, how they differ from those that were asked about, as text, and what they take."""

    settings: TrainingSettings
    changes: tuple[str, ...]
    plan: Plan


def propose(settings: TrainingSettings, base: Base, card: float) -> Proposal:
    """Return the settings nearest to `settings` that fit a GPU of `card` bytes, or that miss it by the least.

    Changed is, as far as it must be, what slows a run down least: gradient checkpointing first, then smaller batches of
    which a step takes more, an optimizer with less state, no moving average, weights in bf16, a base in 8 bits.
    """

    def changed(changes: list[Change]) -> TrainingSettings:
        found = settings
        for change in changes:
            found = change(found)
        return found

    def needs(changes: list[Change]) -> int:
        return plan_training(changed(changes), base).card

    chosen: list[Change] = []
    while needs(chosen) > card:
        now = changed(chosen)
        following = next((change for change in CHANGES if change(now) != now), None)
        if following is None:
            break
        chosen.append(following)
    enough = max(card, needs(chosen))
    # with what came last, some before it may not be needed: the dearest of those go first
    for index in reversed(range(len(chosen))):
        without = chosen[:index] + chosen[index + 1 :]
        if needs(without) <= enough:
            chosen = without
    found = changed(chosen)
    return Proposal(found, tuple(differences(settings, found)), plan_training(found, base))


def checkpoint_gradients(settings: TrainingSettings) -> TrainingSettings:
    return replace(settings, checkpoint_gradients=True)


def divide_batches(settings: TrainingSettings) -> TrainingSettings:
    """Return `settings` with the batches that take the most divided by their least factor, more of them in a step."""
    most = max(phase.batch * phase.largest**2 if phase.batch > 1 else 0 for phase in settings.phase)

    def divide(phase: Phase) -> Phase:
        if phase.batch == 1 or phase.batch * phase.largest**2 < most:
            return phase
        factor = next(each for each in range(2, phase.batch + 1) if phase.batch % each == 0)
        return replace(phase, batch=phase.batch // factor, accumulate=phase.accumulate * factor)

    return replace(settings, phase=tuple(map(divide, settings.phase)))


def shrink_state(settings: TrainingSettings) -> TrainingSettings:
    return replace(settings, optimizer=replace(settings.optimizer, name=LEAST))


def drop_average(settings: TrainingSettings) -> TrainingSettings:
    return replace(settings, optimizer=replace(settings.optimizer, ema=0.0))


def round_weights(settings: TrainingSettings) -> TrainingSettings:
    if not settings.method.whole or settings.dtype == "float32":
        return settings
    return replace(settings, method=replace(settings.method, weights="bfloat16"))


def quantise_base(settings: TrainingSettings) -> TrainingSettings:
    if settings.method.kind not in QUANTISED:
        return settings
    return replace(settings, method=replace(settings.method, base="int8"))


# those that slow a run down least come first
CHANGES: tuple[Change, ...] = (
    checkpoint_gradients,
    divide_batches,
    shrink_state,
    drop_average,
    round_weights,
    quantise_base,
)


def differences(before: TrainingSettings, after: TrainingSettings) -> list[str]:
    """Return the keys of a settings file that differ, with their values in `after`."""
    found = []
    if before.checkpoint_gradients != after.checkpoint_gradients:
        found.append("checkpoint_gradients = true")
    for number, (one, other) in enumerate(zip(before.phase, after.phase, strict=True), 1):
        if one != other:
            found.append(f"batch = {other.batch} and accumulate = {other.accumulate} in phase {number}")
    if before.optimizer.name != after.optimizer.name:
        found.append(f'name = "{after.optimizer.name}" in [optimizer], with a warmup of some hundred steps')
    if before.optimizer.ema != after.optimizer.ema:
        found.append("ema = 0.0 in [optimizer]")
    if before.method.base != after.method.base:
        found.append(f'base = "{after.method.base}" in [method]')
    if before.method.weights != after.method.weights:
        found.append(f'weights = "{after.method.weights}" in [method]')
    return found


def table_lines(plan: Plan) -> list[str]:
    """Return the stages of `plan` as a table, in GB."""
    lines = [f"{'GB':32}{'weights':>9}{'state':>9}{'work':>9}{'together':>10}"]
    for stage in plan.stages:
        parts = "".join(f"{size / 1e9:9.2f}" for size in (stage.weights, stage.state, stage.work))
        lines.append(f"{stage.name:32}{parts}{stage.bytes / 1e9:10.2f}")
    return lines


def fit_lines(settings: TrainingSettings, base: Base, plan: Plan, card: float | None) -> list[str]:
    """Return whether `plan`, that of `settings`, fits a GPU of `card` bytes, and if not, what settings do.

    Without a GPU it is the smallest of CARDS that it fits.
    """
    needed = f"{plan.card / 1e9:.1f} GB with {CONTEXT / 1e9:.1f} GB for the driver"
    if card is None:
        fitting = [size for size in CARDS if plan.card <= size * 2**30]
        return [f"{needed}: " + (f"fits a GPU of {fitting[0]} GB" if fitting else f"more than {CARDS[-1]} GB")]
    name = f"a GPU of {card / 2**30:.4g} GB"
    if plan.card <= card:
        return [f"{needed}: fits {name}"]
    found = propose(settings, base, card)
    lines = [f"{needed}, for {plan.largest.name}: does not fit {name}"]
    if found.plan.card > card:
        least = f"{found.plan.card / 1e9:.1f} GB, for {found.plan.largest.name}"
        changes = ", with " + "; ".join(found.changes) if found.changes else ""
        return [*lines, f"the least that these settings can come to: {least}{changes}"]
    return [*lines, "fits with " + "; ".join(found.changes) + f": {found.plan.card / 1e9:.1f} GB"]


class RankMemory(NamedTuple):
    """Bytes of a step on one of several GPUs."""

    weights: int
    state: int  # gradients, the optimizer's state and the moving average
    work: int
    sent: int  # over the network, and as much received
    host: int  # of the machine's memory, where weights and state are offloaded

    @property
    def card(self) -> int:
        """Bytes of the GPU that it needs, the driver's among them."""
        return self.weights + self.state + self.work + CONTEXT


def rank_memory(settings: TrainingSettings, base: Base, phase: Phase, cards: int) -> RankMemory:
    """Return the memory of a step of `phase` on each of `cards`, whose arrangement is `settings.parallel`."""
    memory, encoding = step_on_rank(settings, base, phase, cards), streaming(settings, base)
    return memory._replace(weights=memory.weights + encoding.weights, work=max(memory.work, encoding.work))


def step_on_rank(settings: TrainingSettings, base: Base, phase: Phase, cards: int) -> RankMemory:
    """Return the memory of a step on a GPU, without the text encoder and the VAE."""
    rounds, batch = pieces_of(phase, cards)
    shards = 1 if settings.parallel.kind == DDP else cards // settings.parallel.replicas
    # All gradients are there, as after an earlier batch.
    step = count_batch(settings, base, phase, batch, True)
    own = add_optimizer(settings, base, step, shards)
    if settings.parallel.kind == DDP:
        return RankMemory(own.weights, own.state + own.gradients, own.work, round(ring(cards) * 2 * own.gradients), 0)
    compute = count_batch(compute_settings(settings), base, phase, batch, True)
    gradients = compute.elements * weights_dtype(compute_settings(settings)).itemsize
    begin, end = compute.begin - gradients, compute.end - gradients
    # At the end all gradients are there. At the beginning of the first piece there are none.
    begin += gathered_bytes(settings, base, GATHERED) - (own.gradients // shards if rounds == 1 else 0)
    work = max(begin, end + gathered_bytes(settings, base, 1))
    whole = count(base.shapes.values()) * getattr(torch, settings.dtype).itemsize
    reduced = step.elements * FP32_BYTES
    # Each piece gathers the weights for the forward and for the backward, and sums its gradients.
    sent = round(ring(shards) * rounds * (2 * whole + reduced))
    if settings.parallel.replicas > 1:
        sent += round(ring(settings.parallel.replicas) * 2 * reduced * rounds / shards)
    weights, state = own.weights // shards, own.gradients // shards + own.state
    if settings.parallel.kind == OFFLOADED:
        return RankMemory(0, 0, work, sent, weights + state + own.optimizer_work)
    return RankMemory(weights, state, max(work, own.optimizer_work), sent, 0)


def pieces_of(phase: Phase, cards: int) -> tuple[int, int]:
    """Return in how many pieces a GPU learns its share of a step, and how many images the largest has."""
    parts = -(-cards // phase.accumulate) if phase.accumulate < cards else 1
    parts = min(parts, phase.batch)
    return -(-phase.accumulate * parts // cards), -(-phase.batch // parts)


def ring(cards: int) -> float:
    """Return what each of `cards` sends of a tensor that they gather, or sum in shares, around a ring."""
    return (cards - 1) / cards


def compute_settings(settings: TrainingSettings) -> TrainingSettings:
    """Return `settings` as FSDP computes: weights in fp32 arrive in the precision of the forward, and are not cast."""
    if not settings.method.whole:
        return settings
    return replace(settings, method=replace(settings.method, weights=settings.dtype))


def gathered_bytes(settings: TrainingSettings, base: Base, blocks: int) -> int:
    """Return the bytes of so many gathered `blocks`, of what lies outside of them, and of the gradients of one, in fp32
    before they are divided."""
    item = getattr(torch, settings.dtype).itemsize
    block = {name: shape for name, shape in base.shapes.items() if name.startswith("transformer_blocks.0.")}
    outside = count(base.shapes.values()) - base.model.layers * count(block.values())
    weights = (blocks * count(block.values()) + outside) * item
    return weights + count_batch(settings, base).block * FP32_BYTES


class Choice(NamedTuple):
    """An arrangement, with what else had to change, and what it takes."""

    settings: TrainingSettings
    changes: tuple[str, ...]
    memory: RankMemory


def arrangements(settings: TrainingSettings, base: Base, cards: int) -> list[Choice]:
    """Return every way to hold the model with these settings, the one that sends least first."""
    return sorted(arranged(settings, settings, base, cards, KINDS), key=lambda choice: choice.memory.sent)


def arranged(
    before: TrainingSettings, after: TrainingSettings, base: Base, cards: int, kinds: Iterable[str]
) -> list[Choice]:
    """Return `after`, which are `before` with some changes, in each of the arrangements `kinds` that can train it."""
    found = []
    for kind in kinds:
        own = replace(after, parallel=Parallel(kind))
        try:
            check_parallel(own)
        except InputError:
            continue
        words = (f'kind = "{kind}" in [parallel]', *differences(before, after))
        found.append(Choice(own, words, largest_memory(own, base, cards)))
    return found


def largest_memory(settings: TrainingSettings, base: Base, cards: int) -> RankMemory:
    """Return the memory of the phase that takes most, or of the validation's images on the first GPU."""
    steps = [rank_memory(settings, base, phase, cards) for phase in settings.phase]
    largest = max(steps, key=lambda memory: memory.card)
    if settings.validation.every and settings.validation.prompts:
        images = images_on_rank(settings, base, cards)
        if images.card > largest.card:
            return images._replace(sent=largest.sent, host=largest.host)
    return largest


def images_on_rank(settings: TrainingSettings, base: Base, cards: int) -> RankMemory:
    """Return the memory of the first of `cards` while it generates the validation's images."""
    if settings.parallel.kind == DDP:
        stage = validation_stage(settings, base, True)
        return RankMemory(stage.weights, stage.state, stage.work, 0, 0)
    # The whole model is gathered in the precision of the forward, beside the rows of this GPU.
    stage = validation_stage(compute_settings(settings), base, True)
    shards = cards // settings.parallel.replicas
    kept = add_optimizer(settings, base, count_batch(settings, base), shards)
    if settings.parallel.kind == OFFLOADED:
        return RankMemory(stage.weights, 0, stage.work, 0, 0)
    return RankMemory(stage.weights + kept.weights // shards, kept.state, stage.work, 0, 0)


def cheapest(settings: TrainingSettings, base: Base, cards: int, card: float) -> Choice | None:
    """Return the arrangement that fits `card` bytes with the least change: DDP, then FSDP, then offloaded, and in each
    as few of the changes that a single GPU's plan proposes as it takes. None where nothing fits."""
    for choice in [*steps_of(settings, base, cards, (DDP, FSDP)), *steps_of(settings, base, cards, (OFFLOADED,))]:
        if choice.memory.card <= card:
            return choice
    return None


def steps_of(settings: TrainingSettings, base: Base, cards: int, kinds: Iterable[str]) -> list[Choice]:
    """Return the settings with more and more of CHANGES, in each of the arrangements `kinds`."""
    steps = [settings]
    for change in CHANGES:
        changed = change(steps[-1])
        if changed != steps[-1]:
            steps.append(changed)
    return [choice for step in steps for choice in arranged(settings, step, base, cards, kinds)]


def arrangement_lines(settings: TrainingSettings, base: Base, cards: int, card: float | None) -> list[str]:
    """Return the arrangements as a table in GB of each GPU, and the cheapest that fits a GPU of `card` bytes."""
    head = ("weights", "state", "work", "card", "host", "sent a step")
    where = f"GB on each of {cards} GPUs" if cards > 1 else "GB on one GPU"
    lines = [f"{where:24}" + "".join(f"{word:>12}" for word in head)]
    for choice in arrangements(settings, base, cards):
        memory = choice.memory
        sizes = (memory.weights, memory.state, memory.work, memory.card, memory.host, memory.sent)
        lines.append(f"{choice.settings.parallel.kind:24}" + "".join(f"{size / GIGABYTE:12.2f}" for size in sizes))
    if card is None:
        return lines
    found = cheapest(settings, base, cards, card)
    name = f"{cards} GPU{'s' if cards > 1 else ''} of {card / 2**30:.4g} GB"
    if found is None:
        return [*lines, f"nothing fits {name}; take more of them, or a lower resolution"]
    taken = f"{found.memory.card / GIGABYTE:.1f} GB on each, {found.memory.sent / GIGABYTE:.2f} GB sent a step"
    return [*lines, f"fits {name} with {'; '.join(found.changes)}: {taken}"]
