"""A simulation of one machine with several GPUs under the real loop, in threads of a process or in a process for each.

A GPU's worker loads, encodes prompts, launches kernels and encodes PNG files in virtual seconds. The launches need
Python's lock, which the threads of a process share. `python -m benchmarks.simulated_gpus` prints images a second.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.simulation import Time
from sana_core.batch.plan import batch_images, split_into_chunks
from sana_core.engine.loop import Run
from sana_core.runtime.limits import WatchClock

# The share of a launch's host time in which Python's lock is held. PyTorch's C++ code releases it for the rest.
HELD = 0.8
# A thread has the lock for about this long until another one gets it.
PIECE = 0.001


@dataclass(frozen=True)
class Costs:
    """Seconds of one worker. The defaults have no host time."""

    # A step of a chunk on the GPU, and its launches on the host.
    step: float
    step_host: float = 0.0
    steps: int = 20
    # The decode of an image.
    decode: float = 0.0
    decode_host: float = 0.0
    # How often a step and a decode release the lock, and what each release costs when another thread wants it.
    step_releases: int = 947
    decode_releases: int = 7000
    hand_over: float = 9e-6
    # 1024 px, measured.
    png: float = 0.055
    prompt: float = 0.03
    load_encoder: float = 5.0
    load_models: float = 5.0


# An H100 with 35 us of host time for each launch: measured launches and GPU times.
H100 = {
    "0.6B, 512 px, 1 at once": (1, Costs(0.0026, 418 * 35e-6, 20, 0.008, 913 * 35e-6, 1309, 3700, png=0.014)),
    "0.6B, 512 px, 8 at once": (8, Costs(0.016, 418 * 35e-6, 20, 0.008, 913 * 35e-6, 1309, 3700, png=0.014)),
    "1.6B, 1024 px, 1 at once": (1, Costs(0.0107, 346 * 35e-6, 20, 0.0284, 1815 * 35e-6)),
    "1.6B, 1024 px, 8 at once": (8, Costs(0.071, 346 * 35e-6, 20, 0.0284, 1815 * 35e-6)),
    "1.6B, 4096 px, 1 at once": (1, Costs(0.166, 427 * 35e-6, 20, 0.42, 7155 * 35e-6, 947, 25000, png=0.9)),
}


class Lock:
    """Python's lock. Threads get it in the order in which they ask for it."""

    def __init__(self, time: Time, threads: int, hand_over: float) -> None:
        self.time, self.hand_over = time, hand_over if threads > 1 else 0.0
        self.is_held = False
        self.waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def take(self, seconds: float, releases: float, then: Callable[[], None]) -> None:
        """Hold the lock for `seconds`, then call `then`."""
        self.waiting.append((seconds + releases * self.hand_over, then))
        if not self.is_held:
            self.next()

    def next(self) -> None:
        self.is_held = bool(self.waiting)
        if self.waiting:
            seconds, then = self.waiting.popleft()
            self.time.after(seconds, self.release, then)

    def release(self, then: Callable[[], None]) -> None:
        self.next()
        then()


