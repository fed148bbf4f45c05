"""A replacement of Ray in virtual time: machines with GPUs, on which actors start, work, fail, hang and die.

The fleet and the loop are the real ones. A real cluster cannot stop the clock, break a GPU, or fail at each
call.
"""

import itertools
import math
from types import SimpleNamespace

import torch
from ray.exceptions import ActorDiedError, RayError

from sana_core.batch.pipeline import SamplingSettings
from sana_core.batch.plan import WorkerReport, Workload, batch_images
from sana_core.cluster import actor, fleet
from sana_core.cluster.batch import generate_with
from sana_core.cluster.connection import ClusterSettings
from sana_core.cluster.session import ActorCache, ClusterRun
from sana_core.engine.body import Job
from sana_core.runtime import limits

# ids of machines
A, B, C, D = (letter * 56 for letter in "abcd")
CODE = {"code of sana_core": "the same"}


class Reference:
    """The result of a call: a value or an error, from a moment on."""

    def __init__(self, ready=math.inf, value=None, error=None):
        self.ready, self.value, self.error = ready, value, error


class Remote:
    """A method of a handle, called as in Ray: handle.method.remote(...)."""

    def __init__(self, function):
        self.remote = function


class Handle:
    """An actor. `place` is its machine and its GPU, once it has one; `hung` processes answer nothing."""

    def __init__(self, cluster, strategy):
        self.cluster, self.strategy, self.number = cluster, strategy, next(cluster.numbers)
        self.place, self.hung, self.dead, self.free = None, False, False, 0.0
        self.tasks = []  # when each task ends, and its number
        self.located, self.references = Reference(), []
        self.locate, self.answer, self.call = Remote(self.on_locate), Remote(self.on_answer), Remote(self.on_call)
        self.open, self.cancel = Remote(cluster.threads.append), Remote(lambda run: None)

    def reference(self, ready, value=None, error=None):
        if self.dead or self.hung:
            ready, error = (self.cluster.now, ActorDiedError()) if self.dead else (math.inf, None)
        self.references.append(Reference(ready, value, error))
        return self.references[-1]

    def on_locate(self):
        self.references.append(self.located)
        self.cluster.place_actors()
        return self.located

    def on_answer(self):
        task = next((task for end, task in self.tasks if end > self.cluster.now), 0)
        return self.reference(self.cluster.now + 0.01, (task, 0, "alive"))

    def on_call(self, name, run, task, arguments, *weights):
        """Do the call after those that the actor has. The behaviour of the cluster decides how long it takes, and how
        it ends: ("", result), (kind of failure, reason), "dies", "stops" (no answer, not even to a ping) or "hangs"
        (answers to a ping alone)."""
        if name == "load":
            self.cluster.loaded.append(self)
        arguments = actor.from_bytes(arguments)
        seconds, end = self.cluster.behaviour(self, name, arguments)
        self.free = max(self.free, self.cluster.now) + seconds
        if end == "dies":
            reference = self.reference(math.inf)
            self.cluster.events.append((self.free, self.die))
        elif end in ("stops", "hangs"):
            self.free = math.inf
            reference = self.reference(math.inf)
            self.hung = end == "stops"
        else:
            failure, value = end
            events = [("failed", task, failure, value, "RuntimeError")] if failure else []
            if not failure and name == "generate":
                events = [("image", image[0], content) for image, content in zip(arguments[0], value, strict=True)]
            if not failure:
                events.append(("done", task, seconds, value if name == "load" else None))
            reference = self.reference(self.free + self.cluster.transit, actor.to_bytes(events))
        self.tasks.append((self.free, task))
        return reference

    def die(self):
        if not self.dead:
            self.dead = True
            for reference in self.references:
                if reference.ready > self.cluster.now:
                    reference.ready, reference.error = self.cluster.now, ActorDiedError()
            self.cluster.place_actors()


