"""The main function of a worker process. `runpy.run_path` runs this file with its arguments as globals.

It is run by its path, because inside ComfyUI the package has no name that another process could import. It imports the
package only in `work`, so that it reports an import that fails.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
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
    """The parent has cancelled the run. No Exception, because loading turns exceptions into errors of files."""


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
        # The present task and its run. Runs up to `cancelled` are cancelled.
        self.task = self.run = self.cancelled = 0
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

    def post(self, *event: Any) -> None:
        self.outbox.put((self.run, self.task, *event))

    def poll(self) -> None:
        if self.run <= self.cancelled:
            raise Cancelled

    def end(self, code: int) -> None:
        self.outbox.put(None)
        self.speaker.join(FLUSH)
        _exit(code)

    def work(self, device: str, folder: str, threads: int) -> None:
        import_package(folder)
        module = import_module("sana_core.engine.body")
        self.describe_failure = module.describe_failure
        module.prepare_process(threads, self.post)
        body = module.Body(device, self.post, self.poll)
        idle = 0.0
        while True:
            try:
                name, self.run, self.task, *arguments = self.tasks.get(timeout=IDLE)
            except Empty:
                if self.is_in_run and self.run > self.cancelled:
                    # The next chunk needs the models, and weights that the parent sends once in a run.
                    continue
                body.release()
                idle += IDLE
                if idle >= LONG_IDLE:
                    self.end(0)
                continue
            started, failed, idle = time.monotonic(), None, 0.0
            try:
                self.poll()
                if name == "begin":
                    self.post("begun")
                result = getattr(body, name)(*arguments)
                if self.task:
                    self.post("done", self.task, time.monotonic() - started, result)
            except Cancelled:
                pass
            except Exception as error:
                failed = error
            # Embeddings and weights must not stay in memory until the next task.
            arguments = []
            if failed is not None:
                self.post("failed", self.task, *self.describe_failure(failed))
                module.release_memory_of(failed, body.device)


def main(connection: Any, device: str, folder: str, threads: int) -> None:
    # Ctrl+C reaches all processes of a terminal. The parent alone ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = Child(connection)
    try:
        child.work(device, folder, threads)
    except BaseException as error:
        child.post("lost", f"{type(error).__name__}: {error}")
        child.end(1)


if __name__ == "sana_worker":
    main(*(globals()[name] for name in ("connection", "device", "folder", "threads")))
