"""A clock for timeouts that counts only the time in which this process was looking."""

from __future__ import annotations

import time
from collections.abc import Callable

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
