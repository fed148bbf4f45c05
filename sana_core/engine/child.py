"""The tasks of a worker, and the main function of a worker process.

`runpy.run_path` runs this file with the arguments as globals. It is run by its path, because inside ComfyUI the package
has no name that another process could import. It imports the package only in `work`, so that it reports an import that
fails.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from os import _exit
from queue import Empty, SimpleQueue
from typing import Any

# Seconds without a run after which the models leave the device, and after which the process ends.
IDLE, LONG_IDLE = 60.0, 600.0
# Seconds that the last events may take to reach the parent.
FLUSH = 5.0


class Cancelled(BaseException):
    """The run was cancelled. No Exception, because loading turns exceptions into errors of files."""


class TaskRunner:
    """Does the tasks of a worker, and posts what comes of them. The same in a thread, a process and an actor.

    `make_body(post, poll)` is called with the first task, and returns the object that works, see body.py. `post`
    receives the events, see schedule.py. `is_cancelled(run)` is called by each poll. `describe(error)` returns the
    values of the event `failed`, and may free the memory that the error refers to.
    """

    def __init__(
        self,
        make_body: Callable[..., Any],
        post: Callable[..., object],
        is_cancelled: Callable[[int], bool],
        describe: Callable[[BaseException], Iterable[Any]],
    ) -> None:
        self.make_body, self.post, self.is_cancelled, self.describe = make_body, post, is_cancelled, describe
        self.body: Any = None
        # The present task and its run.
        self.run = self.task = 0

    def poll(self) -> None:
        if self.is_cancelled(self.run):
            raise Cancelled

    def do(self, name: str, run: int, task: int, *arguments: Any) -> None:
        self.run, self.task = run, task
        started, failed = time.monotonic(), None
        try:
            self.poll()
            if name == "begin":
                self.post("begun")
            if self.body is None:
                self.body = self.make_body(self.post, self.poll)
            result = getattr(self.body, name)(*arguments)
            if task:
                self.post("done", task, time.monotonic() - started, result)
        except Cancelled:
            pass
        except Exception as error:
            failed = error
        # Not inside of `except`, which would keep the error and the memory that it refers to.
        if failed is not None:
            self.post("failed", task, *self.describe(failed))
            failed = None


def import_package(folder: str) -> None:
    """Import the package in `folder` under its name, without a change of the import path.

    The folder above it has files with the names of modules of ComfyUI.
    """
    spec = spec_from_file_location("sana_core", f"{folder}/__init__.py", submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None
    sys.modules["sana_core"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["sana_core"])


class Child:
    """A worker process: a thread that listens, a thread that sends, and the main thread, which works."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.tasks: SimpleQueue[tuple] = SimpleQueue()
        self.outbox: SimpleQueue[tuple | None] = SimpleQueue()
        # Runs up to this number are cancelled.
        self.cancelled = 0
        # Whether the parent may send further tasks of the last run.
        self.is_in_run = False
        threading.Thread(target=self.listen, daemon=True).start()
        self.speaker = threading.Thread(target=self.speak, daemon=True)
        self.speaker.start()

    def listen(self) -> None:
        try:
            while True:
                message = self.connection.recv()
                if message[0] == "cancel":
                    self.cancelled = message[1]
                elif message[0] == "leave":
                    self.is_in_run = False
                else:
                    self.is_in_run = True
                    self.tasks.put(message)
        except (EOFError, OSError):
            # The parent has ended.
            _exit(1)

    def speak(self) -> None:
        """Send events from a thread: to encode an image as PNG takes as long as to generate it, to send it 0.3 s."""
        while (event := self.outbox.get()) is not None:
            run, task, name, *values = event
            try:
                if name == "image" and callable(values[1]):
                    # A function that encodes the image.
                    values[1] = values[1]()
            except Exception as error:
                name, values = "failed", [task, *self.describe_failure(error)]
            try:
                self.connection.send((run, name, *values))
            except Exception:
                # The parent has ended, or the memory for a copy of the event is missing.
                _exit(1)

    def end(self, code: int) -> None:
        self.outbox.put(None)
        self.speaker.join(FLUSH)
        _exit(code)

    def work(self, device: str, folder: str, threads: int) -> None:
        import_package(folder)
        module = import_module("sana_core.engine.body")
        self.describe_failure = module.describe_failure

        def post(*event: Any) -> None:
            self.outbox.put((runner.run, runner.task, *event))

        def describe(error: BaseException) -> Iterable[Any]:
            values = module.describe_failure(error)
            module.release_memory_of(error, body.device)
            return values

        runner = TaskRunner(lambda *_: body, post, lambda run: run <= self.cancelled, describe)
        module.prepare_process(threads, post)
        body = module.Body(device, post, runner.poll)
        idle = 0.0
        while True:
            try:
                # Embeddings and weights must not stay in memory until the next task, so they have no name here.
                runner.do(*self.tasks.get(timeout=IDLE))
                idle = 0.0
            except Empty:
                if self.is_in_run and runner.run > self.cancelled:
                    # The next chunk needs the models, and weights that the parent sends once in a run.
                    continue
                body.release()
                idle += IDLE
                if idle >= LONG_IDLE:
                    self.end(0)


def main(connection: Any, device: str, folder: str, threads: int) -> None:
    # Ctrl+C reaches all processes of a terminal. The parent alone ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = Child(connection)
    try:
        child.work(device, folder, threads)
    except BaseException as error:
        child.outbox.put((0, 0, "lost", f"{type(error).__name__}: {error}"))
        child.end(1)


if __name__ == "sana_worker":
    main(*(globals()[name] for name in ("connection", "device", "folder", "threads")))
