"""The driver's view of actors: their machines, the actors that stay between runs, and the errors of their work."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from ..batch.progress import OnStatus, no_status
from ..errors import ClusterError
from ..runtime.cancellation import Poll, no_poll
from ..runtime.text import brief
from .connection import ClusterSettings

T = TypeVar("T")


@dataclass(eq=False)
class ActorHandle:
    """An actor of a pool. Times are seconds of the pool's clock."""

    # Ray's handle.
    handle: Any
    # When it was requested. After that: when it began to load.
    since: float
    # Id of its machine. Before Ray has placed it: the requested machine, or "" for any.
    node_id: str = ""
    name: str = ""
    # Ray's ids of its GPUs on its machine.
    gpu: str = ""
    # When it last responded. Before its first response: when the first ping was sent.
    heard: float = 0.0
    # Whether it has been ready before.
    loaded: bool = False

    @property
    def place(self) -> tuple[str, str]:
        """The machine and the GPU."""
        return self.node_id, self.gpu


@dataclass
class ActorCache:
    """Actors with the same loaded models, which stay between runs."""

    # Name of a weight of the transformer that differs from the file: Ray's reference to its value.
    changed: Mapping[str, object] = field(default_factory=dict)
    actors: list[ActorHandle] = field(default_factory=list)
    # Name of each actor that was ever placed: its machine, as text.
    machines: dict[str, str] = field(default_factory=dict)

    def end(self, ray: ModuleType) -> None:
        """Kill the actors."""
        for actor in self.actors:
            ray.kill(actor.handle)
        self.actors = []


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
    references = {}
    for name, weight in changed.items():
        poll()
        references[name] = ray.put(ray.cloudpickle.dumps(weight))
    return ActorCache(references)


class ActorError(Exception):
    """An error in an actor. Without a more specific class, the cause may be the actor or the work."""


class DriverError(ActorError):
    """The accelerator of an actor failed."""


class MachineError(ActorError):
    """A machine lacks something: a file, a library, space on a disk."""


def with_name(name: str, cause: BaseException) -> ClusterError:
    """Return the error of an actor or machine, with its name."""
    return cause if isinstance(cause, ClusterError) and name in str(cause) else ClusterError(f"{name}: {cause}")


def last_line(error: BaseException) -> str:
    """Return the last line of an error of Ray. It has the reason, and the lines before it explain the error class."""
    lines = [line.strip() for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    return brief(lines[-1] if lines else type(error).__name__, 300)
