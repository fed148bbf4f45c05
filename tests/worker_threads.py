"""Threads in place of the worker processes of a batch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from importlib import import_module
from typing import Any
from unittest import mock

import torch

# The module of this name has the class that lends processes. Inside ComfyUI it has the name of the pack before it.
MODULE = "sana_core.engine.process"
# In a thread in place of a process: the name of the worker. Other threads are of one process, the empty name.
PROCESS: ContextVar[str] = ContextVar("PROCESS", default="")


@contextlib.contextmanager
def threads_for_processes() -> Iterator[None]:
    """A context in which each of several devices works in a thread of this process, with the same loop and body.

    Another process would have neither pretended GPUs nor functions that a test has replaced. A thread cannot be started
    again: after an error of the driver it is left out, and if it hangs it gets nothing until it responds.
    """
    with contextlib.ExitStack() as stack:
        for name in [name for name in sys.modules if name == MODULE or name.endswith(f".{MODULE}")]:
            make_worker = in_place_of_process(import_module(name.removesuffix("process") + "local").ThreadWorker)
            borrow = contextlib.contextmanager(
                lambda self, devices, first=0, make=make_worker: lend(make, devices, first)
            )
            stack.enter_context(mock.patch.object(sys.modules[name].Processes, "borrow", borrow))
        yield


def in_place_of_process(thread_worker: Any) -> Any:
    """Return a class of workers whose threads know that they are in place of a process."""

    class Worker(thread_worker):
        def work(self) -> None:
            PROCESS.set(self.name)
            super().work()

    return Worker


def lend(make_worker: Any, devices: Sequence[torch.device], first: int) -> Iterator[list[Any]]:
    """Yield a new worker for each device from number `first`, with the names of processes."""
    workers = []
    for number, device in list(enumerate(devices))[first:]:
        repetition = list(devices[:number]).count(device)
        name = f"{device}" if not repetition else f"{device} #{repetition + 1}"
        workers.append(make_worker(name, device))
    yield workers
