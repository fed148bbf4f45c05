"""The nearest settings that fit a GPU, or several GPUs with DDP, FSDP or offloading."""

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

# The optimizer with the least state.
LEAST = "came8bit"
Change = Callable[[TrainingSettings], TrainingSettings]
# Blocks that are gathered at once: the current block, the next block, and the communication buffer.
GATHERED = 3
GIGABYTE = 10**9


class Proposal(NamedTuple):
    """Settings that may fit a GPU."""

    settings: TrainingSettings
    # The differences from the original settings, as text.
    changes: tuple[str, ...]
    # The memory of `settings`.
    plan: Plan


def propose(settings: TrainingSettings, base: Base, card: float) -> Proposal:
    """Return the settings nearest to `settings` that fit a GPU of `card` bytes, or that exceed it by the least.

    The changes are tried in the order of CHANGES, which begins with the changes that slow a run down least.
    """

    def changed(changes: list[Change]) -> TrainingSettings:
        proposed = settings
        for change in changes:
            proposed = change(proposed)
        return proposed

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
    # A later change may make earlier ones unnecessary. Drop those, the most expensive first.
    for index in reversed(range(len(chosen))):
        without = chosen[:index] + chosen[index + 1 :]
        if needs(without) <= enough:
            chosen = without
    proposed = changed(chosen)
    return Proposal(proposed, tuple(differences(settings, proposed)), plan_training(proposed, base))


def checkpoint_gradients(settings: TrainingSettings) -> TrainingSettings:
    return replace(settings, checkpoint_gradients=True)


def divide_batches(settings: TrainingSettings) -> TrainingSettings:
    """Divide the batches that need the most memory by their smallest factor. A step then has more of them."""
    most = max(phase.batch * phase.largest**2 if phase.batch > 1 else 0 for phase in settings.phase)

    def divide(phase: Phase) -> Phase:
        if phase.batch == 1 or phase.batch * phase.largest**2 < most:
            return phase
        factor = next(divisor for divisor in range(2, phase.batch + 1) if phase.batch % divisor == 0)
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


# The changes that slow a run down least come first.
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
    changes = []
    if before.checkpoint_gradients != after.checkpoint_gradients:
        changes.append("checkpoint_gradients = true")
    for number, (one, other) in enumerate(zip(before.phase, after.phase, strict=True), 1):
        if one != other:
            changes.append(f"batch = {other.batch} and accumulate = {other.accumulate} in phase {number}")
    if before.optimizer.name != after.optimizer.name:
        changes.append(f'name = "{after.optimizer.name}" in [optimizer], with a warmup of some hundred steps')
    if before.optimizer.ema != after.optimizer.ema:
        changes.append("ema = 0.0 in [optimizer]")
    if before.method.base != after.method.base:
        changes.append(f'base = "{after.method.base}" in [method]')
    if before.method.weights != after.method.weights:
        changes.append(f'weights = "{after.method.weights}" in [method]')
    return changes


def table_lines(plan: Plan) -> list[str]:
    """Return the stages of `plan` as a table, in GB."""
    lines = [f"{'GB':32}{'weights':>9}{'state':>9}{'work':>9}{'together':>10}"]
    for stage in plan.stages:
        parts = "".join(f"{size / 1e9:9.2f}" for size in (stage.weights, stage.state, stage.work))
        lines.append(f"{stage.name:32}{parts}{stage.bytes / 1e9:10.2f}")
    return lines


def fit_lines(settings: TrainingSettings, base: Base, plan: Plan, card: float | None) -> list[str]:
    """Describe whether the `plan` of `settings` fits a GPU of `card` bytes, and if not, settings that do.

    Without a GPU (`card` is None), name the smallest of CARDS that it fits.
    """
    needed = f"{plan.card / 1e9:.1f} GB with {CONTEXT / 1e9:.1f} GB for the driver"
    if card is None:
        fitting = [size for size in CARDS if plan.card <= size * 2**30]
        return [f"{needed}: " + (f"fits a GPU of {fitting[0]} GB" if fitting else f"more than {CARDS[-1]} GB")]
    name = f"a GPU of {card / 2**30:.4g} GB"
    if plan.card <= card:
        return [f"{needed}: fits {name}"]
    proposal = propose(settings, base, card)
    lines = [f"{needed}, for {plan.largest.name}: does not fit {name}"]
    if proposal.plan.card > card:
        least = f"{proposal.plan.card / 1e9:.1f} GB, for {proposal.plan.largest.name}"
        changes = ", with " + "; ".join(proposal.changes) if proposal.changes else ""
        return [*lines, f"the least that these settings can come to: {least}{changes}"]
    return [*lines, "fits with " + "; ".join(proposal.changes) + f": {proposal.plan.card / 1e9:.1f} GB"]


