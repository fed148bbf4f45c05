"""A discrete simulation of a cluster under the loop that drives threads and Ray: virtual seconds, the same code."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable

from sana_core.batch.loop import Outcome
from sana_core.batch.plan import Chunk


class SimulatedPool:
    """Simulated workers with `speeds`, which die, hang, restart and run out of memory at random.

    An image takes about 1 / speed seconds. `mishap(random)` is called once per chunk and returns None, "dies", "hangs"
    or "memory". `delay` is the time for sending a chunk and its results.
    """

    reports_starts = False

    def __init__(
        self,
        speeds: list[float],
        seed: int = 0,
        depth: int = 2,
        delay: float = 0.0,
        jitter: float = 0.0,
        restart: float = 60.0,
        mishap: Callable[[random.Random], str | None] = lambda source: None,
    ) -> None:
        self.depth, self.delay, self.jitter, self.restart, self.mishap = depth, delay, jitter, restart, mishap
        self.random = random.Random(seed)
        self.speeds = {f"worker {i}": speed for i, speed in enumerate(speeds)}
        self.names = {slot: slot for slot in self.speeds}  # slot: the worker that is in it
        self.slots = {name: slot for slot, name in self.names.items()}
        self.inbox: dict[str, list[Chunk]] = {name: [] for name in self.slots}
        self.clock = 0.0
        self.lifetimes: dict[str, list[list[float]]] = {slot: [[0.0, float("inf")]] for slot in self.speeds}
        self.events: list[tuple[float, int, str, str, Chunk]] = []
        self.order = itertools.count()
        self.mishaps: list[tuple[float, str]] = []
        self.busy: list[tuple[str, float, float, str]] = []  # slot, from, to, how it ended

    def now(self) -> float:
        return self.clock

    def workers(self) -> list[str]:
        return list(self.slots)

    def submit(self, worker: str, chunk: Chunk) -> None:
        self.inbox[worker].append(chunk)
        if len(self.inbox[worker]) == 1:
            self.begin(worker, self.delay)

    def begin(self, worker: str, delay: float) -> None:
        """Let `worker` draw the first chunk of its inbox; what follows in the inbox has no way to go any more."""
        chunk, slot = self.inbox[worker][0], self.slots[worker]
        seconds = len(chunk) / self.speeds[slot] * self.random.lognormvariate(0, self.jitter) + delay
        mishap = self.mishap(self.random)
        if mishap:
            self.mishaps.append((self.clock, mishap))
            seconds *= self.random.random()
        self.busy.append((slot, self.clock + delay, self.clock + max(seconds, delay), mishap or "drawn"))
        if mishap != "hangs":
            self.at(seconds, mishap or "drawn", worker, chunk)

    def at(self, seconds: float, kind: str, worker: str, chunk: Chunk = ()) -> None:
        heapq.heappush(self.events, (self.clock + seconds, next(self.order), kind, worker, chunk))

    def wait(self) -> list[Outcome[Chunk]]:
        """Continue until the next event, but for at most a second, as a pool that polls does.

        The caller may have moved the clock, because the consumer took time. Workers continued meanwhile, so all events
        until now are returned.
        """
        until = max(self.clock, min(self.clock + 1, self.events[0][0] if self.events else math.inf))
        outcomes: list[Outcome[Chunk]] = []
        while self.events and self.events[0][0] <= until:
            self.clock, _, kind, worker, chunk = heapq.heappop(self.events)
            outcomes += self.handle(kind, worker, chunk)
        self.clock = until
        return outcomes

    def handle(self, kind: str, worker: str, chunk: Chunk) -> list[Outcome[Chunk]]:
        """Let an event happen, and return its outcome, if any."""
        if kind == "back":
            self.join(worker)
            return []
        if worker not in self.slots:
            return []
        if kind == "dies":
            self.drop(worker, ConnectionError(worker))
            return []
        self.inbox[worker].pop(0)
        if self.inbox[worker]:
            self.begin(worker, 0.0)
        if kind == "memory":
            return [Outcome(worker, chunk, error=MemoryError())]
        return [Outcome(worker, chunk, chunk)]

    def drop(self, worker: str, reason: BaseException) -> None:
        slot = self.slots.pop(worker)
        self.lifetimes[slot][-1][1] = self.clock
        self.at(self.restart, "back", slot)

    def join(self, slot: str) -> None:
        name = f"{slot}, {len(self.lifetimes[slot])}"
        self.names[slot] = name
        self.slots[name] = slot
        self.inbox[name] = []
        self.lifetimes[slot].append([self.clock, float("inf")])

    def capacity(self) -> float:
        """Return the pictures that all workers could have drawn until now while they lived."""
        return sum(
            self.speeds[slot] * (min(end, self.clock) - start)
            for slot, lives in self.lifetimes.items()
            for start, end in lives
        )
