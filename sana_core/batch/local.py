"""Batches on the devices of this machine: one thread per device, all in this process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import torch

from ..errors import first_line
from ..runtime.accelerator import is_driver_error, is_out_of_memory, release_memory_of
from ..runtime.cancellation import Poll, no_poll
from ..runtime.text import get_logger
from .loop import Outcome, Started
from .plan import Chunk, FailedImage

logger = get_logger(__name__)

R = TypeVar("R")
GenerateChunk = Callable[[Chunk], Sequence[R | FailedImage]]
# Called in the thread of a worker, with the worker's name and device: everything that a chunk needs before its time
# counts, such as loading models.
BeforeChunk = Callable[[str, torch.device, Chunk, Poll], None]
# Seconds between two looks at the workers, and between two polls while waiting.
POLL_INTERVAL = 0.2
# How many seconds close() waits for all threads together to notice the cancel.
JOIN_TIMEOUT = 30.0
# A worker that loads or encodes counts as hanging after this many seconds without a poll.
LOADING_PATIENCE = 1800.0


class Cancelled(BaseException):
    """The batch ended while a worker was busy. No Exception, because loading turns exceptions into errors of files."""


class LocalPool(Generic[R]):
    """One thread per device. `devices` may contain a device more than once.

    Each thread calls `prepare(device, poll)` once, one thread at a time. It returns the function that generates chunks
    on the device. `before_chunk` is called before each chunk. Both, and the returned function, must call their poll
    often. It raises once the batch has ended. `cancel` is called by the thread that waits for outcomes, and ends the
    wait by raising.

    A device that raises a driver error is left out. A device that hangs gets no more chunks until it responds again.
    """

    # While a result waits to be taken, the worker generates the next chunk.
    depth = 2
    reports_starts = True

    def __init__(
        self,
        devices: Sequence[torch.device],
        prepare: Callable[[torch.device, Poll], GenerateChunk[R]],
        cancel: Poll = no_poll,
        before_chunk: BeforeChunk | None = None,
    ) -> None:
        self.prepare, self.cancel, self.before_chunk = prepare, cancel, before_chunk
        self.events: SimpleQueue[Outcome[R] | Started] = SimpleQueue()
        self.prepare_lock = threading.Lock()
        self.cancelled = threading.Event()
        # Worker name: the chunks that it has not begun. None ends the thread.
        self.inboxes: dict[str, SimpleQueue[Chunk | None]] = {}
        # The same for workers that hang.
        self.hanging: dict[str, SimpleQueue[Chunk | None]] = {}
        self.threads: dict[str, threading.Thread] = {}
        # Worker name: when it last polled. Only workers that load or encode now: the queue judges generation, and an
        # idle worker does not poll.
        self.loading: dict[str, float] = {}
        self.reason: BaseException | None = None
        seen: Counter[torch.device] = Counter()
        for device in devices:
            seen[device] += 1
            name = f"{device}" if seen[device] == 1 else f"{device} #{seen[device]}"
            inbox = self.inboxes[name] = SimpleQueue()
            cores = max(1, torch.get_num_threads() // devices.count(device)) if device.type == "cpu" else None
            self.threads[name] = threading.Thread(
                target=self.work, args=(name, device, inbox, cores), name=f"sana batch {name}", daemon=True
            )
        for thread in self.threads.values():
            thread.start()

    def work(self, name: str, device: torch.device, inbox: SimpleQueue[Chunk | None], cores: int | None) -> None:
        """The work of one thread: prepare, then generate chunks until the inbox contains None."""
        chunk: Chunk = ()

        def poll() -> None:
            if self.cancelled.is_set():
                raise Cancelled
            if name in self.loading:
                self.loading[name] = time.monotonic()

        try:
            if cores is not None:
                torch.set_num_threads(cores)
            self.loading[name] = time.monotonic()
            with locked(self.prepare_lock, poll):
                generate = self.prepare(device, poll)
            self.loading.pop(name)
            # A worker that counted as hanging while it prepared responds again. It may have no chunk to report.
            self.events.put(Started(name, ()))
            while (next_chunk := inbox.get()) is not None:
                poll()
                if self.before_chunk is not None:
                    self.loading[name] = time.monotonic()
                    self.before_chunk(name, device, next_chunk, poll)
                    self.loading.pop(name)
                chunk = next_chunk
                self.events.put(Started(name, chunk))
                self.events.put(self.attempt(name, device, chunk, generate))
                chunk = ()
        except Cancelled:
            pass
        except BaseException as error:
            self.events.put(Outcome(name, chunk, error=error))
        finally:
            self.loading.pop(name, None)

    def attempt(self, name: str, device: torch.device, chunk: Chunk, generate: GenerateChunk[R]) -> Outcome[R]:
        """Generate `chunk`. Running out of memory becomes an outcome, other errors are raised."""
        started = time.monotonic()
        try:
            return Outcome(name, chunk, generate(chunk), seconds=time.monotonic() - started)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = error
        # Outside the handler, which would keep the tensors of the failed work alive.
        return Outcome(name, chunk, error=release_memory_of(failed, device))

    def workers(self) -> list[str]:
        if not self.inboxes and not self.hanging and self.reason is not None:
            reason, self.reason = self.reason, None
            try:
                raise reason
            finally:
                # The error refers to this frame. A reference back would keep the models of all frames alive until
                # Python's collector runs.
                del reason
        return list(self.inboxes)

    def submit(self, worker: str, chunk: Chunk) -> None:
        self.inboxes[worker].put(chunk)

    def wait(self) -> list[Outcome[R] | Started]:
        self.cancel()
        events: list[Outcome[R] | Started] = []
        try:
            events.append(self.events.get(timeout=POLL_INTERVAL))
            while True:
                events.append(self.events.get_nowait())
        except Empty:
            pass
        events = [event for event in events if self.accept(event)]
        now = time.monotonic()
        for worker, polled in list(self.loading.items()):
            if worker in self.inboxes and now - polled > LOADING_PATIENCE:
                self.drop(worker, TimeoutError(f"{worker}: it has not finished loading for {LOADING_PATIENCE:.0f} s"))
        return events

    def accept(self, event: Outcome[R] | Started) -> bool:
        """Return whether the loop should see an event. Handles devices that respond again, and devices that fail."""
        worker = event.worker
        if isinstance(event, Started) or event.error is None:
            if worker in self.hanging:
                logger.warning("batch: %s responds again", worker)
                self.inboxes[worker] = self.hanging.pop(worker)
            # A chunk that was finished late still counts.
            return True
        if worker in self.hanging:
            # Its chunk was requeued.
            if not is_out_of_memory(event.error) or not event.chunk:
                self.drop(worker, event.error)
            return False
        if worker not in self.inboxes:
            return False
        cannot_load = is_out_of_memory(event.error) and not event.chunk
        if cannot_load or is_driver_error(event.error):
            self.drop(worker, event.error)
            return False
        return True

    def drop(self, worker: str, reason: BaseException) -> None:
        """Stop using `worker`. If it hangs, it is used again when it responds."""
        if worker not in self.inboxes and worker not in self.hanging:
            # Both of its chunks have failed.
            return
        if isinstance(reason, TimeoutError):
            if worker in self.hanging:
                return
            inbox = self.hanging[worker] = self.inboxes.pop(worker)
            # The loop requeues all chunks of the worker, so it must not begin another one.
            while not inbox.empty():
                with suppress(Empty):
                    inbox.get_nowait()
            logger.warning("batch: %s gets no more images until it responds", worker)
            if not self.inboxes:
                logger.warning("batch: no other device is left, so the run waits for %s", ", ".join(self.hanging))
            return
        logger.error("batch: %s is left out: %s", worker, first_line(reason))
        self.reason = reason
        inbox = self.hanging.pop(worker) if worker in self.hanging else self.inboxes.pop(worker)
        inbox.put(None)
        self.threads.pop(worker)

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Stop all threads within a step. A thread that hangs is left alone."""
        self.cancelled.set()
        for inbox in [*self.inboxes.values(), *self.hanging.values()]:
            inbox.put(None)
        deadline = time.monotonic() + JOIN_TIMEOUT
        for worker, thread in self.threads.items():
            if worker not in self.hanging:
                thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def locked(lock: threading.Lock, poll: Poll) -> Iterator[None]:
    """Hold `lock`. The wait for it can be cancelled."""
    while not lock.acquire(timeout=POLL_INTERVAL):
        poll()
    try:
        poll()
        yield
    finally:
        lock.release()
