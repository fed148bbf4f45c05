"""Runs work in a thread that may hang, so that the caller can always cancel.

The timeouts and intervals of a run on a cluster are in seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from queue import Empty, Full, Queue
from typing import Any, TypeVar

from ..runtime.cancellation import Poll
from ..runtime.limits import WatchClock

# Connecting a driver to the head, which may be busy. If there is no head, Ray itself would try for longer.
CONNECT_TIMEOUT = 40.0
# Connecting Ray Client. The head starts a process for the client, slowly if it is busy. If there is no head, Ray gives
# up after 30 s.
CLIENT_TIMEOUT = 120.0
# A call of Ray. No call takes this long while the head is alive. Ray itself gives up after 90 s.
CALL_TIMEOUT = 40.0
# The first call on a connection that was idle.
PROBE_TIMEOUT = 5.0
# How long a server keeps idle actors after a run. They keep their GPUs and their loaded models.
ACTOR_IDLE_TIMEOUT = 300.0
# How long a run waits for a GPU: longer than idle actors of another run keep it.
GPU_TIMEOUT = 2 * ACTOR_IDLE_TIMEOUT
# How long Ray may take to place an actor on a machine, before another machine is requested too.
PLACEMENT_TIMEOUT = 10.0
# How long an actor may be silent before it counts as hung, when it is ready and while it loads from a slow disk.
ACTOR_TIMEOUT, LOADING_TIMEOUT = 30.0, 300.0
# The time between two calls of a poll, and between two checks of the machines and actors.
POLL_INTERVAL, HEALTH_CHECK_INTERVAL = 0.5, 3.0

T = TypeVar("T")
# Results that wait for the caller. Then the work pauses, so that a slow disk of the caller bounds the memory.
BACKLOG = 32


class Abandoned(Exception):
    """The caller does not wait for the work any more."""


class LostError(TimeoutError):
    """The work has not responded for too long, or its connection is lost."""


def iterate_in_thread(
    work: Callable[[Poll], Generator[T, None, None]], poll: Poll, timeout: float
) -> Generator[T, None, None]:
    """Run the generator `work(alive)` in a thread, and yield its results.

    The generator must call `alive` often. `alive` raises Abandoned when the caller does not wait any more. `poll` is
    called twice a second in this thread, and cancels by raising. Raises the errors of the generator, and LostError if
    `alive` is not called for `timeout` seconds. Time in which the caller does not wait for a result, or in which this
    process is stopped, does not count.
    """
    results: Queue[tuple[Any, BaseException | None]] = Queue(BACKLOG)
    abandoned = threading.Event()
    called = threading.Event()

    def alive() -> None:
        called.set()
        if abandoned.is_set():
            raise Abandoned

    def put(result: Any, error: BaseException | None = None) -> None:
        while True:
            try:
                results.put((result, error), timeout=POLL_INTERVAL)
                return
            except Full:
                alive()

    def run() -> None:
        ending: BaseException = StopIteration()
        try:
            with closing(work(alive)) as generated:
                for result in generated:
                    put(result)
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
                result, error = results.get(timeout=POLL_INTERVAL)
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
            yield result
    finally:
        abandoned.set()


def call_in_thread(work: Callable[[], T], undo: Callable[[T], object], poll: Poll, timeout: float) -> T:
    """Return the result of `work`, which runs in a thread, because calls of Ray may wait for minutes.

    `poll` cancels by raising. Raises the error of `work`, and LostError after `timeout` seconds. If the result arrives
    when nobody waits any more, it is passed to `undo`.
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
