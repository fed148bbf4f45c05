"""How long the devices that generate images may be silent, and a clock that counts only the time of looking."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Limits(NamedTuple):
    """How many seconds a worker of a batch, or the devices that share an image, may be silent before they count as
    hanging."""

    # While its process starts, or while it ends the last run.
    starting: float = 300.0
    # While it loads or encodes. It may read from a slow disk.
    loading: float = 1800.0
    # In its first chunk of a run, or in the first step of a shared image, which may compile kernels.
    first: float = 600.0
    # At least, in later chunks and steps.
    grace: float = 60.0
    # In later chunks and steps, as a multiple of its longest silence before.
    patience: float = 10.0
    # While it loads, before another worker of the same machine may load too.
    turn: float = 60.0
    # After a cancel, until the threads of this process have ended their work.
    ending: float = 30.0

    def compiled(self) -> Limits:
        """Return the limits for torch.compile, which may compile again for a chunk of another size."""
        return self._replace(first=10 * self.first, grace=10 * self.grace)

    def later(self, longest_silence: float) -> float:
        """Return the limit for later chunks and steps, after this longest silence in seconds."""
        return max(self.grace, self.patience * longest_silence)


LIMITS = Limits()


# Of the time between two readings, at most this many seconds count.
LONGEST_GAP = 1.0


class WatchClock:
    """Seconds in which this process has watched others. Call the clock at least twice a second to read it.

    A process that does not look cannot know how long another process has been silent. It may be stopped, its machine
    may be overloaded, or the consumer of its results may wait for a slow disk. So a long gap between two readings
    counts as one second, and a timeout needs many readings.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock, self.seconds = clock or time.monotonic, 0.0
        self.last = self.clock()

    def __call__(self) -> float:
        now = self.clock()
        self.seconds += min(now - self.last, LONGEST_GAP)
        self.last = now
        return self.seconds
