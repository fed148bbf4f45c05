"""The queue that distributes the chunks of a batch to workers.

If a worker crashes, hangs or runs out of memory, its images are queued again. The queue is passive: it starts no
threads, never waits, and gets the current time from its caller. The same code therefore runs under threads, under Ray
and in a simulation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ClusterError
from .plan import Chunk, ImageSpec

# If a chunk is lost this many times, we assume that the chunk itself crashes the workers, and end the batch.
LARGEST_LOSSES = 5
# If a worker runs out of memory this many times in a row with a single image, we stop using that worker.
LARGEST_STRIKES = 4
# A worker counts as hanging when its chunk takes this many times as long as expected.
PATIENCE = 10.0
# Before any worker has finished a chunk there is no expected time. Until then the limit is this many grace periods.
FIRST_PATIENCE = 30.0


class ChunkLostError(ClusterError):
    """The same images were lost with their worker LARGEST_LOSSES times."""


@dataclass(eq=False)
class InFlight:
    """A chunk that is assigned to a worker."""

    chunk: Chunk
    # When the worker became free for this chunk. None while an earlier chunk of the same worker is still running.
    first_since: float | None
    # When the worker began to generate. Later than `first_since` if it had to load or encode something before.
    started: float | None = None


class Queue:
    """The state of a batch. All times are in seconds, from any clock that does not run backwards."""

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        # Chunks that no worker has yet, the next one first.
        self.waiting: deque[Chunk] = deque()
        # Worker name: its chunks in the order in which it generates them.
        self.flights: dict[str, list[InFlight]] = {}
        # Numbers of the images that no worker has finished yet.
        self.missing: set[int] = set()
        # Worker name: the most images that fit into its memory at once. Workers without an entry have no limit.
        self.limits: dict[str, int] = {}
        # Worker name: how many times in a row it ran out of memory with a single image.
        self.strikes: Counter[str] = Counter()
        # How many times each chunk was running on a worker that was lost.
        self.losses: Counter[Chunk] = Counter()
        # Worker name: seconds per image, averaged over its recent chunks.
        self.pace: dict[str, float] = {}
        # Worker name: how many images it was the first to finish.
        self.finished: Counter[str] = Counter()
        # Whether the workers report when they begin a chunk. If not, a worker begins a chunk when it is free for it.
        self.starts_are_reported = False
        self.add(chunks)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Append chunks to the queue."""
        for chunk in chunks:
            self.waiting.append(chunk)
            self.missing.update(image.number for image in chunk)

    def pending(self, worker: str) -> int:
        """Return how many chunks are assigned to `worker`."""
        return len(self.flights.get(worker, ()))

    def next_chunk(self, worker: str, now: float) -> Chunk | None:
        """Assign a chunk to `worker` and return it. Returns None if there is nothing useful for it to do.

        When no chunks are waiting, an idle worker gets a copy of a chunk that another worker would finish later than it
        would. This way a slow or hanging worker does not delay the end of the batch.
        """
        chunk: Chunk | None = None
        while self.waiting and not chunk:
            # Another worker may have finished some of these images in the meantime.
            chunk = tuple(image for image in self.waiting.popleft() if image.number in self.missing)
            limit = self.limits.get(worker, len(chunk))
            if len(chunk) > limit:
                self.waiting.appendleft(chunk[limit:])
                chunk = chunk[:limit]
        if not chunk and not self.pending(worker):
            chunk = self.chunk_to_copy(worker, now)
        if not chunk:
            return None
        worker_chunks = self.flights.setdefault(worker, [])
        worker_chunks.append(InFlight(chunk, first_since=None))
        self.make_first(worker, now)
        return chunk

    def make_first(self, worker: str, now: float) -> None:
        """Record that `worker` is free for the first of its chunks, unless it was free for it before."""
        flights = self.flights[worker]
        if flights and flights[0].first_since is None:
            flights[0].first_since = now
            if not self.starts_are_reported:
                flights[0].started = now

    def start(self, worker: str, chunk: Chunk, now: float) -> None:
        """Record that `worker` reports that it begins `chunk`. Ignored for a chunk that was requeued before."""
        for flight in self.flights.get(worker, [])[:1]:
            if flight.chunk == chunk:
                flight.started = now

    def postpone(self, seconds: float) -> None:
        """Do not count the last `seconds` for any chunk, because nobody looked at the workers in this time."""
        for flights in self.flights.values():
            for flight in flights:
                flight.first_since = None if flight.first_since is None else flight.first_since + seconds
                flight.started = None if flight.started is None else flight.started + seconds

    def chunk_to_copy(self, worker: str, now: float) -> Chunk | None:
        """Return the assigned chunk with the latest expected end, among those that `worker` could finish earlier.

        A chunk is copied at most once. Returns None before any worker has finished a chunk, because without a pace
        there are no expected times.
        """
        if not self.pace:
            return None
        slowest_pace = max(self.pace.values())
        worker_pace = self.pace.get(worker, slowest_pace)
        copies = Counter(flight.chunk for flights in self.flights.values() for flight in flights)
        latest_chunk, latest_end = None, 0.0
        for owner, flights in self.flights.items():
            owner_pace = self.pace.get(owner, slowest_pace)
            # Seconds until the owner has finished the current chunk and all chunks before it.
            seconds_left = 0.0
            for flight in flights:
                expected = owner_pace * len(flight.chunk)
                if flight.first_since is None:
                    seconds_left += expected
                else:
                    # A chunk that is t seconds overdue is expected to take another t seconds. A worker that loads
                    # something first is late as well.
                    since = flight.first_since if flight.started is None else flight.started
                    seconds_left += abs(expected - (now - since))
                seconds_as_copy = worker_pace * len(flight.chunk)
                fits = len(flight.chunk) <= self.limits.get(worker, len(flight.chunk))
                if (
                    seconds_left > max(seconds_as_copy, latest_end)
                    and fits
                    and copies[flight.chunk] == 1
                    and self.is_missing(flight.chunk)
                ):
                    latest_chunk, latest_end = flight.chunk, seconds_left
        return latest_chunk

    def is_missing(self, chunk: Chunk) -> bool:
        """Return whether any image of `chunk` is not finished yet."""
        return any(image.number in self.missing for image in chunk)

    def complete(self, worker: str, chunk: Chunk, now: float) -> float | None:
        """Remove `chunk` from the chunks of `worker`, and start the clock of the worker's next chunk.

        Returns the seconds that the chunk took. Returns None if they are unknown, because the chunk was requeued before
        or never started.
        """
        flights = self.flights.get(worker, [])
        flight = next((flight for flight in flights if flight.chunk == chunk), None)
        if flight is None:
            return None
        flights.remove(flight)
        self.make_first(worker, now)
        return None if flight.started is None else now - flight.started

    def finish(self, worker: str, chunk: Chunk, now: float, measured: float | None = None) -> list[ImageSpec]:
        """Record that `worker` has generated `chunk`. Returns the images that no other worker had finished before.

        `measured` is the time in seconds that the worker itself measured. It does not include the time until the result
        was taken.
        """
        seconds = self.complete(worker, chunk, now)
        if seconds is not None:
            seconds = seconds if measured is None else measured
            pace = seconds / len(chunk)
            self.pace[worker] = (self.pace.get(worker, pace) + pace) / 2
        self.strikes[worker] = 0
        new_images = [image for image in chunk if image.number in self.missing]
        self.missing.difference_update(image.number for image in new_images)
        self.finished[worker] += len(new_images)
        return new_images

    def halve(self, worker: str, chunk: Chunk, now: float) -> bool:
        """Record that `worker` ran out of memory with `chunk`, and put the two halves at the front of the queue.

        Returns False once the worker should no longer be used, see LARGEST_STRIKES.
        """
        self.complete(worker, chunk, now)
        half = max(1, len(chunk) // 2)
        # extendleft() reverses the order, so the first half ends up in front.
        self.waiting.extendleft(part for part in (chunk[half:], chunk[:half]) if part)
        self.limits[worker] = min(half, self.limits.get(worker, half))
        if len(chunk) == 1:
            self.strikes[worker] += 1
        return self.strikes[worker] < LARGEST_STRIKES

    def requeue(self, worker: str) -> None:
        """Put the chunks of a lost worker back at the front of the queue.

        Raises ChunkLostError if one of them was running on a lost worker for the LARGEST_LOSSES-th time.
        """
        self.pace.pop(worker, None)
        for flight in reversed(self.flights.pop(worker, [])):
            if not self.is_missing(flight.chunk):
                continue
            # A chunk that had not started cannot be the reason for the loss.
            if flight.started is not None:
                self.losses[flight.chunk] += 1
            if self.losses[flight.chunk] >= LARGEST_LOSSES:
                raise ChunkLostError(
                    f"worker: image {flight.chunk[0].number} and {len(flight.chunk) - 1} more were lost with it "
                    f"{LARGEST_LOSSES} times; see the workers' logs, or use a smaller chunk"
                )
            self.waiting.appendleft(flight.chunk)

    def hanging(self, now: float, grace: float) -> list[str]:
        """Return the workers whose current chunk takes far too long. No worker hangs before `grace` seconds."""
        slowest_pace = max(self.pace.values(), default=None)
        hanging_workers = []
        for worker, flights in self.flights.items():
            if flights and flights[0].started is not None:
                # A worker without a pace of its own may be as slow as the slowest one.
                pace = self.pace.get(worker, slowest_pace)
                allowed = FIRST_PATIENCE * grace if pace is None else PATIENCE * pace * len(flights[0].chunk)
                if now - flights[0].started > max(grace, allowed):
                    hanging_workers.append(worker)
        return hanging_workers
