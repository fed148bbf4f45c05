"""Every GPU of a Ray cluster: one actor each, which loads the checkpoint once.

This pool asks Ray for GPUs, and Ray decides where they are. It asks for some more than there are, so that a machine
that joins gets work at once, and that the cluster's autoscaler sees what is wanted and starts machines. Ray restarts
nothing here: the loop knows what each actor had, and for one that died the pool asks for another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ..accelerator import is_driver_error, is_out_of_memory
from ..checkpoints.files import brief
from ..errors import ClusterError, SanaError
from ..polling import Poll, no_poll
from .connection import LOOK
from .loop import Outcome
from .plan import Chunk
from .progress import Say, counted, no_words
from .ray_actor import Candidate, Crew, actor_class
from .worker import Job

logger = logging.getLogger(__name__)

# seconds between two looks at the cluster's machines
LOOK_AROUND = 3.0
# tries to start an actor on one machine whose processes die before they are ready
LARGEST_TRIES = 5
# actors that are asked for beside those that the cluster has GPUs for
AHEAD = 8


class RayPool:
    """The GPUs of the cluster that this process is connected to."""

    # the second chunk is on its way while the first is drawn
    depth = 2

    def __init__(
        self,
        job: Job,
        prompts: Sequence[Any],
        most: int,
        wait: float,
        crew: Crew,
        poll: Poll = no_poll,
        say: Say = no_words,
    ) -> None:
        """Take the actors of `crew`, and ask for others, up to `most`. `poll`, called at least twice a second, cancels
        by raising; `say` is told what the run waits for.
        """
        import ray

        self.ray, self.prompts, self.most, self.longest_wait = ray, prompts, most, wait
        self.poll, self.say, self.said = poll, say, ""
        self.job, self.crew = job.pack(), crew
        self.actor_class: Any = actor_class(ray)
        self.asked: dict[Any, Candidate] = {}  # by the call of find_node; Ray has not placed them yet
        self.starting: dict[Any, Candidate] = {}  # by the call of load
        self.actors: dict[str, Candidate] = {}  # those that are ready, by name
        self.flying: dict[Any, tuple[str, Chunk]] = {}
        self.largest: dict[str, int] = {}  # how many pictures at once each has memory for
        self.machines = self.crew.machines  # the machine of each actor that was ever placed, in words
        self.refused: dict[str, BaseException] = {}  # nodes that cannot draw
        self.deaths: dict[str, tuple[int, float]] = {}  # of a node's actors before they were ready: how many, the last
        self.placed: set[str] = set()  # nodes that ever had an actor
        self.looked = self.seen = time.monotonic()
        self.nodes = self.living()
        for candidate in self.crew.take():
            if candidate.node_id in self.nodes:
                self.prepare(candidate)
        self.look_around()

    def living(self) -> dict[str, Any]:
        """Return the cluster's machines that live, by id."""
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    def prepare(self, candidate: Candidate) -> None:
        """Let an actor load what the job wants, unless it has that, and take it in when it is ready."""
        call = candidate.handle.prepare.remote(
            self.job, self.gpus(candidate.node_id), list(self.crew.changed), *self.crew.changed.values()
        )
        self.starting[call] = candidate

    def look_around(self) -> None:
        """Forget the actors whose machine has gone, and ask for as many as there are GPUs, and some ahead."""
        self.looked = time.monotonic()
        self.nodes = self.living()
        for candidate in [*self.actors.values(), *self.starting.values()]:
            if candidate.node_id not in self.nodes:
                self.forget(candidate)
        gpus = sum(self.gpus(node_id) for node_id in self.nodes if node_id not in self.refused)
        for _ in range(min(self.most, gpus + AHEAD) - len(self.asked) - len(self.starting) - len(self.actors)):
            options = {"num_gpus": 1, "num_cpus": 0, "scheduling_strategy": self.strategy()}
            handle = self.actor_class.options(**options).remote()
            self.asked[handle.find_node.remote()] = Candidate(handle, time.monotonic())

    def gpus(self, node_id: str) -> int:
        return int(self.nodes[node_id]["Resources"].get("GPU", 0))

    def strategy(self) -> Any:
        """Return where Ray may place an actor: on any machine that has not refused."""
        from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

        # Ray labels each node with its id, by a name that has changed with its versions
        labels = {name: value for node_id in self.refused for name, value in self.labels(node_id) if value == node_id}
        if not labels:
            return "SPREAD"
        return NodeLabelSchedulingStrategy(hard={name: NotIn(*self.refused) for name in labels})

    def labels(self, node_id: str) -> Iterable[tuple[str, str]]:
        return self.nodes.get(node_id, {}).get("Labels", {}).items()

    def forget(self, candidate: Candidate) -> None:
        """Take an actor out; the loop gives its chunks to others."""
        self.actors.pop(candidate.name, None)
        self.starting = {call: other for call, other in self.starting.items() if other is not candidate}

    def workers(self) -> list[str]:
        """Raises what a machine said where all that were there refuse, ClusterError when no actor came up in time."""
        now = time.monotonic()
        if now - self.looked > LOOK_AROUND:
            self.look_around()
        if self.actors or self.flying:
            self.seen = now
        elif self.all_refuse():
            raise next(iter(self.refused.values()))
        elif now - self.seen > self.longest_wait:
            reasons = "".join(f"; {error}" for error in self.refused.values())
            raise ClusterError(
                f"cluster: no GPU of it could be had for {self.longest_wait:.0f} s{reasons}; "
                "see ray status for what its machines have, and what others use"
            )
        return list(self.actors)

    def all_refuse(self) -> bool:
        """Whether there are machines with GPUs, and all of them have refused; one that has died might come back."""
        able = self.placed | {node_id for node_id in self.nodes if self.gpus(node_id)}
        return bool(able) and able <= self.refused.keys() and not self.starting

    def submit(self, worker: str, chunk: Chunk) -> None:
        prompts = [self.prompts[picture.prompt] for picture in chunk]
        words = [tuple(picture) for picture in chunk]
        self.flying[self.actors[worker].handle.draw.remote(words, prompts)] = (worker, chunk)

    def wait(self) -> list[Outcome[Any]]:
        self.poll()
        calls = [*self.flying, *self.starting, *self.asked]
        if not calls:
            time.sleep(LOOK)
            return []
        ready, _ = self.ray.wait(calls, num_returns=1, timeout=LOOK)
        if not ready:
            self.report()
        outcomes = []
        for call in ready:
            if call in self.asked:
                self.settle_place(call)
            elif call in self.starting:
                self.settle_start(call)
            elif call in self.flying:
                outcomes += self.settle(call)
        return outcomes

    def report(self) -> None:
        """Say what the run waits for, where that has changed, and nothing once somebody draws."""
        words, gpus = "", sum(map(self.gpus, self.nodes))
        if self.actors:
            pass
        elif self.starting:
            places = len({candidate.node_id for candidate in self.starting.values()})
            words = f"{counted(len(self.starting), 'worker')} loading on {counted(places, 'machine')}"
        elif gpus:
            places = sum(self.gpus(node_id) > 0 for node_id in self.nodes)
            wanted = min(self.most, gpus)
            words = f"{counted(wanted, 'worker')} starting on {counted(places, 'machine')} with {counted(gpus, 'GPU')}"
        else:
            words = (
                f"no GPU among the cluster's {counted(len(self.nodes), 'machine')}; waiting {self.longest_wait:.0f} s "
                "for a machine with one, or one that ray start --num-gpus=1 lets use its CPU"
            )
        if words and words != self.said:
            self.say(words)
        self.said = words

    def settle_place(self, call: Any) -> None:
        """Let an actor that Ray has placed load. Raises ClusterError where none of them lives to say where it is."""
        candidate = self.asked.pop(call)
        try:
            candidate.node_id = self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            if self.count_death(candidate) >= LARGEST_TRIES:
                raise ClusterError(
                    f"cluster: its processes die before they are ready ({brief(error, 200)}); see its logs"
                ) from None
            return
        self.deaths.pop("", None)
        if candidate.node_id not in self.nodes:
            # it has just joined
            self.look_around()
        if candidate.node_id in self.refused or candidate.node_id not in self.nodes:
            self.ray.kill(candidate.handle)
            return
        candidate.since = time.monotonic()
        self.placed.add(candidate.node_id)
        host = self.nodes[candidate.node_id]["NodeManagerHostname"]
        short = candidate.node_id[:6]
        candidate.name = f"{host} ({short}, actor {len(self.machines) + 1})"
        self.machines[candidate.name] = f"{host} ({short})"
        self.prepare(candidate)

    def settle_start(self, call: Any) -> None:
        """Take an actor in that is ready, or note why it is not."""
        candidate = self.starting.pop(call)
        try:
            self.largest[candidate.name] = self.ray.get(call)
            self.actors[candidate.name] = candidate
        except self.ray.exceptions.RayTaskError as error:
            self.refuse(candidate, error.cause)
        except self.ray.exceptions.RayError as error:
            logger.warning("batch: %s died before it was ready", candidate.name)
            if self.count_death(candidate) >= LARGEST_TRIES:
                reason = f"its processes die before they are ready ({brief(error, 200)}); see its logs"
                self.refuse(candidate, ClusterError(reason))
            self.looked = 0.0

    def count_death(self, candidate: Candidate) -> int:
        """Return how often actors of this one's machine died early; those that die together, as with it, count once."""
        count, last = self.deaths.get(candidate.node_id, (0, 0.0))
        if candidate.since > last:
            count += 1
        self.deaths[candidate.node_id] = count, time.monotonic()
        return count

    def refuse(self, candidate: Candidate, cause: BaseException) -> None:
        """Leave the actor's machine out: it is well, but cannot draw, and another try there would end the same."""
        self.refused[candidate.node_id] = named(candidate.name, cause)
        logger.error("batch: %s cannot work: %s", candidate.name, cause)
        self.forget(candidate)
        # those that wait for a place might get this one
        for waiting in [candidate, *self.asked.values()]:
            self.ray.kill(waiting.handle)
        self.asked = {}
        self.looked = 0.0

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
                    self.refuse(self.actors[worker], error.cause)
                return []
            return [Outcome(worker, chunk, error=named(worker, error.cause))]
        except self.ray.exceptions.RayError as error:
            self.drop(worker, error)
            return []

    def drop(self, worker: str, reason: BaseException) -> None:
        """Kill the actor, and ask for another."""
        if worker not in self.actors:
            return
        logger.warning("batch: lost %s: %s", worker, str(reason).splitlines()[0])
        self.ray.kill(self.actors[worker].handle)
        self.forget(self.actors[worker])
        self.looked = 0.0

    def now(self) -> float:
        return time.monotonic()

    def rest(self) -> None:
        """Leave to the crew the actors that are ready or load."""
        self.crew.candidates += [*self.actors.values(), *self.starting.values()]
        self.actors, self.starting = {}, {}

    def drop_busy(self) -> None:
        """End the actors that draw, in the middle of a step."""
        for worker in {worker for worker, _ in self.flying.values()} & self.actors.keys():
            self.ray.kill(self.actors.pop(worker).handle)

    def close(self) -> None:
        """End all actors that were not left to the crew, in the middle of a step if need be."""
        for candidate in [*self.actors.values(), *self.starting.values(), *self.asked.values()]:
            self.ray.kill(candidate.handle)


def named(worker: str, cause: BaseException) -> SanaError:
    """Return the error of `worker`, with its name; one that is not ours becomes a ClusterError."""
    kind = type(cause) if isinstance(cause, SanaError) else ClusterError
    return kind(f"{worker}: {cause}")
