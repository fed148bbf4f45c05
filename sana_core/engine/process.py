"""Workers that are processes of this machine, one for each device. They stay warm between runs."""

from __future__ import annotations

import atexit
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from ..runtime.text import brief

PACKAGE = Path(__file__).parents[1]
# Seconds that killed processes may take to end.
END_TIMEOUT = 5.0


class ProcessWorker:
    """A process with a device. It outlives runs, and is started again when it was lost."""

    # The next chunk is there before the results of the last one have arrived.
    depth = 2
    can_restart = True
    machine = "this machine"

    def __init__(self, name: str, device: torch.device, threads: int) -> None:
        self.name, self.device, self.threads = name, device, threads
        self.events: SimpleQueue[tuple] = SimpleQueue()
        self.process: Any = None
        # Whether the process was killed. It may take long to end.
        self.is_killed = False
        # Messages to the process. None ends the thread that sends them.
        self.outbox: SimpleQueue[tuple | None] = SimpleQueue()
        self.birth = 0

    def attach(self, events: SimpleQueue[tuple]) -> None:
        self.events = events
        if self.process is None or self.is_killed or not self.process.is_alive():
            self.start()

    def start(self) -> None:
        self.birth += 1
        # It is set last. A Ctrl+C may end this function in any line, and the next run starts another process then.
        self.process = None
        self.outbox.put(None)
        self.outbox = SimpleQueue()
        context = get_context("spawn")
        try:
            connection, other_end = context.Pipe()
            values = {
                "connection": other_end,
                "device": str(self.device),
                "folder": str(PACKAGE),
                "threads": self.threads,
            }
            # A function of the standard library, because no process could import a class or function of this package
            # by its name inside ComfyUI.
            process = context.Process(
                target=runpy.run_path,
                args=(str(Path(__file__).with_name("child.py")), values, "sana_worker"),
                name=f"sana {self.name}",
                daemon=True,
            )
            with other_end, hidden_main(), without_interrupts():
                process.start()
            for work, *arguments in (
                (self.listen, connection, process, self.birth),
                (self.speak, connection, self.outbox),
            ):
                threading.Thread(target=work, args=arguments, name=f"sana process {self.name}", daemon=True).start()
        except Exception as error:
            # For example, too many processes or open files, or this process is itself a daemon of multiprocessing.
            self.events.put((self, self.birth, 0, "lost", f"its process cannot start ({brief(error)})"))
            return
        self.process, self.is_killed = process, False

    def listen(self, connection: Any, process: Any, birth: int) -> None:
        reason = ""
        try:
            while True:
                # First the event, then the queue: the next run has another queue.
                event = connection.recv()
                if event[1] == "lost":
                    reason = event[2]
                else:
                    self.events.put((self, birth, *event))
        except Exception:
            # The pipe is closed, or a killed process has left half an event in it.
            process.join(END_TIMEOUT)
            reason = reason or f"its process has ended with {process.exitcode}"
            self.events.put((self, birth, 0, "lost", reason))

    def speak(self, connection: Any, outbox: SimpleQueue[tuple | None]) -> None:
        """Send the messages to a process. Weights and embeddings may wait for it, which the loop must not."""
        with suppress(OSError):
            while (message := outbox.get()) is not None:
                connection.send(message)
                # Weights must not stay in memory until the next message.
                message = None

    def send(self, *message: Any) -> None:
        self.outbox.put(message)

    def cancel(self, run: int) -> None:
        self.send("cancel", run)

    def restart(self) -> None:
        self.kill()
        self.start()

    def kill(self) -> None:
        """Kill the process, without waiting: the driver may take seconds to free its memory, or never do so.

        A stopped process could not end in another way.
        """
        if self.process is not None:
            self.process.kill()
            self.is_killed = True

    def leave(self) -> None:
        """Let it release its models if no other run begins soon. It may end its task while the next run begins."""
        self.send("leave")


class Processes:
    """The worker processes of this program. A run borrows those that it needs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.workers: list[ProcessWorker] = []
        # Workers that no run uses now.
        self.idle: list[ProcessWorker] = []
        # multiprocessing would wait for ever for a stopped process.
        atexit.register(self.end)

    @contextmanager
    def borrow(self, devices: Sequence[torch.device], first: int = 0) -> Iterator[list[ProcessWorker]]:
        """A context with a worker for each device, which may be among `devices` more than once.

        The caller has workers for the devices before number `first`.
        """
        borrowed: list[ProcessWorker] = []
        with self.lock:
            for number, device in list(enumerate(devices))[first:]:
                repetition = devices[:number].count(device)
                name = f"{device}" if not repetition else f"{device} #{repetition + 1}"
                # The processes of a CPU share its cores.
                threads = max(1, torch.get_num_threads() // devices.count(device)) if device.type == "cpu" else 0
                suitable = (idle for idle in self.idle if (idle.name, idle.threads) == (name, threads))
                worker = next(suitable, None)
                if worker is None:
                    worker = ProcessWorker(name, device, threads)
                    self.workers.append(worker)
                else:
                    self.idle.remove(worker)
                borrowed.append(worker)
        try:
            yield borrowed
        finally:
            with self.lock:
                self.idle += borrowed

    def end(self) -> None:
        """Kill all processes, and wait until they have ended."""
        for worker in self.workers:
            worker.kill()
        end = time.monotonic() + END_TIMEOUT
        for worker in self.workers:
            if worker.process is not None:
                worker.process.join(max(0.0, end - time.monotonic()))


def kill_left_out(worker: Any, error: BaseException) -> None:
    """Kill the process of a worker that is left out of a run. If it hangs, the next run would wait for it."""
    if isinstance(worker, ProcessWorker):
        worker.kill()


@cache
def processes() -> Processes:
    return Processes()


@cache
def main_lock() -> threading.Lock:
    return threading.Lock()


@contextmanager
def hidden_main() -> Iterator[None]:
    """A context in which a new process does not run this program's main module again, as multiprocessing would.

    ComfyUI's main.py would start a second server, and a script without a main guard would start its work again.
    """
    with main_lock():
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextmanager
def without_interrupts() -> Iterator[None]:
    """A context in which a new process ignores Ctrl+C until it sets a handler. Windows has no such masks."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Its own start would allow interrupts again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
