"""The actors of a run: where Ray has placed them, which are ready, and which machines cannot generate.

A pool requests actors on each machine, up to its number of GPUs. So errors can name a machine that cannot start actors.
It requests a few more on any machine, so that the cluster's autoscaler adds machines. An actor that dies is replaced.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from ..batch.progress import counted
from ..errors import ClusterError
from ..runtime.text import Json, brief, get_logger
from .actors import ActorError, ActorHandle, ClusterRun, DriverError, MachineError, last_line, with_name
from .clock import WatchClock
from .timeouts import ACTOR_TIMEOUT, HEALTH_CHECK_INTERVAL, LOADING_TIMEOUT, PLACEMENT_TIMEOUT, POLL_INTERVAL
from .worker import Job

logger = get_logger(__name__)

# Actors that may die or lose their GPU one after another without one image between them: starts on a machine, and
# actors on a GPU.
LARGEST_TRIES = 5
# Actors of a GPU that may fail one after another with an error that they report themselves.
LARGEST_ERRORS = 2
# The most actors that are requested on any machine, in addition to one for each free GPU of the cluster.
AHEAD = 8
REMEDY = "choose smaller images, dtype bfloat16, fewer processes on each GPU, or GPUs with more memory"
# By the failure kinds of Actor.call.
FAILURES = {"memory": MemoryError, "driver": DriverError, "machine": MachineError, "error": ActorError}


class Pool:
    """The actors of a `run`, at most `max_actors`, which load the models of `job`. Cached actors come first."""

    def __init__(self, run: ClusterRun, job: Job, max_actors: int) -> None:
        self.ray, self.cluster, self.cache, self.poll, self.on_status = run
        self.cluster.check()
        from .actor import actor_class, describe_code

        self.job, self.max_actors, self.status = job.pack(), self.cluster.limit(max_actors), ""
        self.actor_class, self.code = actor_class(), describe_code(Path(__file__).parents[1])
        # Actors that Ray has not placed yet, by Ray's reference of their call of `locate`.
        self.asked: dict[Hashable, ActorHandle] = {}
        # Actors that load the models, by the reference of their call of `prepare`.
        self.starting: dict[Hashable, ActorHandle] = {}
        # Actors that are ready, by name.
        self.actors: dict[str, ActorHandle] = {}
        # Actors that have not answered a ping yet, by the reference of their call of `answer`.
        self.pings: dict[Hashable, ActorHandle] = {}
        # Actor name: the number of images that it has memory for at once.
        self.loaded: dict[str, int] = {}
        # Id of a machine that cannot generate: the reason.
        self.refused: dict[str, ClusterError] = {}
        # Id of a machine: the number of failed starts in a row, and the time of the last one.
        self.failures: dict[str, tuple[int, float]] = {}
        # A place is a machine and a GPU, see ActorHandle.place. Since the last finished chunk of a place: its lost
        # actors, and its actors that have reported an error.
        self.losses: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        # By place: how many actors fewer than usual it may have.
        self.closed: Counter[tuple[str, str]] = Counter()
        # Idle actors in closed places. They occupy these places, so that Ray uses others.
        self.parked: list[ActorHandle] = []
        self.clock = WatchClock()
        self.warned: set[str] = set()
        # Ids of the machines that ever had an actor.
        self.placed: set[str] = set()
        self.last_check = self.last_member = self.clock()
        self.nodes = self.living()
        for actor in self.cache.actors:
            if actor.node_id in self.nodes:
                self.prepare(actor)
        self.cache.actors = []
        self.check_health()

    def living(self) -> Json:
        """Return the cluster's machines that live, by id."""
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    def slots(self, node_id: str) -> int:
        """Return how many actors a machine has resources for."""
        resources = self.nodes.get(node_id, {}).get("Resources", {})
        return min(int(resources.get(name, 0) / amount) for name, amount in self.cluster.needs.items())

    def capacity(self, node_id: str) -> int:
        """Return how many actors a machine has room for, without closed places."""
        return self.slots(node_id) - sum(count for (node, _), count in self.closed.items() if node == node_id)

    def machine(self, node_id: str) -> str:
        return f"{self.nodes[node_id]['NodeManagerHostname']} ({node_id[:6]})"

    @property
    def held(self) -> list[ActorHandle]:
        """The actors that have a place."""
        return [*self.starting.values(), *self.actors.values()]

    def check_health(self) -> None:
        """Drop lost actors, ping the others, and request as many as are missing."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.nodes = self.living()
        for actor in self.held:
            if actor.node_id not in self.nodes:
                self.drop(actor, ClusterError("its machine has gone"))
        pinged = list(self.pings.values())
        for actor in self.held:
            if actor not in pinged:
                self.pings[actor.handle.answer.remote()] = actor
                actor.heard = self.clock()
            silence, ready = self.clock() - actor.heard, actor.name in self.actors
            if silence > (ACTOR_TIMEOUT if ready else LOADING_TIMEOUT):
                self.fail(actor, TimeoutError(f"it has not answered for {silence:.0f} s"))
            elif actor.loaded and not ready and self.clock() - actor.since > LOADING_TIMEOUT:
                # It has nothing to load. The last run ended while it hung, because another actor had a copy.
                self.fail(actor, TimeoutError("it has not finished the last run"))
        # A lost actor moves the next check forward, but this check already looks for a replacement.
        self.last_check = now = self.clock()
        able = {node: count for node in self.nodes if node not in self.refused and (count := self.capacity(node)) > 0}
        for node, room in able.items():
            room = min(room - sum(actor.node_id == node for actor in self.held), self.max_actors - len(self.held))
            waiting = {call: actor for call, actor in self.asked.items() if actor.node_id == node}
            for call in list(waiting)[max(0, room) :]:
                self.ray.kill(self.asked.pop(call).handle)
            able[node] = room - len(waiting)
        patient = [actor for actor in self.asked.values() if actor.node_id and now - actor.since < PLACEMENT_TIMEOUT]
        missing = self.max_actors - len(self.held) - len(patient)
        # Each machine gets one actor before any machine gets a second one.
        while missing > 0 and (node := max(able, key=able.__getitem__, default="")) and able[node] > 0:
            self.ask(NodeAffinitySchedulingStrategy(node, soft=False), node)
            able[node] -= 1
            missing -= 1
        ahead = [call for call, actor in self.asked.items() if not actor.node_id]
        for call in ahead[max(0, missing) :]:
            self.ray.kill(self.asked.pop(call).handle)
        _, failed = self.failures.get("", (0, -math.inf))
        if now - failed > PLACEMENT_TIMEOUT:
            for _ in range(min(missing, AHEAD) - len(ahead)):
                self.ask(self.anywhere(), "")

    def ask(self, strategy: object, node_id: str) -> None:
        needs = dict(self.cluster.needs)
        options = {"num_gpus": needs.pop("GPU"), "num_cpus": 0, "resources": needs, "scheduling_strategy": strategy}
        handle = self.actor_class.options(**options).remote()
        self.asked[handle.locate.remote()] = ActorHandle(handle, self.clock(), node_id)

    def anywhere(self) -> object:
        """Return where Ray may place an actor: on any machine that has not refused."""
        from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

        # Ray labels each node with its id. The name of that label depends on Ray's version.
        all_labels = (self.nodes.get(node, {}).get("Labels", {}).items() for node in self.refused)
        labels = {name for items in all_labels for name, value in items if value in self.refused}
        return NodeLabelSchedulingStrategy(hard={name: NotIn(*self.refused) for name in labels}) if labels else "SPREAD"

    def wait(self, calls: list[Hashable]) -> list[Hashable]:
        """Wait a short time, and return the `calls` that have ended, which may be none. Replaces lost actors.

        Raises the first machine's error if all machines refuse, and ClusterError if no actor was placed in time.
        """
        self.poll()
        # All answers are read before any actor is judged by its silence.
        ready = self.read(calls)
        if self.clock() - self.last_check > HEALTH_CHECK_INTERVAL:
            self.check_health()
        now, finished = self.clock(), [call for call in calls if call in ready]
        if self.held:
            self.last_member = now
        elif finished:
            # Images of the last actors, which are delivered before the run ends.
            return finished
        elif self.all_refuse():
            raise next(iter(self.refused.values()))
        elif now - self.last_member > self.cluster.wait:
            reasons = "".join(f"; {error}" for error in self.refused.values())
            raise ClusterError(
                f"cluster: no GPU of it could be had for {self.cluster.wait:.0f} s{reasons}; "
                "see ray status for what its machines have, and what others use"
            )
        return finished

    def read(self, calls: list[Hashable]) -> set[Hashable]:
        """Return the `calls` that have ended. Handles the ended calls of the pool itself."""
        waiting = [*calls, *self.pings, *self.starting, *self.asked]
        if not waiting:
            time.sleep(POLL_INTERVAL)
            return set()
        ready, _ = self.ray.wait(waiting, num_returns=len(waiting), timeout=0)
        if not ready:
            ready, _ = self.ray.wait(waiting, num_returns=1, timeout=POLL_INTERVAL)
        if not ready:
            self.report()
        for call in ready:
            if call in self.asked:
                self.on_placed(call)
            elif call in self.starting:
                self.on_started(call)
            elif call in self.pings:
                self.on_ping(call)
        return set(ready)

    def all_refuse(self) -> bool:
        """Whether all machines with GPUs have refused. A dead machine counts as able, because it may come back."""
        able = self.placed | {node for node in self.nodes if self.capacity(node)}
        return bool(able) and able <= self.refused.keys()

    def report(self) -> None:
        """Show why the run waits, if that has changed. Once an actor is ready, nothing is shown."""
        able = [room for room in map(self.capacity, self.nodes) if room]
        if self.actors:
            status = ""
        elif self.starting:
            places = sorted({self.machine(actor.node_id) for actor in self.starting.values()})
            status = f"{counted(len(self.starting), 'worker')} loading on {brief(', '.join(places), 200)}"
        elif able:
            workers, machines = counted(min(self.max_actors, sum(able)), "worker"), counted(len(able), "machine")
            status = f"{workers} starting on {machines} with {counted(sum(able), 'GPU')}"
        else:
            status = (
                f"no GPU among the cluster's {counted(len(self.nodes), 'machine')}; waiting {self.cluster.wait:.0f} s "
                "for a machine with one, or one that ray start --num-gpus=1 lets use its CPU"
            )
        if status and status != self.status:
            self.on_status(status)
        self.status = status

    def on_ping(self, call: Hashable) -> None:
        actor = self.pings.pop(call)
        try:
            self.ray.get(call)
            actor.heard = self.clock()
        except self.ray.exceptions.RayError as error:
            self.fail(actor, error)

    def on_placed(self, call: Hashable) -> None:
        """Let an actor that Ray has placed load the model, if it runs the same code as the driver."""
        actor = self.asked.pop(call)
        try:
            actor.node_id, actor.gpu, code = self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            self.count_failure(actor, error)
            return
        if actor.node_id not in self.nodes:
            # It has just joined. Machines that have gone stay until the next check, which drops their actors.
            self.nodes = {**self.nodes, **self.living()}
        if actor.node_id in self.refused or actor.node_id not in self.nodes or len(self.held) >= self.max_actors:
            self.ray.kill(actor.handle)
            return
        room = max(1, int(1 / self.cluster.gpus_per_worker)) - self.closed[actor.place]
        if self.closed[actor.place] and sum(other.place == actor.place for other in self.held) >= room:
            self.parked.append(actor)
            self.last_check = -math.inf
            return
        self.placed.add(actor.node_id)
        actor.name = f"{self.machine(actor.node_id)[:-1]}, actor {len(self.cache.machines) + 1})"
        self.cache.machines[actor.name] = self.machine(actor.node_id)
        from .actor import CODE

        differing = [
            f"{name} {code.get(name)}, not {version}"
            for name, version in self.code.items()
            if code.get(name) != version
        ]
        text = f"it runs {', '.join(differing)} as the driver does"
        if any(name.startswith(CODE) for name in differing):
            self.refuse(actor, ClusterError(f"{text}; remove the one that its Python finds first"))
            return
        if differing:
            self.warn_once(actor.name, f"{text}; its images may differ in the last bits")
        self.prepare(actor)

    def prepare(self, actor: ActorHandle) -> None:
        """Let an actor load the models of the job, unless it has them. `on_started` adds it to the ready actors."""
        actor.since = actor.heard = self.clock()
        # An equal share of the machine's cores, as Ray counts them.
        threads = int(self.nodes[actor.node_id]["Resources"].get("CPU", 0)) // max(1, self.slots(actor.node_id))
        changed = self.cache.changed
        arguments = self.job, max(1, threads), list(changed)
        self.starting[self.call(actor, "prepare", arguments, *changed.values())] = actor

    def call(self, actor: ActorHandle, method: str, arguments: tuple, *weights: object) -> Hashable:
        """Start `Actor.call` in an actor. Returns Ray's reference of the result."""
        return actor.handle.call.remote(method, self.ray.cloudpickle.dumps(arguments), *weights)

    def on_started(self, call: Hashable) -> None:
        """Add an actor that has loaded the model to the ready ones, or count its failure."""
        actor = self.starting[call]
        try:
            largest = self.unpack(actor.name, call)
        except self.ray.exceptions.RayError as error:
            self.starting.pop(call)
            self.count_failure(actor, error)
        except (MemoryError, ActorError) as error:
            if isinstance(error, MemoryError):
                error = ActorError(f"memory runs out while the model loads ({brief(error)}); {REMEDY}")
            self.fail(actor, error)
        else:
            self.starting.pop(call)
            # The actor assumes that it has a whole GPU.
            self.loaded[actor.name] = max(1, int(largest * min(1, self.cluster.gpus_per_worker)))
            self.failures.pop(actor.node_id, None)
            self.actors[actor.name] = actor
            actor.loaded = True
            actor.heard = self.clock()

    def unpack(self, name: str, call: Hashable) -> Any:
        """Return the result of a call of the actor `name`, and log its warnings.

        Raises MemoryError or an ActorError for an error of the actor, and Ray's errors.
        """
        result, failure, reason, warnings = self.ray.cloudpickle.loads(self.ray.get(call))
        if name in self.actors:
            self.actors[name].heard = self.clock()
        for text in warnings:
            self.warn_once(name, text)
        if failure:
            raise FAILURES[failure](reason)
        return result

    def warn_once(self, name: str, text: str) -> None:
        """Log a warning of an actor, once for all actors of its machine."""
        text = f"{self.cache.machines[name]}: {text}"
        if text not in self.warned:
            self.warned.add(text)
            logger.warning("cluster: %s", text)

    def count_failure(self, actor: ActorHandle, error: BaseException) -> None:
        """Count an actor that died before it was ready. After five in a row, give up its machine.

        If other actors of the machine are ready, only the actor's GPU is given up.
        """
        count, last = self.failures.get(actor.node_id, (0, -math.inf))
        # Actors that end together, for example with a machine, count once.
        if actor.since > last:
            count += 1
        self.failures[actor.node_id] = count, self.clock()
        # Its process may be alive, if only a call failed.
        self.ray.kill(actor.handle)
        if actor.node_id in self.nodes:
            reason = f"its processes end before they are ready ({last_line(error)}); see its disk and its logs"
            if count < LARGEST_TRIES:
                logger.warning("cluster: %s: %s", self.machine(actor.node_id), reason)
            elif actor.gpu and any(other.node_id == actor.node_id for other in self.actors.values()):
                self.failures.pop(actor.node_id)
                self.close_place(actor, ClusterError(reason))
            else:
                self.refuse(actor, ClusterError(reason))

    def fail(self, actor: ActorHandle, error: BaseException) -> None:
        """Kill an actor whose work failed with `error`, and replace it if the next one may succeed.

        A machine that lacks a file or a library is given up at once. A GPU is given up after two actors in a row that
        report another error, or five that die, hang or lose the GPU. Its count starts again with each chunk that it
        finishes.
        """
        if actor not in self.held:
            return
        lost = isinstance(error, DriverError | TimeoutError | self.ray.exceptions.RayError)
        count, limit = (self.losses, LARGEST_TRIES) if lost else (self.errors, LARGEST_ERRORS)
        count[actor.place] += 1
        if isinstance(error, MachineError):
            self.refuse(actor, error)
        elif count[actor.place] >= limit:
            self.close_place(actor, error)
        else:
            self.drop(actor, error)

    def reset(self, actor: ActorHandle) -> None:
        """Count the failures of a GPU from zero."""
        self.losses.pop(actor.place, None)
        self.errors.pop(actor.place, None)

    def close_place(self, actor: ActorHandle, error: BaseException) -> None:
        """Start no more actors on the GPU of `actor`, and refuse its machine if that was the last one."""
        self.closed[actor.place] += 1
        self.reset(actor)
        if self.capacity(actor.node_id) <= 0:
            self.refuse(actor, error)
        else:
            logger.error("cluster: %s is left out: %s", actor.name, last_line(error))
            self.end(actor)

    def refuse(self, actor: ActorHandle, cause: BaseException) -> None:
        """Start no more actors on the actor's machine, because another one would fail in the same way."""
        name = actor.name or self.machine(actor.node_id)
        if actor.node_id not in self.refused:
            self.refused[actor.node_id] = with_name(name, cause)
            logger.error("cluster: %s cannot work: %s", name, cause)
        # Kill requested actors that Ray might place on this machine.
        for call, other in list(self.asked.items()):
            if other.node_id in ("", actor.node_id):
                self.ray.kill(self.asked.pop(call).handle)
        self.end(actor)

    def drop(self, actor: ActorHandle, reason: BaseException) -> None:
        """Kill an actor that is lost. It is replaced."""
        if actor in self.held:
            logger.warning("cluster: lost %s: %s", actor.name, last_line(reason))
            self.end(actor)

    def end(self, actor: ActorHandle) -> None:
        """Kill an actor. The next check looks for another one."""
        self.last_check = -math.inf
        self.ray.kill(actor.handle)
        self.actors.pop(actor.name, None)
        self.starting = {call: other for call, other in self.starting.items() if other is not actor}
        self.pings = {call: other for call, other in self.pings.items() if other is not actor}

    def close(self) -> None:
        """Leave the actors that have a place to the cache, and end the others."""
        self.cache.actors += self.held
        for actor in (*self.asked.values(), *self.parked):
            self.ray.kill(actor.handle)
