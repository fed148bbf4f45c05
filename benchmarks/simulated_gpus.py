"""A discrete simulation of one machine with several GPUs: loading, encoding, generating and writing in virtual seconds.

The loop, the queue and the plan of the text encoder are the real ones. The threads are simulated: GPUs that follow
EncodingPlan, and writers that keep images waiting when they fall behind.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from sana_core.batch.encoding import Action, EncodingPlan
from sana_core.batch.local import FIRST, POLL_INTERVAL, LocalPool
from sana_core.batch.loop import Outcome, Started, run_batch
from sana_core.batch.plan import Chunk, ImageSpec, batch_images, split_into_chunks
from sana_core.batch.queue import Queue
from sana_core.batch.writers import BACKLOG


@dataclass(frozen=True)
class Costs:
    """Seconds of one GPU, or of one CPU core for the PNG file."""

    image: float
    png: float = 0.055  # 1024 px, measured
    prompt: float = 0.03
    load_encoder: float = 5.0
    load_models: float = 5.0


class SimulatedGpus:
    """A pool of GPUs. Each is a generator of the seconds that it works, or None while it has to wait."""

    reports_starts = True

    def __init__(self, gpus: int, costs: Costs, prompts: list[str], room: bool = True, depth: int = LocalPool.depth):
        self.costs, self.prompts, self.room, self.depth = costs, prompts, room, depth
        self.plan: EncodingPlan[str] = EncodingPlan(prompts, FIRST)
        # The time of the consumer, and of the GPU that works now.
        self.clock = self.time = 0.0
        self.inboxes: dict[str, list[Chunk]] = {f"gpu {index}": [] for index in range(gpus)}
        self.order = itertools.count()
        # (time, number, worker) when a GPU has finished its last work.
        self.ready = [(0.0, next(self.order), name) for name in self.inboxes]
        self.work = {name: self.behave(name) for name in self.inboxes}
        self.happened: list[Outcome[ImageSpec] | Started] = []
        self.busy = dict.fromkeys(self.inboxes, 0.0)

    def behave(self, name: str) -> Iterator[float | None]:
        """Simulate a thread of LocalPool. Yields the seconds of each work, or None while the thread waits."""
        loaded = False
        while True:
            while not self.inboxes[name]:
                yield None
            chunk = self.inboxes[name].pop(0)
            prompts = [self.prompts[image.prompt] for image in chunk]
            other_gpus = len(self.inboxes) - 1
            while action := self.plan.next_action(name, name, prompts, loaded, self.room, other_gpus, self.time):
                if action is Action.LOAD:
                    yield self.costs.load_models
                    loaded = True
                elif action is Action.WAIT:
                    yield None
                else:
                    loaded &= self.room
                    yield self.costs.load_encoder
                    while prompt := self.plan.next_prompt(name, prompts, self.time):
                        yield self.costs.prompt
                        self.plan.store(name, prompt, prompt, self.time)
            self.happened.append(Started(name, chunk))
            seconds = self.costs.image * len(chunk)
            yield seconds
            self.happened.append(Outcome(name, chunk, chunk, seconds=seconds))

    def now(self) -> float:
        return self.clock

    def workers(self) -> list[str]:
        return list(self.inboxes)

    def submit(self, worker: str, chunk: Chunk) -> None:
        self.inboxes[worker].append(chunk)

    def drop(self, worker: str, reason: BaseException) -> None:
        raise reason

    def advance(self, until: float) -> None:
        """Let the GPUs work until the time `until`, also while the consumer of the images is busy."""
        while self.ready and self.ready[0][0] <= until:
            self.time, _, name = heapq.heappop(self.ready)
            seconds = next(self.work[name])
            if seconds is not None:
                self.busy[name] += seconds
            # A waiting thread looks again soon.
            pause = POLL_INTERVAL / 10 if seconds is None else seconds
            heapq.heappush(self.ready, (self.time + pause, next(self.order), name))
        self.clock = max(self.clock, until)

    def wait(self) -> list[Outcome[ImageSpec] | Started]:
        """Return the events since the last call. Without events, returns after the poll interval."""
        end = self.clock + POLL_INTERVAL
        while not self.happened and self.clock < end:
            self.advance(min(end, max(self.clock, self.ready[0][0])))
        happened, self.happened = self.happened, []
        return happened


def busy_share(
    gpus: int,
    costs: Costs,
    images: int,
    count: int = 4,
    chunk: int = 8,
    writers: int = 4,
    cores: int | None = None,
    room: bool = True,
    depth: int = LocalPool.depth,
) -> float:
    """Return the share of the run's time, until the last file is written, in which the GPUs work.

    `count`: images per prompt. `cores`: CPU cores for the writers, by default one each. With `writers` 0, the thread
    that hands out chunks encodes the files.
    """
    prompts = [f"prompt {number}" for number in range(images // count)]
    chunks = split_into_chunks(batch_images(len(prompts), count, 0), chunk)
    image_prompts = [prompts[image.prompt] for part in chunks for image in part]
    pool = SimulatedGpus(gpus, costs, prompts, room, depth)
    pool.plan = EncodingPlan(image_prompts, FIRST)
    # More writers than cores are as slow as the cores.
    seconds = costs.png * max(1.0, writers / (cores or writers or 1))
    ends: list[float] = []
    free = [0.0] * writers
    for image, _ in run_batch(Queue(chunks), pool):
        pool.plan.finish_image(prompts[image.prompt])
        if not writers:
            pool.advance(pool.clock + costs.png)
            ends = [pool.clock]
            continue
        while sum(end > pool.clock for end in ends) >= BACKLOG * writers:
            pool.advance(min(end for end in ends if end > pool.clock))
        ends = [end for end in ends if end > pool.clock]
        end = max(pool.clock, heapq.heappop(free)) + seconds
        heapq.heappush(free, end)
        ends.append(end)
    finished = max([pool.clock, *ends])
    return sum(min(busy, finished) for busy in pool.busy.values()) / (gpus * finished)