class GpuWorker:
    """A worker of the loop with a GPU, which needs `lock` to launch."""

    can_restart, machine, birth = True, "this machine", 1

    def __init__(self, name: str, time: Time, lock: Lock, costs: Costs, room: bool, depth: int) -> None:
        self.name, self.time, self.lock, self.costs, self.room, self.depth = name, time, lock, costs, room, depth
        self.inbox: deque[tuple] = deque()
        self.work: Iterator[tuple] | None = None
        # When the GPU has done all launched kernels, and when the thread that encodes PNG files is free.
        self.gpu_free = self.png_free = 0.0
        self.busy = 0.0

    def attach(self, events: Time) -> None:
        pass

    def send(self, *message: Any) -> None:
        self.inbox.append(message)
        if self.work is None:
            self.work = self.behave()
            self.go_on()

    def go_on(self) -> None:
        """Continue until the worker waits for time or for the lock."""
        assert self.work is not None
        wait = next(self.work, None)
        if wait is None:
            self.work = None
        elif wait[0] == "sleep":
            self.time.after(max(0.0, wait[1]), self.go_on)
        else:
            self.lock.take(wait[1], wait[2], self.go_on)

    def launch(self, host: float, gpu: float, releases: int) -> Iterator[tuple]:
        """Launch the kernels of a step. The host may be one step ahead of the GPU."""
        began, before = self.time.now, self.gpu_free
        pieces = max(1, round(host / PIECE)) if host else 0
        for _ in range(pieces):
            yield "lock", HELD * host / pieces, releases / pieces
            yield "sleep", (1 - HELD) * host / pieces
        self.busy += gpu
        self.gpu_free = max(max(before, began) + gpu, self.time.now)
        yield "sleep", before - self.time.now

    def behave(self) -> Iterator[tuple]:
        costs = self.costs
        while self.inbox:
            name, run, task, *arguments = self.inbox.popleft()
            began, result = self.time.now, None
            if name == "load":
                self.busy += costs.load_models
                yield "sleep", costs.load_models
            elif name == "encode":
                self.busy += costs.load_encoder + costs.prompt * len(arguments[0])
                yield "sleep", costs.load_encoder
                for prompt in arguments[0]:
                    yield "sleep", costs.prompt
                    self.post(run, "text", prompt, ())
                result = self.room
            elif name == "generate":
                for _ in range(costs.steps):
                    yield from self.launch(costs.step_host, costs.step, costs.step_releases)
                for image in arguments[0]:
                    yield from self.launch(costs.decode_host, costs.decode, costs.decode_releases)
                    yield "sleep", self.gpu_free - self.time.now
                    self.png_free = max(self.png_free, self.time.now) + costs.png
                    self.time.after(self.png_free - self.time.now, self.post, run, "image", image[0], b"")
            # Events are sent in their order, by the thread that encodes the images.
            delay = max(0.0, self.png_free - self.time.now)
            self.time.after(delay, self.post, run, "done", task, self.time.now - began, result)

    def post(self, run: int, *event: Any) -> None:
        self.time.events.append((self, self.birth, run, *event))

    def cancel(self, run: int) -> None:
        pass

    def leave(self) -> None:
        pass

    def restart(self) -> None:
        raise AssertionError(f"{self.name} counts as lost at {self.time.now:.1f} s")


def simulate(
    gpus: int,
    costs: Costs,
    images: int,
    count: int = 4,
    chunk: int = 8,
    processes: bool = True,
    room: bool = True,
    depth: int = 2,
) -> tuple[float, float]:
    """Return the images a second after the first tenth of them, and the share of the whole run in which the GPUs load,
    encode, sample and decode.

    `count`: images per prompt. `room`: whether the text encoder fits beside the models.
    """
    time = Time()
    shared = Lock(time, gpus, costs.hand_over)
    workers = [
        GpuWorker(f"gpu {index}", time, Lock(time, 1, 0.0) if processes else shared, costs, room, depth)
        for index in range(gpus)
    ]
    prompts = [f"prompt {number}" for number in range(max(1, images // count))]
    chunks = split_into_chunks(batch_images(len(prompts), min(count, images), 0), chunk)
    run = Run({}, chunks, workers, prompts, {}, events=time, clock=WatchClock(time))
    arrived = [time.now for _ in run.images()]
    first = len(arrived) // 10
    rate = (len(arrived) - first) / (time.now - arrived[first - 1])
    return rate, sum(worker.busy for worker in workers) / (gpus * time.now)


def scaling(gpus: tuple[int, ...] = (1, 2, 4, 8), images: int = 100) -> dict[str, dict[str, list[float]]]:
    """Return how many times as fast as one GPU several are, in threads and in processes."""
    results = {}
    for name, (chunk, costs) in H100.items():
        costs = replace(costs, load_models=0.0, load_encoder=0.0)
        one = simulate(1, costs, images * chunk, count=images * chunk, chunk=chunk)[0]
        results[name] = {
            kind: [
                round(simulate(n, costs, n * images * chunk, n * images * chunk, chunk, processes)[0] / one, 2)
                for n in gpus
            ]
            for kind, processes in (("threads", False), ("processes", True))
        }
    return results


if __name__ == "__main__":
    for name, kinds in scaling().items():
        sys.stdout.write(f"{name}: {kinds}\n")
