"""Work in a thread of its own, whose calls may not return: the one who waits for it can always leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ..runtime.cancellation import Poll
from .timeouts import POLL_INTERVAL

T = TypeVar("T")


class Left(Exception):
    """Nobody waits for the work any more."""


class LostError(TimeoutError):
    """The work has not been heard of for too long, or says itself that it has lost its way."""


def work_apart(
    work: Callable[[Poll], Generator[T, None, None]], poll: Poll, silence: float
) -> Generator[T, None, None]:
    """Yield what the generator `work(beat)` yields, which runs in a thread.

    It must call `beat` often, which raises Left once nobody waits. `poll`, called twice a second here, cancels by
    raising. Raises what the generator does, and LostError when `beat` is not called for `silence` seconds.
    """
    results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    left = threading.Event()
    heard = [time.monotonic()]

    def beat() -> None:
        heard[0] = time.monotonic()
        if left.is_set():
            raise Left

    def run() -> None:
        try:
            with closing(work(beat)) as found:
                for each in found:
                    results.put((each, None))
        except BaseException as error:
            results.put((None, error))
        else:
            results.put((None, StopIteration()))

    threading.Thread(target=run, name="sana cluster", daemon=True).start()
    try:
        while True:
            poll()
            try:
                found, error = results.get(timeout=POLL_INTERVAL)
            except Empty:
                if time.monotonic() - heard[0] > silence:
                    raise LostError(f"no answer for {silence:.0f} s") from None
                continue
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield found
    finally:
        left.set()


def wait_for(work: Callable[[], T], undo: Callable[[T], object], poll: Poll, longest: float) -> T:
    """Return what `work` does, in a thread, since Ray itself waits for minutes, and cannot be interrupted.

    `poll` cancels by raising. Raises what `work` does, and LostError after `longest` seconds; a late result is undone.
    """

    def once(beat: Poll) -> Generator[T, None, None]:
        result = work()
        try:
            beat()
        except Left:
            undo(result)
            raise
        yield result

    return next(work_apart(once, poll, longest))
