"""The actors of a run: where Ray has placed them, which of them live, and which machines cannot generate.

A fleet requests actors on each machine, up to its number of GPUs. So errors can name a machine that cannot start
actors. It requests a few more on any machine, so that the cluster's autoscaler adds machines. An actor that was lost is
replaced. engine/loop.py decides what actors do, and when one counts as lost.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Hashable
from pathlib import Path
from queue import Empty
from typing import Any

from ..batch.plan import counted
from ..errors import ClusterError
from ..runtime.limits import WatchClock
from ..runtime.text import Json, brief, get_logger
from .connection import ACTOR_TIMEOUT, HEALTH_CHECK_INTERVAL, LOADING_TIMEOUT, PLACEMENT_TIMEOUT
from .session import ClusterRun

logger = get_logger(__name__)

# Actors that may be lost one after another, on a GPU without an image between them, or on a machine before they start.
TRIES = 5
# The most actors that are requested on any machine, in addition to one for each free GPU of the cluster.
AHEAD = 8
REMEDY = "choose smaller images, dtype bfloat16, fewer processes on each GPU, or GPUs with more memory"


class ActorError(Exception):
    """The work of an actor failed."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        # The actor and its machine.
        self.name = name


class ActorWorker:
    """An actor as a worker of the loop, from its request to its end. Its replacement is another worker.

    Times are seconds of the fleet's clock.
    """

    # The next chunk is sent while an actor generates.
    depth, can_restart, birth = 2, True, 1

    def __init__(self, handle: Any, node_id: str, now: float) -> None:
        # Ray's handle.
        self.handle = handle
        # The id of its machine. Before Ray has placed it: the requested machine, or "" for any.
        self.node_id = node_id
        self.name = ""
        # Ray's ids of its GPUs on its machine.
        self.gpu = ""
        # When it was requested, and when it last answered. Before its first answer: when it was first asked.
        self.since = self.heard = now
        # Ray's reference of a call that has not ended: the run, the task and the method.
        self.calls: dict[Hashable, tuple[int, int, str]] = {}
        # Its last answer, see Actor.answer.
        self.progress: tuple[int, int, str] = (0, 0, "")
        self.is_loaded = self.is_lost = False

    @property
    def machine(self) -> str:
        return self.node_id

    @property
    def place(self) -> tuple[str, str]:
        return self.node_id, self.gpu

    @property
    def is_busy(self) -> bool:
        return any(name in ("encode", "generate") for _, _, name in self.calls.values())

    def attach(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def send(self, name: str, run: int, task: int, *arguments: Any) -> None:
        from .actor import to_bytes

        # Ray passes the value of a reference only if the reference is an argument itself.
        weights = arguments[1:] if name == "weight" else ()
        packed = to_bytes(arguments[: len(arguments) - len(weights)])
        self.calls[self.handle.call.remote(name, run, task, packed, *weights)] = run, task, name

    def cancel(self, run: int) -> None:
        if self.is_busy:
            self.handle.cancel.remote(run)

    def restart(self) -> None:
        self.fleet.replace(self)

    def leave(self) -> None:
        """Nothing: it may end its task while the next run begins."""


class Fleet:
    """At most `most` actors of a `run`, whose images have `size` as text. Actors of earlier runs come first.

    It is also the queue of the workers' events, because only the thread of the run may call Ray.
    """

    def __init__(self, run: ClusterRun, most: int, size: str) -> None:
        self.ray, self.cluster, self.cache, _, self.on_status = run
        self.cluster.check()
        from .actor import actor_class, describe_code

        self.most, self.size, self.status = self.cluster.limit(most), size, ""
        self.actor_class, self.code = actor_class(), describe_code(Path(__file__).parents[1])
        self.events: deque[tuple] = deque()
        # Actors that Ray has not placed yet, by the reference of their call of `locate`.
        self.asked: dict[Hashable, ActorWorker] = {}
        # Actors that have a place.
        self.held: list[ActorWorker] = []
        # Actors that have not answered yet, by the reference of their call of `answer`.
        self.pings: dict[Hashable, ActorWorker] = {}
        # Id of a machine that cannot generate: the reason.
        self.refused: dict[str, ClusterError] = {}
        # Id of a machine: the number of failed starts in a row, and the time of the last one.
        self.failures: dict[str, tuple[int, float]] = {}
        # By place: its lost actors since its last image, and how many actors fewer than usual it may have.
        self.losses: Counter[tuple[str, str]] = Counter()
        self.closed: Counter[tuple[str, str]] = Counter()
        # Idle actors in closed places. They occupy these places, so that Ray uses others.
        self.parked: list[ActorWorker] = []
        self.clock = WatchClock()
        self.warned: set[str] = set()
        # Ids of the machines that ever had an actor.
        self.placed: set[str] = set()
        self.last_check = self.last_held = self.clock()
        self.nodes = self.living()
        for worker in self.cache.workers:
            if worker.node_id in self.nodes:
                worker.heard = self.clock()
                self.held.append(worker)
        self.cache.workers = []
        self.check_health()

    def living(self) -> Json:
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    def slots(self, node_id: str) -> int:
        resources = self.nodes.get(node_id, {}).get("Resources", {})
        return min(int(resources.get(name, 0) / amount) for name, amount in self.cluster.needs.items())

    def capacity(self, node_id: str) -> int:
        """Return how many actors a machine has room for, without closed places."""
        return self.slots(node_id) - sum(count for (node, _), count in self.closed.items() if node == node_id)

    def machine(self, node_id: str) -> str:
        return f"{self.nodes[node_id]['NodeManagerHostname']} ({node_id[:6]})"

    def workers(self) -> list[ActorWorker]:
        """Return the actors that have a place."""
        now = self.clock()
        # A dead machine counts as able, because it may come back.
        able = self.placed | {node for node in self.nodes if self.capacity(node)}
        if self.held:
            self.last_held = now
        elif able and able <= self.refused.keys():
            raise next(iter(self.refused.values()))
        elif now - self.last_held > self.cluster.wait:
            reasons = "".join(f"; {error}" for error in self.refused.values())
            raise ClusterError(
                f"cluster: no GPU of it could be had for {self.cluster.wait:.0f} s{reasons}; "
                "see ray status for what its machines have, and what others use"
            )
        return self.held

    def get(self, timeout: float) -> tuple:
        if not self.events:
            self.look(timeout)
        return self.get_nowait()

    def get_nowait(self) -> tuple:
        if not self.events:
            raise Empty
        return self.events.popleft()

    def look(self, timeout: float) -> None:
        """Read the answers of actors, wait at most `timeout` seconds for the first one, and replace lost actors."""
        calls = {call: worker for worker in self.held for call in worker.calls}
        waiting = [*calls, *self.pings, *self.asked]
        ready: list[Hashable] = []
        if waiting:
            ready, _ = self.ray.wait(waiting, num_returns=len(waiting), timeout=0)
            if not ready:
                ready, _ = self.ray.wait(waiting, num_returns=1, timeout=timeout)
        else:
            time.sleep(timeout)
        if not ready:
            self.report()
        # All answers are read before any actor is judged by its silence.
        for call in ready:
            if call in self.asked:
                self.on_placed(call)
            elif call in self.pings:
                self.on_ping(call)
            elif call in calls:
                self.on_end(calls[call], call)
        if self.clock() - self.last_check > HEALTH_CHECK_INTERVAL:
            self.check_health()

    def check_health(self) -> None:
        """Drop actors whose machine has gone, ping the others, and request as many as are missing."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.nodes = self.living()
        for worker in list(self.held):
            if worker.node_id not in self.nodes:
                logger.warning("cluster: lost %s: its machine has gone", worker.name)
                self.end(worker)
        pinged = list(self.pings.values())
        for worker in self.held:
            if worker not in pinged:
                self.pings[worker.handle.answer.remote()] = worker
                worker.heard = self.clock()
            silence = self.clock() - worker.heard
            # A process that imports or loads may hold Python's lock for long.
            is_loading = not worker.is_loaded or any(name != "generate" for _, _, name in worker.calls.values())
            if silence > (LOADING_TIMEOUT if is_loading else ACTOR_TIMEOUT):
                self.lose(worker, f"it has not answered for {silence:.0f} s")
        # A lost actor moves the next check forward, but this check already looks for a replacement.
        self.last_check = now = self.clock()
        able = {node: count for node in self.nodes if node not in self.refused and (count := self.capacity(node)) > 0}
        for node, room in able.items():
            room = min(room - sum(worker.node_id == node for worker in self.held), self.most - len(self.held))
            waiting = {call: worker for call, worker in self.asked.items() if worker.node_id == node}
            for call in list(waiting)[max(0, room) :]:
                self.ray.kill(self.asked.pop(call).handle)
            able[node] = room - len(waiting)
        patient = [one for one in self.asked.values() if one.node_id and now - one.since < PLACEMENT_TIMEOUT]
        missing = self.most - len(self.held) - len(patient)
        # Each machine gets one actor before any machine gets a second one.
        while missing > 0 and (node := max(able, key=able.__getitem__, default="")) and able[node] > 0:
            self.ask(NodeAffinitySchedulingStrategy(node, soft=False), node)
            able[node] -= 1
            missing -= 1
        ahead = [call for call, worker in self.asked.items() if not worker.node_id]
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
        self.asked[handle.locate.remote()] = ActorWorker(handle, node_id, self.clock())

    def anywhere(self) -> object:
        """Return where Ray may place an actor: on any machine that has not refused."""
        from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

        # Ray labels each node with its id. The name of that label depends on Ray's version.
        all_labels = (self.nodes.get(node, {}).get("Labels", {}).items() for node in self.refused)
        labels = {name for items in all_labels for name, value in items if value in self.refused}
        return NodeLabelSchedulingStrategy(hard={name: NotIn(*self.refused) for name in labels}) if labels else "SPREAD"

    def report(self) -> None:
        """Show why the run waits, if that has changed. Once an actor is ready, nothing is shown."""
        able = [room for room in map(self.capacity, self.nodes) if room]
        if any(worker.is_loaded for worker in self.held):
            status = ""
        elif self.held:
            places = sorted({self.machine(worker.node_id) for worker in self.held})
            status = f"{counted(len(self.held), 'worker')} loading on {brief(', '.join(places), 200)}"
        elif able:
            workers, machines = counted(min(self.most, sum(able)), "worker"), counted(len(able), "machine")
            status = f"{workers} starting on {machines} with {counted(sum(able), 'GPU')}"
        else:
            status = (
                f"no GPU among the cluster's {counted(len(self.nodes), 'machine')}; waiting {self.cluster.wait:.0f} s "
                "for a machine with one, or one that ray start --num-gpus=1 lets use its CPU"
            )
        if status and status != self.status:
            self.on_status(status)
        self.status = status

    def on_placed(self, call: Hashable) -> None:
        """Let an actor that Ray has placed work, if it runs the same code as the driver."""
        from .actor import CODE

        worker = self.asked.pop(call)
        try:
            worker.node_id, worker.gpu, code = self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            self.count_failure(worker, last_line(error))
            return
        if worker.node_id not in self.nodes:
            # It has just joined. Machines that have gone stay until the next check, which drops their actors.
            self.nodes = {**self.nodes, **self.living()}
        if worker.node_id in self.refused or worker.node_id not in self.nodes or len(self.held) >= self.most:
            self.ray.kill(worker.handle)
            return
        room = max(1, int(1 / self.cluster.gpus_per_worker)) - self.closed[worker.place]
        if self.closed[worker.place] and sum(other.place == worker.place for other in self.held) >= room:
            self.parked.append(worker)
            self.last_check = -math.inf
            return
        self.failures.pop(worker.node_id, None)
        self.placed.add(worker.node_id)
        machine = self.machine(worker.node_id)
        worker.name = f"{machine[:-1]}, actor {len(self.cache.machines) + 1})"
        self.cache.machines[worker.name] = machine
        differing = [
            f"{name} {code.get(name)}, not {version}"
            for name, version in self.code.items()
            if code.get(name) != version
        ]
        text = f"it runs {', '.join(differing)} as the driver does"
        if any(name.startswith(CODE) for name in differing):
            self.refuse(worker, f"{text}; remove the one that its Python finds first")
            return
        if differing:
            self.warn_once(worker, f"{text}; its images may differ in the last bits")
        # An equal share of the machine's cores, as Ray counts them.
        cores = int(self.nodes[worker.node_id]["Resources"].get("CPU", 0))
        worker.handle.open.remote(max(1, cores // max(1, self.slots(worker.node_id))))
        worker.heard = self.clock()
        self.held.append(worker)

    def count_failure(self, worker: ActorWorker, reason: str) -> None:
        """Count an actor that died before it was placed. Its machine is given up after five in a row."""
        count, last = self.failures.get(worker.node_id, (0, -math.inf))
        # Actors that end together, for example with a machine, count once.
        self.failures[worker.node_id] = count + (worker.since > last), self.clock()
        # Its process may be alive, if only a call failed.
        self.ray.kill(worker.handle)
        if worker.node_id in self.nodes:
            reason = f"its processes end before they are ready ({reason}); see its disk and its logs"
            if count + 1 < TRIES:
                logger.warning("cluster: %s: %s", self.machine(worker.node_id), reason)
            else:
                self.refuse(worker, reason)

    def on_ping(self, call: Hashable) -> None:
        worker = self.pings.pop(call)
        try:
            progress = self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            self.lose(worker, last_line(error))
            return
        worker.heard = self.clock()
        run, task, _ = next(iter(worker.calls.values()), (0, 0, ""))
        if progress[0] != task:
            # Arguments or results of the call are on their way.
            self.events.append((worker, 1, run, "alive"))
        elif progress != worker.progress:
            self.events.append((worker, 1, run, progress[2]))
        worker.progress = progress

    def on_end(self, worker: ActorWorker, call: Hashable) -> None:
        from .actor import from_bytes

        run, _, method = worker.calls.pop(call)
        try:
            events = from_bytes(self.ray.get(call))
        except self.ray.exceptions.RayError as error:
            self.lose(worker, last_line(error))
            return
        worker.heard = self.clock()
        for name, *values in events:
            if name == "log":
                self.warn_once(worker, values[1])
                continue
            if name == "failed":
                task, kind, text, error_class = values
                if kind == "refused" and (method, error_class) != ("generate", "InputError"):
                    self.refuse(worker, text)
                    continue
                if kind == "memory":
                    work = (
                        f"for a single image of {self.size} pixels" if method == "generate" else "while the model loads"
                    )
                    text = f"memory runs out {work} ({brief(text)}); {REMEDY}"
                if kind != "refused":
                    values = [task, kind, text, ActorError(worker.name, text)]
            elif name == "image":
                self.losses.pop(worker.place, None)
            elif name == "done" and method == "load":
                worker.is_loaded = True
                if values[2] is not None:
                    # The actor assumes that it has a whole GPU.
                    values[2] = max(1, int(values[2] * min(1, self.cluster.gpus_per_worker)))
            self.events.append((worker, 1, run, name, *values))

    def warn_once(self, worker: ActorWorker, text: str) -> None:
        """Log a warning of an actor, once for all actors of its machine."""
        text = f"{self.cache.machines[worker.name]}: {text}"
        if text not in self.warned:
            self.warned.add(text)
            logger.warning("cluster: %s", text)

    def lose(self, worker: ActorWorker, reason: str) -> None:
        """Report the loss of an actor once. The loop then calls `replace`."""
        if worker in self.held and not worker.is_lost:
            worker.is_lost = True
            self.events.append((worker, 1, 0, "lost", reason))

    def replace(self, worker: ActorWorker) -> None:
        """Kill a lost actor. Its GPU gets another one, unless it has lost too many in a row."""
        self.end(worker)
        self.losses[worker.place] += 1
        if self.losses[worker.place] >= TRIES:
            text = f"{worker.name}: lost {TRIES} processes in a row without an image; see its logs"
            logger.error("cluster: %s", text)
            self.close_place(worker, ClusterError(text))

    def close_place(self, worker: ActorWorker, error: BaseException) -> None:
        """Start no more actors on the GPU of `worker`, and refuse its machine if that was the last one."""
        self.closed[worker.place] += 1
        self.losses.pop(worker.place, None)
        self.end(worker)
        if self.capacity(worker.node_id) <= 0:
            self.refuse(worker, str(error))

    def refuse(self, worker: ActorWorker, reason: str) -> None:
        """Start no more actors on the machine of `worker`, because another one would fail in the same way."""
        node_id, name = worker.node_id, worker.name or self.machine(worker.node_id)
        if node_id not in self.refused:
            self.refused[node_id] = ClusterError(reason if name in reason else f"{name}: {reason}")
            logger.error("cluster: %s cannot work: %s", name, reason.removeprefix(f"{name}: "))
        # Kill requested actors that Ray might place on this machine.
        for call, other in list(self.asked.items()):
            if other.node_id in ("", node_id):
                self.ray.kill(self.asked.pop(call).handle)
        self.end(worker)

    def end(self, worker: ActorWorker) -> None:
        """Kill an actor. The next check looks for another one."""
        self.last_check = -math.inf
        self.ray.kill(worker.handle)
        self.held = [other for other in self.held if other is not worker]
        self.pings = {call: other for call, other in self.pings.items() if other is not worker}

    def close(self, cancelled: bool) -> None:
        """Leave the actors to the cache. If the run was cancelled, the busy ones end at once, within their step."""
        for worker in list(self.held):
            if worker.is_lost or (cancelled and worker.is_busy):
                self.end(worker)
        self.cache.workers += self.held
        for worker in (*self.asked.values(), *self.parked):
            self.ray.kill(worker.handle)


def last_line(error: BaseException) -> str:
    """Return the last line of an error of Ray. It has the reason, and the lines before it explain the error class."""
    lines = [line.strip() for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    return brief(lines[-1] if lines else type(error).__name__, 300)