class FakeRay:
    """`machines` has the number of GPUs of each machine by its id.

    `behaviour(handle, method, arguments)` returns how many seconds a call takes and how it ends, see `Handle.on_call`.
    """

    def __init__(self, machines, behaviour, seconds_to_start=2.0):
        self.machines, self.behaviour, self.seconds_to_start = dict(machines), behaviour, seconds_to_start
        self.now, self.started, self.numbers = 0.0, [], itertools.count(1)
        self.loaded = []  # the actors that were told to load, in their order
        self.threads = []  # the numbers of threads of actors
        self.events = []  # (time, function)
        self.transit = 0.0  # seconds until the result of a call arrives
        self.deaf = 0  # this many looks see nothing, as after a stop of the process
        self.exceptions = SimpleNamespace(RayError=RayError)

    def install(self, monkeypatch):
        """Use this cluster, and its time, in the fleet."""
        virtual = SimpleNamespace(monotonic=lambda: self.now, sleep=self.advance)
        monkeypatch.setattr(limits, "time", virtual)
        monkeypatch.setattr(fleet, "time", virtual)
        monkeypatch.setattr(actor, "describe_code", lambda folder: CODE)
        monkeypatch.setattr(actor, "actor_class", lambda: SimpleNamespace(options=self.options))
        return self

    def options(self, scheduling_strategy, **needs):
        def remote():
            self.started.append(Handle(self, scheduling_strategy))
            return self.started[-1]

        return SimpleNamespace(remote=remote)

    def place_actors(self):
        """Place the actors that wait, each on the first free GPU that it may have."""
        for handle in self.started:
            if handle.place or handle.dead:
                continue
            occupied = {other.place for other in self.started if other.place and not other.dead}
            only = getattr(handle.strategy, "node_id", None)
            free = (
                (machine, gpu)
                for machine, gpus in self.machines.items()
                for gpu in map(str, range(gpus))
                if (machine, gpu) not in occupied and only in (None, machine)
            )
            handle.place = next(free, None)
            if handle.place:
                handle.located.ready = self.now + self.seconds_to_start
                handle.located.value = (*handle.place, CODE)

    def remove(self, machine):
        """The machine dies. It is no longer listed, and five seconds later the calls of its actors fail."""
        self.machines.pop(machine)
        for handle in self.started:
            if handle.place and handle.place[0] == machine and not handle.dead:
                handle.hung = True
                for reference in handle.references:
                    if reference.ready > self.now:
                        reference.ready = math.inf
                self.events.append((self.now + 5, handle.die))

    def advance(self, seconds):
        """Let time pass, with the events in it."""
        until = self.now + seconds
        while due := [event for event in self.events if event[0] <= until]:
            event = min(due, key=lambda event: event[0])
            self.events.remove(event)
            self.now = max(self.now, event[0])
            event[1]()
        self.now = max(self.now, until)

    def nodes(self):
        constant = {"Alive": True, "NodeManagerHostname": "host", "Labels": {}}
        return [
            {**constant, "NodeID": machine, "Resources": {"GPU": float(gpus), "CPU": 8.0}}
            for machine, gpus in self.machines.items()
        ]

    def cluster_resources(self):
        return {"GPU": float(sum(self.machines.values()))}

    def wait(self, references, num_returns, timeout):
        if self.deaf:
            self.deaf -= 1
            return [], references
        moments = [reference.ready for reference in references] + [moment for moment, _ in self.events]
        if not any(reference.ready <= self.now for reference in references):
            self.advance(min(timeout, max(0.0, min(moments) - self.now)))
        ready = [reference for reference in references if reference.ready <= self.now][:num_returns]
        return ready, [reference for reference in references if reference not in ready]

    def get(self, reference):
        assert reference.ready <= self.now
        if reference.error:
            raise reference.error
        return reference.value

    def kill(self, handle):
        handle.die()


def works(seconds=1.0, loading=5.0):
    """Return the behaviour of actors that never fail. The content of an image is its number and the actor's place."""

    def behaviour(handle, method, arguments):
        if method != "generate":
            return (loading if method == "load" else 0.1), ("", 32)
        images = arguments[0]
        return seconds * len(images), ("", [(image[0], handle.place) for image in images])

    return behaviour


def generate(cluster, images, chunk=1, cache=None, **share):
    """Yield the images of a batch on a FakeRay that is installed, by the actors of `cache` first."""
    text = torch.zeros(1, 1, 1), torch.ones(1, 1)
    workload = Workload(["a cat"], batch_images(1, images, 0), chunk, encoded=({"a cat": text}, text))
    run = ClusterRun(cluster, ClusterSettings("fake", **share), cache or ActorCache())
    return generate_with(run, Job(SamplingSettings(4096, 2048), "sana"), workload, WorkerReport())
