"""What stays between the runs of a connection: actors with their loaded models, and weights that were sent."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from ..batch.progress import OnStatus, no_status
from ..engine.body import pack
from ..runtime.cancellation import Poll, no_poll
from .connection import ClusterSettings

T = TypeVar("T")


@dataclass
class ActorCache:
    """Actors with the same loaded models."""

    # Name of a weight of the transformer that differs from the file: Ray's reference to its value.
    changed: Mapping[str, object] = field(default_factory=dict)
    # The ActorWorker objects.
    workers: list[Any] = field(default_factory=list)
    # Name of each actor that was ever placed: its machine, as text.
    machines: dict[str, str] = field(default_factory=dict)

    def end(self, ray: ModuleType) -> None:
        """Kill the actors."""
        for worker in self.workers:
            ray.kill(worker.handle)
        self.workers = []


class ClusterRun(NamedTuple):
    """A run on a cluster. `cache` has the actors of earlier runs.

    `poll` is called at least twice a second, and cancels by raising. `on_status` receives a text when the run waits.
    """

    ray: ModuleType
    cluster: ClusterSettings
    cache: ActorCache
    poll: Poll = no_poll
    on_status: OnStatus = no_status


# Yields results in the order in which they finish.
Work = Callable[[ClusterRun], Generator[T, None, None]]


def put_weights(ray: ModuleType, changed: Mapping[str, torch.Tensor], poll: Poll = no_poll) -> ActorCache:
    """Send the `changed` weights to the cluster. Returns a cache with them, without actors.

    The weights are sent one by one, so that `poll` can cancel by raising.
    """
    from .actor import to_bytes

    references = {}
    for name, weight in changed.items():
        poll()
        references[name] = ray.put(to_bytes(pack(weight)))
    return ActorCache(references)
