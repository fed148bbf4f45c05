"""The status of a run: how many images are there, how fast they come, and who makes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

OnStatus = Callable[[str], None]


def no_status(text: str) -> None:
    """No-op default: no status is shown."""


@dataclass
class WorkerReport:
    """Who makes the images of a run, live while it runs: how many each has made, who is ready now, on which machine
    each is, and why machines were left out."""

    finished: Mapping[str, int] = field(default_factory=dict)
    ready: Collection[str] = ()
    machines: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Exception] = field(default_factory=dict)


class Progress:
    """How many of `total` images are there, `done` of them from the beginning, and how fast they come."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done, self.before, self.first = total, done, done, 0.0

    def step(self) -> None:
        """Note an image."""
        self.done += 1
        if self.done == self.before + 1:
            self.first = time.monotonic()

    def describe(self, workers: int) -> str:
        """Return like "3 of 8, 1.20 a second, 4 s left, 2 workers"; rate and time from the second image on.

        Workers start one after another and load for long, so the rate is that since the first image.
        """
        parts = [f"{self.done} of {self.total}"]
        since, seconds = self.done - self.before - 1, time.monotonic() - self.first
        if since > 0 and seconds > 0:
            rate = since / seconds
            parts.append(f"{rate:.2f} a second")
            if self.done < self.total:
                parts.append(f"{in_words((self.total - self.done) / rate)} left")
        return ", ".join([*parts, counted(workers, "worker")])


def in_words(seconds: float) -> str:
    """Return like "42 s", "12 min" or "3 h 20 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def counted(number: int, thing: str) -> str:
    """Return like "1 machine" or "2 machines"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
