"""Work in a thread of its own, whose calls may not return: the caller polls for its results, and can always cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from queue import Empty, Full, Queue
from typing import Any, TypeVar

from ..runtime.cancellation import Poll
from .clock import WatchClock
from .timeouts import POLL_INTERVAL

T = TypeVar("T")
# Results that wait for the caller. Then the work pauses, so that a slow disk of the caller bounds the memory.
BACKLOG = 32


class Abandoned(Exception):
    """The caller has cancelled, or given up."""


class LostError(TimeoutError):
    """The work has given no sign of life for too long, or its connection is lost."""


def iterate_in_thread(
    work: Callable[[Poll], Generator[T, None, None]], poll: Poll, timeout: float
) -> Generator[T, None, None]:
    """Yield what the generator `work(alive)` yields, which runs in a thread.

    It must call `alive` often, which raises Abandoned once nobody waits. `poll`, called twice a second here, cancels by
    raising. Raises what the generator does, and LostError when `alive` is not called for `timeout` seconds. Time in
    which the caller does not wait for a result, or in which this process is stopped, does not count.
    """
    results: Queue[tuple[Any, BaseException | None]] = Queue(BACKLOG)
    abandoned = threading.Event()
    called = threading.Event()

    def alive() -> None:
        called.set()
        if abandoned.is_set():
            raise Abandoned

    def put(found: Any, error: BaseException | None = None) -> None:
        while True:
            try:
                results.put((found, error), timeout=POLL_INTERVAL)
                return
            except Full:
                alive()

    def run() -> None:
        ending: BaseException = StopIteration()
        try:
            with closing(work(alive)) as found:
                for each in found:
                    put(each)
        except BaseException as error:
            ending = error
        with suppress(Abandoned):
            put(None, ending)

    threading.Thread(target=run, name="sana cluster", daemon=True).start()
    clock = WatchClock()
    last_alive = clock()
    try:
        while True:
            poll()
            try:
                found, error = results.get(timeout=POLL_INTERVAL)
            except Empty:
                if called.is_set():
                    called.clear()
                    last_alive = clock()
                elif clock() - last_alive > timeout:
                    raise LostError(f"no answer for {timeout:.0f} s") from None
                continue
            last_alive = clock()
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
