"""Simulated workers and time under the engine's loop: virtual seconds, and the same rules as for real workers."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

from sana_core.batch.plan import Chunk
from sana_core.engine.loop import Run
from sana_core.runtime.limits import LIMITS, Limits, WatchClock


class Time:
    """Virtual seconds, and the events that happen in them. It is the `clock` and the `events` of a Run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order = itertools.count()
        self.due: list[tuple[float, int, Callable[..., None], tuple]] = []
        self.events: deque[tuple] = deque()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.due, (self.now + seconds, next(self.order), action, arguments))

    def advance(self, until: float, until_event: bool = False) -> None:
        """Let everything happen that is due until then, or until the first event for the loop."""
        while self.due and self.due[0][0] <= until and not (until_event and self.events):
            self.now, _, action, arguments = heapq.heappop(self.due)
            action(*arguments)
        if not (until_event and self.events):
            self.now = until

    def get(self, timeout: float) -> tuple:
        self.advance(self.now + timeout, until_event=True)
        return self.get_nowait()

    def get_nowait(self) -> tuple:
        if not self.events:
            raise Empty
        return self.events.popleft()


class SimulatedWorker:
    """A worker that takes 1 / `speed` seconds for an image, and dies, hangs or runs out of memory at random.

    `mishap(random)` is called once per chunk and returns None, "dies", "hangs" or "memory". `delay` is the time for
    sending a chunk and its results. After a restart it needs `restart` seconds until it works again.
    """

    can_restart, machine = True, None

    def __init__(
        self,
        name: str,
        time: Time,
        speed: float = 1.0,
        seed: int = 0,
        depth: int = 2,
        delay: float = 0.0,
        jitter: float = 0.0,
        restart: float = 60.0,
        mishap: Callable[[random.Random], str | None] = lambda source: None,
    ) -> None:
        self.name, self.time, self.speed, self.depth, self.delay, self.jitter = name, time, speed, depth, delay, jitter
        self.seconds_to_restart, self.mishap, self.random = restart, mishap, random.Random(seed)
        self.birth = 1
        self.inbox: deque[tuple] = deque()
        # Since when it lives, and the seconds of its earlier lives.
        self.since: float | None = 0.0
        self.lived = 0.0
        self.mishaps: list[str] = []
        # What it did: from, to, how it ended.
        self.busy: list[tuple[float, float, str]] = []

    def attach(self, events: Time) -> None:
        pass

    def send(self, name: str, run: int, task: int, *arguments: Any) -> None:
        self.inbox.append((name, run, task, *arguments))
        if len(self.inbox) == 1:
            self.begin(self.delay)

    def post(self, birth: int, run: int, *event: Any) -> None:
        self.time.events.append((self, birth, run, *event))

    def begin(self, delay: float) -> None:
        """Do the first task of the inbox. The next ones are there already, and have no delay."""
        name, run, task, *arguments = self.inbox[0]
        if name != "generate":
            # After a restart it begins when it lives again.
            restarts = self.seconds_to_restart if name == "begin" and self.birth > 1 else 0.0
            self.time.after(restarts, self.end, self.birth, (("done", task, restarts, None),))
            return
        images, start = arguments[0], self.time.now + delay
        seconds = len(images) / self.speed * self.random.lognormvariate(0, self.jitter)
        mishap = self.mishap(self.random)
        if mishap:
            self.mishaps.append(mishap)
            seconds *= self.random.random()
        self.busy.append((start, start + seconds, mishap or "drawn"))
        events: Sequence[tuple] = [*(("image", image[0], image[0]) for image in images), ("done", task, seconds, None)]
        if mishap == "memory":
            events = [("failed", task, "memory", "out of memory", "OutOfMemoryError")]
        if mishap == "dies":
            events = [("lost", "it died")]
        if mishap != "hangs":
            self.time.after(seconds + delay, self.end, self.birth, events)

    def end(self, birth: int, events: Sequence[tuple]) -> None:
        if birth != self.birth:
            return
        run = self.inbox[0][1]
        if self.since is None:
            self.since = self.time.now
        if events[0][0] == "lost":
            self.stop_living()
        else:
            self.inbox.popleft()
        for event in events:
            self.post(birth, run, *event)
        if self.inbox and self.since is not None:
            self.begin(0.0)

    def stop_living(self) -> None:
        if self.since is not None:
            self.lived, self.since = self.lived + self.time.now - self.since, None

    def restart(self) -> None:
        self.stop_living()
        self.birth += 1
        self.inbox.clear()

    def cancel(self, run: int) -> None:
        pass

    def leave(self) -> None:
        pass

    def capacity(self) -> float:
        """Return the images that it could have generated until now while it lived."""
        return self.speed * (self.lived + (self.time.now - self.since if self.since is not None else 0.0))


def run_of(chunks: Sequence[Chunk], time: Time, workers: Sequence[Any], limits: Limits = LIMITS, **options: Any) -> Run:
    """Return a run of simulated workers, whose images have one prompt that is encoded already."""
    texts = {0: (), None: ()}
    return Run({}, chunks, workers, [0], texts, limits=limits, events=time, clock=WatchClock(time), **options)
