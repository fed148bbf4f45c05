"""Cancellation: long work polls a callback, which raises to end it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Poll = Callable[[], None]


def no_poll() -> None:
    """No-op default: nothing is cancelled."""


class Polled(TorchFunctionMode):
    """A context in which `poll` is called before each of torch's functions that this thread calls: for forwards of the
    library, which know of no cancelling."""

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
        # how a no_grad ends: the poll would raise between it and the mode that it restores
        if function is not torch._C._set_grad_enabled:
            self.poll()
        return function(*args, **(kwargs or {}))


@contextmanager
def noting_interrupts() -> Iterator[Poll]:
    """A context that gives a poll, which raises KeyboardInterrupt after a Ctrl+C that was swallowed: Python ignores
    what it raises in a callback of a library, or where an object is deleted. In the main thread alone.
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
