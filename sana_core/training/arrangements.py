"""What a step takes of each card where several train together, and what it sends, for every way to hold the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from ..memory import CONTEXT, count
from .demand import FP32, backward_bytes, step_bytes, trained_shapes, weights_dtype
from .plan import Base, largest_shape, resident, streaming
from .proposal import CHANGES, differences
from .settings import DDP, FSDP, OFFLOADED, QUANTISED, Parallel, Phase, Settings, check_parallel

# the blocks that are gathered at once: the one that is worked on, the next one, and the buffer that it travels in
GATHERED = 3
GIGABYTE = 10**9


class Share(NamedTuple):
    """Bytes of a step on one of several cards."""

    weights: int
    state: int  # gradients, the optimizer's state and the moving average
    work: int
    sent: int  # over the network, and as much received
    host: int  # of the machine's memory, where weights and state are offloaded

    @property
    def card(self) -> int:
        """Bytes of the card that it needs, the driver's among them."""
        return self.weights + self.state + self.work + CONTEXT


def share_of(settings: Settings, base: Base, phase: Phase, cards: int) -> Share:
    """Return what a step of `phase` takes of each of `cards`, whose arrangement is `settings.parallel`."""
    share, encoding = step_share(settings, base, phase, cards), streaming(settings, base)
    return share._replace(weights=share.weights + encoding.weights, work=max(share.work, encoding.work))


