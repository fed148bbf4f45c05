"""The status of a run: how many images are finished, how fast, and by which workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

OnStatus = Callable[[str], None]


def no_status(text: str) -> None:
    """No-op default: no status is shown."""


@dataclass
class WorkerReport:
    """The workers of a run. The fields are live views, which change while the run continues."""

    # Worker name: how many images it has generated.
    finished: Mapping[str, int] = field(default_factory=dict)
    # How many steps were recorded as a CUDA graph, and replayed, see StepGraph.
    steps: Mapping[str, int] = field(default_factory=dict)
    # The names of the workers that generate now.
    ready: Collection[str] = ()
    # Cluster only. Worker name: its machine.
    machines: Mapping[str, str] = field(default_factory=dict)
    # Cluster only. Machine that was left out: the reason.
    refused: Mapping[str, Exception] = field(default_factory=dict)


class Progress:
    """Counts finished images and measures their rate. `done` of the `total` images exist before the run."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done, self.done_before = total, done, done
        # When the first image of this run was finished.
        self.first_time = 0.0

    def step(self) -> None:
        """Count an image."""
        self.done += 1
        if self.done == self.done_before + 1:
            self.first_time = time.monotonic()

    def describe(self, workers: int) -> str:
        """Return a text like "3 of 8, 1.20 a second, 4 s left, 2 workers".

        The rate is measured from the first image on, because loading takes long. So the text has no rate before the
        second image.
        """
        parts = [f"{self.done} of {self.total}"]
        images, seconds = self.done - self.done_before - 1, time.monotonic() - self.first_time
        if images > 0 and seconds > 0:
            rate = images / seconds
            parts.append(f"{rate:.2f} a second")
            if self.done < self.total:
                parts.append(f"{in_words((self.total - self.done) / rate)} left")
        return ", ".join([*parts, counted(workers, "worker")])


def in_words(seconds: float) -> str:
    """Return a text like "42 s", "12 min" or "3 h 20 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def counted(number: int, thing: str) -> str:
    """Return a text like "1 machine" or "2 machines"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
