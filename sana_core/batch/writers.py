"""Threads that encode images as PNG files and write them, while the devices generate the next images."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from os import cpu_count
from typing import Generic, TypeVar

from ..runtime.cancellation import Poll

T = TypeVar("T")
# More threads would not help: four devices at 10 images per second each need 2 cores for the PNG files of 1024 px.
LARGEST_THREADS = 8
# Images per thread that may wait or be written at once. If there are more, the batch waits for the disk, because the
# images are in memory until then.
BACKLOG = 2
POLL_INTERVAL = 0.2


def default_threads() -> int:
    """Return the number of threads. There are at least two, because a thread may wait for a slow disk."""
    return max(2, min(LARGEST_THREADS, (cpu_count() or 1) // 2))


class Writers(Generic[T]):
    """Calls `write` for each item, in threads.

    An error of `write` is raised by the next call of `put` or `finish`. Leaving the context waits for the items that
    are being written, so that no file is incomplete. If another exception ends the context, the waiting items are
    written too. After an error of `write`, such as a full disk, and after Ctrl+C they are dropped.
    """

    def __init__(self, write: Callable[[T], None], threads: int) -> None:
        self.write, self.capacity = write, BACKLOG * threads
        self.executor = ThreadPoolExecutor(threads, "sana writer")
        self.pending: set[Future[None]] = set()
        # Whether an error of `write` was raised.
        self.failed = False

    def __enter__(self) -> Writers[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.executor.shutdown(wait=True, cancel_futures=self.failed or not isinstance(error, Exception))

    def put(self, item: T, poll: Poll) -> None:
        """Write `item` soon. Waits while too many items are pending."""
        self.wait_for(self.capacity - 1, poll)
        self.pending.add(self.executor.submit(self.write, item))

    def finish(self, poll: Poll) -> None:
        """Wait until all items are written."""
        self.wait_for(0, poll)

    def wait_for(self, allowed: int, poll: Poll) -> None:
        """Wait until at most `allowed` items are pending."""
        while True:
            finished = {future for future in self.pending if future.done()}
            self.pending -= finished
            for future in finished:
                self.failed |= future.exception() is not None
                future.result()
            if len(self.pending) <= allowed:
                return
            wait(self.pending, POLL_INTERVAL, FIRST_COMPLETED)
            poll()