def step_share(settings: Settings, base: Base, phase: Phase, cards: int) -> Share:
    """Return what `share_of` does, without what encodes."""
    width, height = largest_shape(phase.largest)
    rounds, batch = pieces_of(phase, cards)
    kept, own = resident(settings, base), settings.parallel.kind
    trained = trained_shapes(base.shapes, settings.method)
    item = weights_dtype(settings).itemsize
    gradients = count(trained) * item
    # gradients counted by themselves, as those of earlier batches are
    piece = replace(phase, batch=batch, accumulate=2)
    if own == DDP:
        backward = backward_bytes(settings, base.model, base.shapes, piece, width * height, gradients)
        work = max(backward - gradients, step_bytes(settings.optimizer.name, trained, weights_dtype(settings)))
        return Share(kept.weights, kept.state + gradients, work, round(ring(cards) * 2 * gradients), 0)
    shards = cards // settings.parallel.replicas
    compute, cells = compute_settings(settings), width * height
    held = backward_bytes(compute, base.model, base.shapes, piece, cells, 0)
    fewer = base.model._replace(layers=base.model.layers - 1)
    block = held - backward_bytes(compute, fewer, base.shapes, piece, cells, 0)
    # at the end all gradients are there, and what one block held; at the beginning all of that, but in the first piece
    # no gradients
    begins = held + gathered_bytes(settings, base, GATHERED) - (gradients // shards if rounds == 1 else 0)
    work = max(begins, held - (base.model.layers - 1) * block + gathered_bytes(settings, base, 1))
    whole = count(base.shapes.values()) * getattr(torch, settings.dtype).itemsize
    reduced = count(trained) * FP32
    # each piece gathers the weights for the forward and for the backward, and sums its gradients
    sent = round(ring(shards) * rounds * (2 * whole + reduced))
    if settings.parallel.replicas > 1:
        sent += round(ring(settings.parallel.replicas) * 2 * reduced * rounds / shards)
    parts = [each // shards for each in (kept.weights, kept.state + gradients)]
    step = step_bytes(settings.optimizer.name, trained, weights_dtype(settings), shards)
    if own == OFFLOADED:
        return Share(0, 0, work, sent, sum(parts) + step)
    return Share(parts[0], parts[1], max(work, step), sent, 0)


def pieces_of(phase: Phase, cards: int) -> tuple[int, int]:
    """Return in how many pieces a card learns its share of a step, and how many pictures the largest has."""
    parts = -(-cards // phase.accumulate) if phase.accumulate < cards else 1
    parts = min(parts, phase.batch)
    return -(-phase.accumulate * parts // cards), -(-phase.batch // parts)


def ring(cards: int) -> float:
    """Return what each of `cards` sends of a tensor that they gather, or sum in shares, around a ring."""
    return (cards - 1) / cards


def compute_settings(settings: Settings) -> Settings:
    """Return `settings` as FSDP computes: weights in fp32 arrive in the precision of the forward, and are not cast."""
    if not settings.method.whole:
        return settings
    return replace(settings, method=replace(settings.method, weights=settings.dtype))


def gathered_bytes(settings: Settings, base: Base, blocks: int) -> int:
    """Return the bytes of so many gathered `blocks`, of what lies outside of them, and of the gradients of one, in fp32
    before they are divided."""
    item = getattr(torch, settings.dtype).itemsize
    block = {name: shape for name, shape in base.shapes.items() if name.startswith("transformer_blocks.0.")}
    outside = count(base.shapes.values()) - base.model.layers * count(block.values())
    weights = (blocks * count(block.values()) + outside) * item
    return weights + count(trained_shapes(block, settings.method)) * FP32


class Choice(NamedTuple):
    """An arrangement, with what else had to change, and what it takes."""

    settings: Settings
    changes: tuple[str, ...]
    share: Share


def arrangements(settings: Settings, base: Base, cards: int) -> list[Choice]:
    """Return every way to hold the model with these settings, the one that sends least first."""
    found = []
    for kind in (DDP, FSDP, OFFLOADED):
        if kind != DDP and settings.method.base != "full" and settings.method.kind in QUANTISED:
            continue
        own = replace(settings, parallel=Parallel(kind))
        found.append(Choice(own, (f'kind = "{kind}" in [parallel]',), largest_share(own, base, cards)))
    return sorted(found, key=lambda choice: choice.share.sent)


def largest_share(settings: Settings, base: Base, cards: int) -> Share:
    """Return the share of the phase that takes most."""
    return max((share_of(settings, base, phase, cards) for phase in settings.phase), key=lambda share: share.card)


def cheapest(settings: Settings, base: Base, cards: int, card: float) -> Choice | None:
    """Return the arrangement that fits `card` bytes with the least change: DDP, then FSDP, then offloaded, and in each
    as few of what a single card's plan proposes as it takes. None where nothing fits."""
    for choice in [*steps_of(settings, base, cards, (DDP, FSDP)), *steps_of(settings, base, cards, (OFFLOADED,))]:
        if choice.share.card <= card:
            return choice
    return None


def steps_of(settings: Settings, base: Base, cards: int, kinds: Iterable[str]) -> list[Choice]:
    """Return the settings with more and more of CHANGES, in each of the arrangements `kinds`."""
    found, own = [], settings
    for change in (None, *CHANGES):
        changed = own if change is None else change(own)
        if change is not None and changed == own:
            continue
        own = changed
        for kind in kinds:
            if kind != DDP and own.method.base != "full":
                continue
            arranged = check_arranged(replace(own, parallel=Parallel(kind)))
            words = (f'kind = "{kind}" in [parallel]', *differences(settings, own))
            found.append(Choice(arranged, words, largest_share(arranged, base, cards)))
    return found


def check_arranged(settings: Settings) -> Settings:
    check_parallel(settings)
    return settings


def arrangement_lines(settings: Settings, base: Base, cards: int, card: float | None) -> list[str]:
    """Return the arrangements as a table in GB of each card, and the cheapest that fits a card of `card` bytes."""
    head = ("weights", "state", "work", "card", "host", "sent a step")
    where = f"GB on each of {cards} GPUs" if cards > 1 else "GB on one GPU"
    lines = [f"{where:24}" + "".join(f"{word:>12}" for word in head)]
    for choice in arrangements(settings, base, cards):
        share = choice.share
        sizes = (share.weights, share.state, share.work, share.card, share.host, share.sent)
        lines.append(f"{choice.settings.parallel.kind:24}" + "".join(f"{size / GIGABYTE:12.2f}" for size in sizes))
    if card is None:
        return lines
    found = cheapest(settings, base, cards, card)
    name = f"{cards} GPU{'s' if cards > 1 else ''} of {card / 2**30:.4g} GB"
    if found is None:
        return [*lines, f"nothing fits {name}; take more of them, or a lower resolution"]
    taken = f"{found.share.card / GIGABYTE:.1f} GB on each, {found.share.sent / GIGABYTE:.2f} GB sent a step"
    return [*lines, f"fits {name} with {'; '.join(found.changes)}: {taken}"]
