"""Every GPU of a Ray cluster: one actor each, which loads the checkpoint once.

Ray restarts nothing here: the loop knows what each actor had, and this pool puts a new one where a GPU has none, be it
because an actor died or because a machine has joined.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..accelerator import is_driver_error, is_out_of_memory
from ..errors import ClusterError, SanaError
from ..polling import Poll, no_poll
from .loop import Outcome
from .plan import Chunk
from .worker import Job

logger = logging.getLogger(__name__)

# seconds between two looks at the cluster's machines, and at who hangs
LOOK_AROUND = 3.0
LOOK = 0.5
# how long a run waits for a first actor, or for another after the last one died
WAIT_FOR_ACTORS = 300.0
# tries to start an actor on one machine whose processes die before they are ready
LARGEST_TRIES = 5


def actor_class(ray: Any) -> Any:
    """Return the actors' class. It is made here, because Ray finds a class of a module by the name of the module."""

    class Actor:
        def __init__(self, job: dict[str, Any]) -> None:
            from importlib import import_module

            # as the machines know it
            self.worker = import_module("sana_core.batch.worker").Worker(job)

        def load(self, neighbours: int, changed: dict[str, Any]) -> int:
            return self.worker.load(neighbours, changed)

        def draw(self, chunk: list[Any], prompts: list[Any]) -> list[Any]:
            return self.worker.draw(chunk, prompts)

    return ray.remote(Actor)


