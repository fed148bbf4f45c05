"""The work of a batch that is left, which part of it a worker gets next, and the events of workers.

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
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

from ..batch.plan import Chunk, ImageSpec


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
        return self.seconds / self.images if self.images else None


# Prompts of the first block. Each further block is twice as large, up to the largest: a device loads the text encoder
# once for each block, and an embedding in float32 has up to 2.8 MB.
FIRST_BLOCK, LARGEST_BLOCK = 16, 512


class Schedule:
    """The chunks and prompts that no worker has, and the embeddings that images need.

    `seats` has the workers of the run, which change while it runs. `turn` is the limit of that name. `clock` gives the
    present time.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        prompts: Sequence[Any],
        texts: Mapping[Any, Any],
        seats: Mapping[Any, Seat],
        turn: float,
        clock: Callable[[], float],
    ) -> None:
        self.prompts, self.seats, self.turn, self.clock = prompts, seats, turn, clock
        self.waiting: deque[Task] = deque(Task("generate", chunk) for chunk in chunks)
        # Number: the image. Images that are not finished.
        self.missing: dict[int, ImageSpec] = {image.number: image for chunk in chunks for image in chunk}
        # Embeddings whose images are not all finished, and how many are not.
        self.texts = dict(texts)
        self.unfinished = Counter(prompts[image.prompt] for image in self.missing.values())
        # None is the negative prompt.
        self.unencoded = deque(prompt for prompt in (None, *self.unfinished) if prompt not in self.texts)
        self.block = FIRST_BLOCK

    def next_task(self, seat: Seat) -> Task | None:
        """Return the next block of prompts, the load of the models, the next chunk, or a copy of a late chunk."""
        # Images may have arrived late, or from a copy, while their chunk waits.
        unfinished = (task for task in self.waiting if any(image.number in self.missing for image in task.images))
        suitable = (task for task in unfinished if seat.worker not in task.avoid or not self.others(seat, task))
        task = next(suitable, None)
        if self.should_encode(task):
            size = min(self.block, len(self.unencoded))
            self.block = min(2 * self.block, LARGEST_BLOCK)
            return Task("encode", prompts=tuple(self.unencoded.popleft() for _ in range(size)))
        if not seat.loaded:
            return Task("load") if not seat.tasks and self.may_load(seat) else None
        if task is None:
            return None if seat.tasks else self.copy(seat)
        images = tuple(image for image in task.images if image.number in self.missing)
        if not self.are_encoded(images):
            return None
        self.waiting.remove(task)
        size = seat.limit or len(images)
        if images[size:]:
            self.waiting.appendleft(Task("generate", images[size:], avoid=task.avoid))
        return Task("generate", images[:size], avoid=task.avoid)

    def others(self, seat: Seat, task: Task) -> bool:
        """Whether another worker can do a task of `seat` and has not failed with it."""
        return any(
            other is not seat and other.state in ("starting", "ready") and other.worker not in task.avoid
            for other in self.seats.values()
        )

    def should_encode(self, task: Task | None) -> bool:
        """Whether to encode a block now: when prompts of the next chunk are missing, or soon will be."""
        if not self.unencoded or any(other.name == "encode" for seat in self.seats.values() for other in seat.tasks):
            return False
        if task is None or not self.are_encoded(task.images):
            return True
        # All workers would wait for the block at the same time, so it is encoded while half of the last one is left.
        ahead = sum(1 for prompt in self.texts if prompt is not None)
        return len(self.seats) > 1 and ahead <= self.block / 4

    def are_encoded(self, images: Sequence[ImageSpec]) -> bool:
        missing = (image for image in images if image.number in self.missing)
        return None in self.texts and all(self.prompts[image.prompt] in self.texts for image in missing)

    def may_load(self, seat: Seat) -> bool:
        """Whether no other worker of the machine is loading, or only one that has been silent for long."""
        now = self.clock()
        return seat.worker.machine is None or not any(
            other.worker.machine == seat.worker.machine and now - other.heard < self.turn
            for other in self.seats.values()
            if other is not seat and other.tasks and (other.is_loading or other.tasks[0].name == "load")
        )

    def copy(self, seat: Seat) -> Task | None:
        """Return a copy of the chunk with the latest expected end, among those that `seat` could finish earlier."""
        slowest = max((other.pace for other in self.seats.values() if other.pace is not None), default=None)
        if slowest is None:
            return None
        running = [task for other in self.seats.values() for task in other.tasks if task.name == "generate"]
        copies = Counter(image.number for task in running for image in task.images)
        latest, end = None, 0.0
        for other in self.seats.values():
            # Seconds until the other worker has finished a task and all tasks before it.
            seconds_left = 0.0
            for task in other.tasks:
                expected = (other.pace or slowest) * len(task.images)
                # A chunk that is overdue by t seconds is expected to take another t seconds.
                if task is other.tasks[0]:
                    seconds_left = abs(expected - (self.clock() - task.started))
                else:
                    seconds_left += expected
                images = tuple(image for image in task.images if image.number in self.missing)[: seat.limit]
                if not images or any(copies[image.number] > 1 for image in images) or seat.worker in task.avoid:
                    continue
                if seconds_left > max(end, (seat.pace or slowest) * len(images)):
                    latest, end = Task("generate", images, avoid=task.avoid), seconds_left
        return latest

    def requeue(self, tasks: Sequence[Task], avoid: Worker | None = None) -> None:
        """Put tasks back to the front. If `avoid` is given, another worker gets them if there is one."""
        for task in reversed(tasks):
            if task.name == "encode":
                self.unencoded.extendleft(prompt for prompt in reversed(task.prompts) if prompt not in self.texts)
            elif task.name == "generate":
                workers = task.avoid if avoid is None else task.avoid | {avoid}
                self.waiting.appendleft(Task("generate", task.images, avoid=workers))

    def finish(self, number: int) -> ImageSpec | None:
        """Return the image with this number, and forget it. Returns None if it was finished before."""
        image = self.missing.pop(number, None)
        if image is not None:
            prompt = self.prompts[image.prompt]
            self.unfinished[prompt] -= 1
            if not self.unfinished[prompt]:
                self.texts.pop(prompt, None)
        return image
