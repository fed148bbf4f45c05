"""A worker of a batch, its tasks and its events.

A worker is a thread, a process or an actor, see `Worker`. Its events are the only way back, all in one queue:

    (worker, birth, run, name, ...)     `birth` counts how often the worker was started, `run` is the number of the run
    begun                               it has ended the last run, and looks at the job
    loading                             it reads the models within another task
    alive                               it still works on a task
    text, prompt, embedding             an encoded prompt; None is the negative prompt
    step, number, sigma, latents, images
    graphs, counts                      how many steps of a chunk were recorded and replayed, see StepGraph
    image, number, content              a finished image, or {"failed": reason}
    done, task, seconds, result         it has finished a task
    failed, task, kind, text, error     a task failed; kind is memory, driver, refused (it cannot do this job) or error
    lost, reason                        its process has ended
    log, level, text                    a warning of another process
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from .. import errors
from ..batch.plan import Chunk
from ..errors import SanaError


class Worker(Protocol):
    name: str
    # How often it was started. Events of an earlier birth are old, except images.
    birth: int
    # How many tasks it may have at once.
    depth: int
    # Whether it can be killed and started again.
    can_restart: bool
    # Workers with the same machine load one after another, so that its RAM has one copy of the weights. None: at once.
    machine: str | None

    def attach(self, events: SimpleQueue[tuple]) -> None:
        """Send the events to `events` from now on, and start the worker unless it runs."""

    def send(self, name: str, run: int, task: int, *arguments: Any) -> None:
        """Let it do a task after those that it has. Never waits, and never raises: failures are events."""

    def cancel(self, run: int) -> None:
        """End the tasks of this run and of earlier ones soon."""

    def restart(self) -> None:
        """Kill it, and start it again. Only called if `can_restart`."""

    def leave(self) -> None:
        """The run has ended. Waits until the worker has ended its task, if it is a thread of this process."""


@dataclass(eq=False)
class Task:
    """begin: look at the job. load: load its models. encode: encode prompts. generate: generate images."""

    name: str
    images: Chunk = ()
    prompts: tuple[str, ...] = ()
    # Workers that failed with these images for an unknown reason, or were lost with them.
    avoid: frozenset[Any] = frozenset()
    number: int = field(default_factory=itertools.count(1).__next__)
    # When a worker got it, or had finished the tasks before it.
    started: float = 0.0


@dataclass(eq=False)
class Seat:
    """A worker in a run."""

    worker: Worker
    # starting, ready, hanging (a thread that may answer later) or out
    state: str = "starting"
    tasks: list[Task] = field(default_factory=list)
    # When it last sent an event, or got a task while it had none.
    heard: float = 0.0
    # Its longest silence within a task of this run, in seconds.
    silence: float = 0.0
    # Whether it has finished a chunk since it was started.
    experienced: bool = False
    # Whether it loads models now, for whichever task.
    is_loading: bool = False
    # Whether it lacks weights that differ from the file, and whether its models are loaded.
    lacks_weights: bool = False
    loaded: bool = False
    has_negative: bool = False
    # The most images at once that fit into its memory. None: no limit.
    limit: int | None = None
    # Losses, and failures with a single image, since its last image.
    strikes: int = 0
    # Finished images, the seconds for their chunks, and the most images at once.
    images: int = 0
    seconds: float = 0.0
    together: int = 0

    @property
    def pace(self) -> float | None:
        """Seconds per image."""
        return self.seconds / self.images if self.images else None


def rebuild(kind: str, text: str, name: str) -> BaseException:
    """Return the error of another process from the name of its class, which may be one of errors.py, and its text."""
    if kind == "memory":
        return torch.OutOfMemoryError(text)
    error_class = getattr(errors, name, None)
    if isinstance(error_class, type) and issubclass(error_class, SanaError):
        return error_class(text)
    return RuntimeError(text)
