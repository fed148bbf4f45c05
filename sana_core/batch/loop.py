"""The loop that keeps all workers of a batch busy. It drives threads, Ray actors and the simulation alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..runtime.accelerator import is_out_of_memory
from ..runtime.text import get_logger
from .plan import Chunk, FailedImage, ImageSpec
from .queue import Queue

logger = get_logger(__name__)

R = TypeVar("R")
# A chunk never counts as hanging before this many seconds.
GRACE = 60.0
# If more seconds than this pass between two looks at the workers, this time does not count as their time. The consumer
# of the images may take long, for example because its terminal is paused.
LONGEST_LOOK = 5.0


@dataclass(frozen=True)
class Started:
    """A worker begins to generate a chunk. It has loaded everything that the chunk needs."""

    worker: str
    chunk: Chunk


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """The end of a chunk: `results` has one result per image, or `error` is the reason why there are none."""

    worker: str
    chunk: Chunk
    results: Sequence[R | FailedImage] = ()
    error: BaseException | None = None
    # The time that the worker itself measured. None: the loop measures from the start of the chunk.
    seconds: float | None = None


class WorkerPool(Protocol[R]):
    """Workers of one kind. A worker that was lost is no longer among `workers`."""

    # How many chunks a worker may have at once.
    depth: int
    # Whether wait() also returns a Started for each chunk. If not, a chunk starts when its worker is free for it.
    reports_starts: bool

    def workers(self) -> list[str]:
        """Return the workers that take chunks now. Raises if there are none and there will be none."""

    def submit(self, worker: str, chunk: Chunk) -> None:
        """Let `worker` generate `chunk` after the chunks that it has already."""

    def wait(self) -> Sequence[Outcome[R] | Started]:
        """Return the events since the last call, in their order. Returns after a short time without events."""

    def drop(self, worker: str, reason: BaseException) -> None:
        """Stop using `worker`. A pool that can replace the worker does so."""

    def now(self) -> float:
        """Return the seconds of the pool's clock."""


def run_batch(queue: Queue, pool: WorkerPool[R], grace: float = GRACE) -> Iterator[tuple[ImageSpec, R | FailedImage]]:
    """Yield each image of `queue` once with its result, in the order in which they finish.

    If memory runs out for a chunk, it is generated in halves. If its worker is lost or hangs, another worker generates
    it. Raises the other errors of workers, ChunkLostError, and the error of the pool when no worker is left.
    """
    queue.starts_are_reported = pool.reports_starts
    last_look = pool.now()
    while queue.missing:
        workers = pool.workers()
        for worker in queue.flights.keys() - workers:
            queue.requeue(worker)
        # Every worker gets a chunk before any worker gets a second one.
        for _ in range(pool.depth):
            for worker in workers:
                if queue.pending(worker) < pool.depth:
                    chunk = queue.next_chunk(worker, pool.now())
                    if chunk:
                        pool.submit(worker, chunk)
        new_images: list[tuple[ImageSpec, R | FailedImage]] = []
        error: BaseException | None = None
        for event in pool.wait():
            if isinstance(event, Started):
                queue.start(event.worker, event.chunk, pool.now())
            elif event.error is None or is_out_of_memory(event.error):
                finished = handle_outcome(event, queue, pool)
                new_images += finished
            else:
                error = event.error
        # Only now, because a chunk whose end has just been handled does not hang.
        now = pool.now()
        unobserved, last_look = now - last_look, now
        if unobserved > LONGEST_LOOK:
            queue.postpone(unobserved)
        else:
            for worker in queue.hanging(now, grace):
                logger.warning("batch: %s hangs; other workers generate its images", worker)
                pool.drop(worker, TimeoutError(f"{worker}: it has not finished its images for too long"))
        yield from new_images
        if error is not None:
            try:
                raise error
            finally:
                # The error refers to this frame. A reference back would keep the models of all frames alive until
                # Python's collector runs.
                del error, event


def handle_outcome(
    outcome: Outcome[R], queue: Queue, pool: WorkerPool[R]
) -> Iterator[tuple[ImageSpec, R | FailedImage]]:
    """Record the end of a chunk. Yields its images, except images that another worker has finished before."""
    worker, chunk, error = outcome.worker, outcome.chunk, outcome.error
    if error is not None:
        logger.warning("batch: memory ran out on %s with %d images at once", worker, len(chunk))
        if not queue.halve(worker, chunk, pool.now()):
            pool.drop(worker, error)
        return
    new_images = set(queue.finish(worker, chunk, pool.now(), outcome.seconds))
    results = [pair for pair in zip(chunk, outcome.results, strict=True) if pair[0] in new_images]
    queue.finished[worker] -= sum(isinstance(result, FailedImage) for _, result in results)
    yield from results
