"""The loop that keeps every worker busy, whatever kind of workers they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..runtime.accelerator import is_out_of_memory
from .plan import Chunk, ImageSpec
from .queue import Queue

logger = logging.getLogger(__name__)

R = TypeVar("R")
# seconds; no chunk is thought to hang before
GRACE = 60.0


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """How a chunk ended: `results`, one for each image, or the error."""

    worker: str
    chunk: Chunk
    results: Sequence[R] = ()
    error: BaseException | None = None


class Pool(Protocol[R]):
    """Workers of one kind. A worker that died is no longer among `workers`; that is all that the loop must know."""

    depth: int  # chunks that a worker may have at once

    def workers(self) -> list[str]:
        """Return who can take chunks now. Raises where nobody is left, and nobody will come."""

    def submit(self, worker: str, chunk: Chunk) -> None:
        """Let `worker` generate `chunk`, after those that it has."""

    def wait(self) -> list[Outcome[R]]:
        """Return what has ended, after a short time also nothing."""

    def drop(self, worker: str, reason: BaseException) -> None:
        """Give `worker` up; a pool that can replaces it."""

    def now(self) -> float:
        """Return the seconds of the pool's clock."""


def run_batch(queue: Queue, pool: Pool[R], grace: float = GRACE) -> Iterator[tuple[ImageSpec, R]]:
    """Yield each image of `queue` once, with its result, as they finish.

    A chunk for which memory ran out is generated in halves, one whose worker died or hangs by another worker. Raises
    what a worker raised otherwise, ChunkLostError, and what the pool raises when no worker is left.
    """
    while queue.missing:
        workers = pool.workers()
        for worker in queue.flights.keys() - workers:
            queue.requeue(worker)
        # one chunk to everyone before anyone gets a second
        for _ in range(pool.depth):
            for worker in workers:
                if queue.pending(worker) < pool.depth:
                    chunk = queue.next_chunk(worker, pool.now())
                    if chunk:
                        pool.submit(worker, chunk)
        for outcome in pool.wait():
            yield from handle_outcome(outcome, queue, pool)
        for worker in queue.hanging(pool.now(), grace):
            logger.warning("batch: %s hangs; its images go to the others", worker)
            pool.drop(worker, TimeoutError(f"{worker}: no image for a long time, gave it up"))


def handle_outcome(outcome: Outcome[R], queue: Queue, pool: Pool[R]) -> Iterator[tuple[ImageSpec, R]]:
    worker, chunk, error = outcome.worker, outcome.chunk, outcome.error
    if error is None:
        fresh = set(queue.finish(worker, chunk, pool.now()))
        yield from ((image, result) for image, result in zip(chunk, outcome.results, strict=True) if image in fresh)
    elif not is_out_of_memory(error):
        raise error
    else:
        logger.warning("batch: memory ran out on %s with %d images at once", worker, len(chunk))
        if not queue.halve(worker, chunk, pool.now()):
            pool.drop(worker, error)
