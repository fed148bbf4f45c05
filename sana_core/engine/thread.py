"""The worker of this process: one thread, for a single device, or for a MODEL that no other process can load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from ..runtime.accelerator import release_memory_of
from ..runtime.limits import LIMITS
from .body import Body, describe_failure
from .child import TaskRunner


class ThreadWorker:
    """A thread with a device. `make_body(device, post, poll)` returns the object that works: Body, or the host's."""

    depth = 2
    # A thread cannot be killed.
    can_restart = False
    machine = None
    birth = 1

    def __init__(self, name: str, device: torch.device, make_body: Callable[..., Any] = Body) -> None:
        self.name, self.device, self.make_body = name, device, make_body
        self.tasks: SimpleQueue[tuple | None] = SimpleQueue()
        # Runs up to this number are cancelled.
        self.cancelled = 0
        self.thread: threading.Thread | None = None

    def attach(self, events: SimpleQueue[tuple]) -> None:
        self.events = events
        self.thread = threading.Thread(target=self.work, name=f"sana {self.name}", daemon=True)
        self.thread.start()

    def work(self) -> None:
        def post(name: str, *values: Any) -> None:
            if name == "image" and callable(values[1]):
                values = values[0], values[1]()
            self.events.put((self, self.birth, runner.run, name, *values))

        def describe(error: BaseException) -> tuple[str, str, BaseException]:
            kind, text, _ = describe_failure(error)
            if kind in ("memory", "driver"):
                release_memory_of(error, self.device)
            return kind, text, error

        make_body = partial(self.make_body, str(self.device))
        runner = TaskRunner(make_body, post, lambda run: run <= self.cancelled, describe)
        try:
            while (message := self.tasks.get()) is not None:
                runner.do(*message)
                # Embeddings must not stay in memory until the next task.
                message = None
        finally:
            # The body refers to the runner. They would keep each other, and the models, alive until Python's collector
            # runs.
            del runner.body, runner.make_body

    def send(self, *message: Any) -> None:
        self.tasks.put(message)

    def cancel(self, run: int) -> None:
        """End the run, within a step, and then the thread."""
        self.cancelled = run
        self.tasks.put(None)

    def leave(self) -> None:
        if self.thread is not None:
            self.thread.join(LIMITS.ending)
