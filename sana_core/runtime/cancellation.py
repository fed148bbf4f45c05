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
