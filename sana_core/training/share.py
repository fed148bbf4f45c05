"""Which pictures of a step each rank learns: all of them once, and every rank the same number of times.

A rank that has fewer would leave the others waiting for its gradients. So shares are made of the step, whatever shapes
are in it, and not of the data set.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InputError
from .settings import Settings

# indices of samples of one shape, and whether they count; they do not where a rank only keeps the others company
Piece = tuple[list[int], bool]


def share_step(group: Sequence[Sequence[int]], rank: int, count: int) -> list[Piece]:
    """Return what the rank of that number learns of the batches of a step, in as many pieces as all others.

    Whole batches are dealt out, or where there are fewer than ranks, parts of each. What is left over is learnt by
    some ranks while the others compute what does not count.
    """
    pieces = list(group)
    if len(group) < count:
        parts = -(-count // len(group))
        pieces = [piece for batch in group for piece in divide(batch, parts)]
    rounds = -(-len(pieces) // count)
    own = [(list(piece), True) for piece in pieces[rank::count]]
    return own + [(list(pieces[0][:1]), False)] * (rounds - len(own))


def divide(batch: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Return `batch` in at most so many parts, of which none is more than one longer than another."""
    parts = min(parts, len(batch))
    bounds = [number * len(batch) // parts for number in range(parts + 1)]
    return [batch[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def check_shares(settings: Settings, count: int) -> None:
    """Raise InputError unless a step of each phase has a picture for each of `count` ranks, and replicas are even."""
    for number, phase in enumerate(settings.phase, 1):
        pictures = phase.batch * phase.accumulate
        if pictures < count:
            raise InputError(
                f"batch: got {phase.batch} and accumulate {phase.accumulate} in phase {number} for {count} processes, "
                f"expected {count} images in a step; set accumulate to {-(-count // phase.batch)}"
            )
    if count % settings.parallel.replicas:
        raise InputError(
            f"replicas: got {settings.parallel.replicas} for {count} processes, expected a number that divides them"
        )
