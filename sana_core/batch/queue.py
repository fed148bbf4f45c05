"""Who generates what: one queue of chunks, from which each worker takes the next when it is free.

Pure: it starts nothing, waits for nothing and reads no clock. Threads, Ray and the simulation are driven by it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ClusterError
from .plan import Chunk, ImageSpec

# a chunk that was lost this often takes its workers down itself
LARGEST_LOSSES = 5
# a worker whose memory ran out this often in a row, for single images, is too small
LARGEST_STRIKES = 4
# a worker hangs when a chunk takes this many times as long as the slowest one needs for it
PATIENCE = 10.0
# and before any chunk has come back, this many times the least patience
FIRST_PATIENCE = 30.0


class ChunkLostError(ClusterError):
    """Some images were lost with their worker again and again."""


@dataclass(eq=False)
class InFlight:
    """A chunk that a worker has; `started` is None while it waits behind another of the same worker."""

    chunk: Chunk
    started: float | None


class Queue:
    """Chunks that wait, chunks in flight, and which images are missing. Times are seconds of any clock."""

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self.waiting: deque[Chunk] = deque()
        self.flights: dict[str, list[InFlight]] = {}
        self.missing: set[int] = set()
        self.add(chunks)
        self.limits: dict[str, int] = {}
        self.strikes: Counter[str] = Counter()
        self.losses: Counter[Chunk] = Counter()
        self.pace: dict[str, float] = {}  # seconds an image
        self.finished: Counter[str] = Counter()

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Queue more chunks behind those that are there."""
        for chunk in chunks:
            self.waiting.append(chunk)
            self.missing.update(image.number for image in chunk)

    def pending(self, worker: str) -> int:
        """Return how many chunks `worker` has."""
        return len(self.flights.get(worker, ()))

    def next_chunk(self, worker: str, now: float) -> Chunk | None:
        """Return the next chunk for `worker`, None where it should wait.

        When none waits, a worker that has nothing gets a copy of a chunk that it would finish before the worker which
        has it: a slow card, one that hangs, or one with a second chunk behind its first does not hold up the end.
        """
        while self.waiting:
            chunk = tuple(image for image in self.waiting.popleft() if image.number in self.missing)
            limit = self.limits.get(worker, len(chunk))
            if len(chunk) > limit:
                self.waiting.appendleft(chunk[limit:])
                chunk = chunk[:limit]
            if chunk:
                return self.assign(worker, chunk, now)
        copy = None if self.pending(worker) else self.latest(worker, now)
        return self.assign(worker, copy, now) if copy else None

    def assign(self, worker: str, chunk: Chunk, now: float) -> Chunk:
        own = self.flights.setdefault(worker, [])
        own.append(InFlight(chunk, None if own else now))
        return chunk

    def latest(self, worker: str, now: float) -> Chunk | None:
        """Return the chunk that would come last and that `worker` would generate sooner, None if there is none."""
        if not self.pace:
            return None
        usual = max(self.pace.values())
        copies = Counter(flight.chunk for flights in self.flights.values() for flight in flights)
        found, latest = None, 0.0
        for other, flights in self.flights.items():
            pace = self.pace.get(other, usual)
            left = 0.0
            for flight in flights:
                expected = pace * len(flight.chunk)
                # an overdue chunk is expected to need as long again as it is late
                left += expected if flight.started is None else abs(expected - (now - flight.started))
                own = self.pace.get(worker, usual) * len(flight.chunk)
                fits = len(flight.chunk) <= self.limits.get(worker, len(flight.chunk))
                if left > max(own, latest) and fits and copies[flight.chunk] == 1 and self.is_missing(flight.chunk):
                    found, latest = flight.chunk, left
        return found

    def is_missing(self, chunk: Chunk) -> bool:
        return any(image.number in self.missing for image in chunk)

    def complete(self, worker: str, chunk: Chunk, now: float) -> float | None:
        """Take `chunk` off `worker`. Return the seconds since it was started, None if it was already taken away."""
        flights = self.flights.get(worker, [])
        flight = next((flight for flight in flights if flight.chunk == chunk), None)
        if flight is None:
            return None
        flights.remove(flight)
        if flights and flights[0].started is None:
            flights[0].started = now
        return None if flight.started is None else now - flight.started

    def finish(self, worker: str, chunk: Chunk, now: float) -> list[ImageSpec]:
        """Note that `worker` has generated `chunk`. Return the images that nobody had generated before."""
        seconds = self.complete(worker, chunk, now)
        if seconds is not None:
            pace = seconds / len(chunk)
            self.pace[worker] = (self.pace.get(worker, pace) + pace) / 2
        self.strikes[worker] = 0
        fresh = [image for image in chunk if image.number in self.missing]
        self.missing.difference_update(image.number for image in fresh)
        self.finished[worker] += len(fresh)
        return fresh

    def halve(self, worker: str, chunk: Chunk, now: float) -> bool:
        """Note that `worker` ran out of memory over `chunk`, and queue it in halves.

        Return whether the worker is still of use: not after four single images in a row.
        """
        self.complete(worker, chunk, now)
        half = max(1, len(chunk) // 2)
        self.waiting.extendleft(part for part in (chunk[half:], chunk[:half]) if part)
        self.limits[worker] = min(half, self.limits.get(worker, half))
        self.strikes[worker] += len(chunk) == 1
        return self.strikes[worker] < LARGEST_STRIKES

    def requeue(self, worker: str) -> None:
        """Queue again what `worker` had, first of all. Raises ChunkLostError for a chunk that is lost too often."""
        self.pace.pop(worker, None)
        for flight in reversed(self.flights.pop(worker, [])):
            if not self.is_missing(flight.chunk):
                continue
            # one that waited behind another has no part in what happened
            self.losses[flight.chunk] += flight.started is not None
            if self.losses[flight.chunk] >= LARGEST_LOSSES:
                raise ChunkLostError(
                    f"worker: image {flight.chunk[0].number} and {len(flight.chunk) - 1} more were lost with it "
                    f"{LARGEST_LOSSES} times; see the workers' logs, or use a smaller chunk"
                )
            self.waiting.appendleft(flight.chunk)

    def hanging(self, now: float, grace: float) -> list[str]:
        """Return the workers that have been at a chunk for far too long, at least `grace` seconds."""
        usual = max(self.pace.values(), default=None)
        found = []
        for worker, flights in self.flights.items():
            if flights and flights[0].started is not None:
                pace = self.pace.get(worker, usual)
                allowed = FIRST_PATIENCE * grace if pace is None else PATIENCE * pace * len(flights[0].chunk)
                if now - flights[0].started > max(grace, allowed):
                    found.append(worker)
        return found
