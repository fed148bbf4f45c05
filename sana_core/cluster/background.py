"""Work in a thread of its own, whose calls may not return: the caller polls for its results, and can always cancel."""

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


class Abandoned(Exception):
    """The caller has cancelled, or given up."""


class LostError(TimeoutError):
    """The work has given no sign of life for too long, or its connection is lost."""


def iterate_in_thread(
    work: Callable[[Poll], Generator[T, None, None]], poll: Poll, timeout: float
) -> Generator[T, None, None]:
    """Yield what the generator `work(alive)` yields, which runs in a thread.

    It must call `alive` often, which raises Abandoned once nobody waits. `poll`, called twice a second here, cancels by
    raising. Raises what the generator does, and LostError when `alive` is not called for `timeout` seconds.
    """
    results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    abandoned = threading.Event()
    last_alive = [time.monotonic()]

    def alive() -> None:
        last_alive[0] = time.monotonic()
        if abandoned.is_set():
            raise Abandoned

    def run() -> None:
        try:
            with closing(work(alive)) as found:
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
                if time.monotonic() - last_alive[0] > timeout:
                    raise LostError(f"no answer for {timeout:.0f} s") from None
                continue
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield found
    finally:
        abandoned.set()


def call_in_thread(work: Callable[[], T], undo: Callable[[T], object], poll: Poll, timeout: float) -> T:
    """Return what `work` does, in a thread, since Ray itself waits for minutes, and cannot be interrupted.

    `poll` cancels by raising. Raises what `work` does, and LostError after `timeout` seconds; a late result is undone.
    """

    def once(alive: Poll) -> Generator[T, None, None]:
        result = work()
        try:
            alive()
        except Abandoned:
            undo(result)
            raise
        yield result

    return next(iterate_in_thread(once, poll, timeout))
