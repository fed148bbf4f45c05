"""A clock for timeouts that counts only the time in which this process was looking."""

from __future__ import annotations

import time

# Seconds between two readings of the clock that count at most.
LONGEST_GAP = 1.0


class WatchClock:
    """Seconds that this process has spent watching. Call it to read it, at least twice a second.

    A process that does not look cannot know how long another one has been silent. It may be stopped, its machine may be
    overloaded, or the consumer of its results may wait for a slow disk. Between two readings at most a second counts.
    A timeout therefore needs many looks that all found nothing.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.last = time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self.last, LONGEST_GAP)
        self.last = now
        return self.seconds
