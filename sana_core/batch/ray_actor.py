"""The actors of a Ray cluster, and what is known of one: a process with one GPU, which keeps what it has loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..polling import Poll, no_poll

# of the histogram of seconds for a picture
BOUNDARIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(eq=False)
class Candidate:
    """An actor: what Ray calls it by, when a pool asked for it or Ray placed it, and then its name and machine."""

    handle: Any
    since: float
    name: str = ""
    node_id: str = ""


@dataclass
class Crew:
    """Actors that have all loaded the same, between the runs that they draw for.

    `changed` are the weights of the transformer that are not those of the file, as Ray's references, by name.
    """

    changed: Mapping[str, Any] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    machines: dict[str, str] = field(default_factory=dict)  # of each that was ever placed, in words, by its name

    def take(self) -> list[Candidate]:
        """Return the actors; the crew has none then."""
        taken, self.candidates = self.candidates, []
        return taken

    def end(self, ray: Any) -> None:
        """Kill the actors."""
        for candidate in self.take():
            ray.kill(candidate.handle)


def hire(ray: Any, changed: Mapping[str, torch.Tensor], poll: Poll = no_poll) -> Crew:
    """Return a crew without actors, the `changed` weights on the cluster, which each machine gets once.

    One at a time, so that `poll` can cancel by raising.
    """
    references = {}
    for name, weight in changed.items():
        poll()
        references[name] = ray.put(weight)
    return Crew(references)


def actor_class(ray: Any) -> Any:
    """Return the actors' class. It is made here, because Ray finds a class of a module by the name of the module.

    What its processes count is among Ray's own metrics, which each machine shows in Prometheus' form.
    """

    class Actor:
        def __init__(self) -> None:
            from ray.util import metrics

            self.worker: Any = None
            self.pictures = metrics.Counter("sana_pictures", description="images made")
            self.failures = metrics.Counter("sana_failures", description="chunks that ended with an error")
            self.seconds = metrics.Histogram(
                "sana_seconds_per_picture", description="seconds for an image", boundaries=list(BOUNDARIES)
            )

        def find_node(self) -> str:
            import ray

            return ray.get_runtime_context().get_node_id()

        def prepare(self, job: dict[str, Any], neighbours: int, names: list[str], *weights: Any) -> int:
            from importlib import import_module

            # as the machines know it
            module = import_module("sana_core.batch.worker")
            if self.worker is not None:
                return self.worker.begin(module.unpack(job))
            worker = module.Worker(job)
            largest = worker.load(neighbours, dict(zip(names, weights, strict=True)))
            self.worker = worker
            return largest

        def draw(self, chunk: list[Any], prompts: list[Any]) -> list[Any]:
            started = time.monotonic()
            try:
                drawn = self.worker.draw(chunk, prompts)
            except BaseException:
                self.failures.inc()
                raise
            self.pictures.inc(len(chunk))
            self.seconds.observe((time.monotonic() - started) / len(chunk))
            return drawn

    return ray.remote(Actor)
