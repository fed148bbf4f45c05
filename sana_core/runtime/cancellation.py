"""Cancellation: long work polls a callback, which raises to end it. And how long devices may be silent."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

Poll = Callable[[], None]


def no_poll() -> None:
    """No-op default: nothing is cancelled."""


class Polled(TorchFunctionMode):
    """A context that calls `poll` before each torch function of this thread, to cancel forwards of diffusers."""

    def __init__(self, poll: Poll) -> None:
        super().__init__()
        self.poll = poll

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        # `no_grad` restores the previous mode with this function. An error of the poll would prevent that.
        if function is not torch._C._set_grad_enabled:
            self.poll()
        return function(*args, **(kwargs or {}))


@contextmanager
def noting_interrupts() -> Iterator[Poll]:
    """A context with a poll that raises KeyboardInterrupt after a Ctrl+C. Works only in the main thread.

    Python ignores a KeyboardInterrupt that it raises in a library's callback or while an object is deleted. The poll
    raises it again.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    def poll() -> None:
        if noted:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield poll
    finally:
        signal.signal(signal.SIGINT, before)


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