class RayPool:
    """The GPUs of the cluster that this process is connected to."""

    # the second chunk is on its way while the first is drawn
    depth = 2

    def __init__(
        self,
        job: Job,
        prompts: Sequence[Any],
        wait: float = WAIT_FOR_ACTORS,
        changed: Mapping[str, torch.Tensor] | None = None,
        poll: Poll = no_poll,
    ) -> None:
        """`changed` goes to each machine once; `poll`, called at least twice a second, cancels by raising."""
        import ray

        self.ray, self.prompts, self.longest_wait, self.poll = ray, prompts, wait, poll
        self.job, self.changed = job.pack(), ray.put(dict(changed or {}))
        self.actor_class: Any = actor_class(ray)
        self.actors: dict[str, Any] = {}  # those that are ready, by name
        self.largest: dict[str, int] = {}  # how many pictures at once each has memory for
        self.machines: dict[str, str] = {}  # actor: its node's id
        self.starting: dict[Any, tuple[str, Any]] = {}  # the call of load: name and actor
        self.flying: dict[Any, tuple[str, Chunk]] = {}
        self.tries: dict[str, int] = {}
        self.refused: dict[str, BaseException] = {}  # nodes that cannot draw
        self.started = 0
        self.looked = self.seen = time.monotonic()
        self.look_around()

    def look_around(self) -> None:
        """Start an actor for every GPU that has none, forget those whose machine has gone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.looked = time.monotonic()
        alive = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
        for name, node_id in list(self.machines.items()):
            if node_id not in alive:
                self.forget(name)
        for node_id, node in alive.items():
            present = sum(of == node_id for of in self.machines.values())
            if node_id in self.refused:
                continue
            gpus = int(node["Resources"].get("GPU", 0))
            for _ in range(gpus - present):
                self.started += 1
                name = f"{node['NodeManagerHostname']} ({node_id[:6]}, actor {self.started})"
                place = NodeAffinitySchedulingStrategy(node_id, soft=False)
                options = {"num_gpus": 1, "num_cpus": 0, "scheduling_strategy": place}
                actor: Any = self.actor_class.options(**options).remote(self.job)
                self.machines[name] = node_id
                self.starting[actor.load.remote(gpus, self.changed)] = (name, actor)

    def forget(self, name: str) -> None:
        """Take an actor out; the loop gives its chunks to others."""
        self.machines.pop(name, None)
        self.actors.pop(name, None)
        self.starting = {call: entry for call, entry in self.starting.items() if entry[0] != name}

    def workers(self) -> list[str]:
        """Raises ClusterError when no actor came up in time, and what a machine said where all refuse."""
        now = time.monotonic()
        if now - self.looked > LOOK_AROUND:
            self.look_around()
        if self.actors or self.flying:
            self.seen = now
        elif self.refused and not self.starting:
            raise next(iter(self.refused.values()))
        elif now - self.seen > self.longest_wait:
            raise ClusterError(
                f"cluster: no GPU of it could be had for {self.longest_wait:.0f} s; "
                "see ray status for what its machines have, and what others use"
            )
        return list(self.actors)

    def submit(self, worker: str, chunk: Chunk) -> None:
        prompts = [self.prompts[picture.prompt] for picture in chunk]
        words = [tuple(picture) for picture in chunk]
        self.flying[self.actors[worker].draw.remote(words, prompts)] = (worker, chunk)

    def wait(self) -> list[Outcome[Any]]:
        self.poll()
        calls = [*self.flying, *self.starting]
        if not calls:
            time.sleep(LOOK)
            return []
        ready, _ = self.ray.wait(calls, num_returns=1, timeout=LOOK)
        outcomes = []
        for call in ready:
            if call in self.starting:
                self.settle_start(call)
            elif call in self.flying:
                outcomes += self.settle(call)
        return outcomes

    def settle_start(self, call: Any) -> None:
        """Take an actor in that is ready, or note why it is not."""
        name, actor = self.starting.pop(call)
        node_id = self.machines[name]
        try:
            self.largest[name] = self.ray.get(call)
            self.actors[name] = actor
        except self.ray.exceptions.RayTaskError as error:
            self.refuse(name, actor, error.cause)
        except self.ray.exceptions.RayError as error:
            self.tries[node_id] = self.tries.get(node_id, 0) + 1
            if self.tries[node_id] >= LARGEST_TRIES:
                self.refused[node_id] = ClusterError(
                    f"{name}: its processes die before they are ready ({error}); see its logs"
                )
            logger.warning("batch: %s died before it was ready", name)
            self.forget(name)

    def refuse(self, name: str, actor: Any, cause: BaseException) -> None:
        """Leave the actor's machine out: it is well, but cannot draw, and another try there would end the same."""
        self.refused[self.machines[name]] = named(name, cause)
        logger.error("batch: %s cannot draw: %s", name, cause)
        self.forget(name)
        self.ray.kill(actor)

    def settle(self, call: Any) -> list[Outcome[Any]]:
        """Return how a chunk ended; nothing where its actor died, for then the loop gives it to another."""
        worker, chunk = self.flying.pop(call)
        try:
            return [Outcome(worker, chunk, self.ray.get(call))]
        except self.ray.exceptions.RayTaskError as error:
            if is_out_of_memory(error.cause):
                return [Outcome(worker, chunk, error=error.cause)]
            if is_driver_error(error.cause):
                self.drop(worker, error.cause)
                return []
            if isinstance(error.cause, OSError):
                # a disk that is full or gone; the pictures go to other machines
                if worker in self.actors:
                    self.refuse(worker, self.actors[worker], error.cause)
                return []
            return [Outcome(worker, chunk, error=named(worker, error.cause))]
        except self.ray.exceptions.RayError as error:
            self.drop(worker, error)
            return []

    def drop(self, worker: str, reason: BaseException) -> None:
        """Kill the actor; a new one starts on its GPU, if the machine is still there."""
        if worker not in self.actors:
            return
        logger.warning("batch: lost %s: %s", worker, str(reason).splitlines()[0])
        self.ray.kill(self.actors[worker])
        self.forget(worker)
        self.looked = 0.0

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """End all actors, in the middle of a step if need be."""
        for actor in [*self.actors.values(), *(actor for _, actor in self.starting.values())]:
            self.ray.kill(actor)


def named(worker: str, cause: BaseException) -> SanaError:
    """Return the error of `worker`, with its name; one that is not ours becomes a ClusterError."""
    kind = type(cause) if isinstance(cause, SanaError) else ClusterError
    return kind(f"{worker}: {cause}")