class RankMemory(NamedTuple):
    """Bytes of a step on one of several GPUs."""

    weights: int
    state: int  # Gradients, the optimizer's state and the moving average.
    work: int  # Everything else, at the peak.
    sent: int  # Sent over the network. The same number is received.
    host: int  # Offloaded weights and state in the machine's memory.

    @property
    def card(self) -> int:
        """Bytes of the GPU, including the driver."""
        return self.weights + self.state + self.work + CONTEXT


def rank_memory(settings: TrainingSettings, base: Base, phase: Phase, cards: int) -> RankMemory:
    """Return the memory of a step of `phase` on one of `cards` GPUs, for the kind in `settings.parallel`."""
    memory, encoding = step_on_rank(settings, base, phase, cards), streaming(settings, base)
    return memory._replace(weights=memory.weights + encoding.weights, work=max(memory.work, encoding.work))


def step_on_rank(settings: TrainingSettings, base: Base, phase: Phase, cards: int) -> RankMemory:
    """Return the memory of a step on a GPU, without the text encoder and the VAE."""
    rounds, batch = pieces_of(phase, cards)
    shards = 1 if settings.parallel.kind == DDP else cards // settings.parallel.replicas
    # All gradients are there, as after an earlier batch.
    step = count_batch(settings, base, phase, batch, True)
    local = add_optimizer(settings, base, step, shards)
    if settings.parallel.kind == DDP:
        sent = round(ring(cards) * 2 * local.gradients)
        return RankMemory(local.weights, local.state + local.gradients, local.work, sent, 0)
    compute = count_batch(compute_settings(settings), base, phase, batch, True)
    gradients = compute.elements * weights_dtype(compute_settings(settings)).itemsize
    begin, end = compute.begin - gradients, compute.end - gradients
    # At the end all gradients are there. At the beginning of the first piece there are none.
    begin += gathered_bytes(settings, base, GATHERED) - (local.gradients // shards if rounds == 1 else 0)
    work = max(begin, end + gathered_bytes(settings, base, 1))
    model_bytes = count(base.shapes.values()) * getattr(torch, settings.dtype).itemsize
    reduced = step.elements * FP32_BYTES
    # Each piece gathers the weights for the forward and for the backward, and sums its gradients.
    sent = round(ring(shards) * rounds * (2 * model_bytes + reduced))
    if settings.parallel.replicas > 1:
        sent += round(ring(settings.parallel.replicas) * 2 * reduced * rounds / shards)
    weights, state = local.weights // shards, local.gradients // shards + local.state
    if settings.parallel.kind == OFFLOADED:
        return RankMemory(0, 0, work, sent, weights + state + local.optimizer_work)
    return RankMemory(weights, state, max(work, local.optimizer_work), sent, 0)


def pieces_of(phase: Phase, cards: int) -> tuple[int, int]:
    """Return the number of pieces in which a GPU learns its share of a step, and the images of the largest piece."""
    parts = -(-cards // phase.accumulate) if phase.accumulate < cards else 1
    parts = min(parts, phase.batch)
    return -(-phase.accumulate * parts // cards), -(-phase.batch // parts)


def ring(cards: int) -> float:
    """Return the share of a tensor that each GPU sends in a ring all-gather or reduce-scatter."""
    return (cards - 1) / cards


def compute_settings(settings: TrainingSettings) -> TrainingSettings:
    """Return `settings` with the weights in the precision of the forward, because FSDP gathers them in it."""
    if not settings.method.whole:
        return settings
    return replace(settings, method=replace(settings.method, weights=settings.dtype))


def gathered_bytes(settings: TrainingSettings, base: Base, blocks: int) -> int:
    """Return the bytes of gathered `blocks`, of the layers outside of blocks, and of a block's fp32 gradients."""
    item = getattr(torch, settings.dtype).itemsize
    block = {name: shape for name, shape in base.shapes.items() if name.startswith("transformer_blocks.0.")}
    outside = count(base.shapes.values()) - base.model.layers * count(block.values())
    weights = (blocks * count(block.values()) + outside) * item
    return weights + count_batch(settings, base).block * FP32_BYTES


class Choice(NamedTuple):
    """Settings with a kind of parallel training."""

    settings: TrainingSettings
    # The differences from the original settings, as text.
    changes: tuple[str, ...]
    # The memory of one GPU.
    memory: RankMemory


def arrangements(settings: TrainingSettings, base: Base, cards: int) -> list[Choice]:
    """Return `settings` with every possible kind of parallel training, sorted by the bytes that they send."""
    return sorted(arranged(settings, settings, base, cards, KINDS), key=lambda choice: choice.memory.sent)


def arranged(
    before: TrainingSettings, after: TrainingSettings, base: Base, cards: int, kinds: Iterable[str]
) -> list[Choice]:
    """Return `after` with each of `kinds` that can train it. `before`: the original settings."""
    choices = []
    for kind in kinds:
        candidate = replace(after, parallel=Parallel(kind))
        try:
            check_parallel(candidate)
        except InputError:
            continue
        words = (f'kind = "{kind}" in [parallel]', *differences(before, after))
        choices.append(Choice(candidate, words, largest_memory(candidate, base, cards)))
    return choices


def largest_memory(settings: TrainingSettings, base: Base, cards: int) -> RankMemory:
    """Return the memory of the largest phase, or of the validation's images on the first GPU if they need more."""
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
    local = add_optimizer(settings, base, count_batch(settings, base), shards)
    if settings.parallel.kind == OFFLOADED:
        return RankMemory(stage.weights, 0, stage.work, 0, 0)
    return RankMemory(stage.weights + local.weights // shards, local.state, stage.work, 0, 0)


def cheapest(settings: TrainingSettings, base: Base, cards: int, card: float) -> Choice | None:
    """Return the choice that fits `card` bytes with the fewest of CHANGES, or None if nothing fits.

    DDP and FSDP are tried before offloading.
    """
    for choice in [*steps_of(settings, base, cards, (DDP, FSDP)), *steps_of(settings, base, cards, (OFFLOADED,))]:
        if choice.memory.card <= card:
            return choice
    return None


def steps_of(settings: TrainingSettings, base: Base, cards: int, kinds: Iterable[str]) -> list[Choice]:
    """Return the settings with an increasing number of CHANGES, with each of `kinds`."""
    steps = [settings]
    for change in CHANGES:
        changed = change(steps[-1])
        if changed != steps[-1]:
            steps.append(changed)
    return [choice for step in steps for choice in arranged(settings, step, base, cards, kinds)]


def arrangement_lines(settings: TrainingSettings, base: Base, cards: int, card: float | None) -> list[str]:
    """Return a table of the kinds of parallel training in GB per GPU, and the cheapest that fits `card` bytes."""
    head = ("weights", "state", "work", "card", "host", "sent a step")
    where = f"GB on each of {cards} GPUs" if cards > 1 else "GB on one GPU"
    lines = [f"{where:24}" + "".join(f"{word:>12}" for word in head)]
    for choice in arrangements(settings, base, cards):
        memory = choice.memory
        sizes = (memory.weights, memory.state, memory.work, memory.card, memory.host, memory.sent)
        lines.append(f"{choice.settings.parallel.kind:24}" + "".join(f"{size / GIGABYTE:12.2f}" for size in sizes))
    if card is None:
        return lines
    best = cheapest(settings, base, cards, card)
    name = f"{cards} GPU{'s' if cards > 1 else ''} of {card / 2**30:.4g} GB"
    if best is None:
        return [*lines, f"nothing fits {name}; take more of them, or a lower resolution"]
    needed = f"{best.memory.card / GIGABYTE:.1f} GB on each, {best.memory.sent / GIGABYTE:.2f} GB sent a step"
    return [*lines, f"fits {name} with {'; '.join(best.changes)}: {needed}"]
