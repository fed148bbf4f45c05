"""What a driver knows of actors: where they are, what they keep between runs, and how their work ended."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from ..batch.progress import OnStatus, no_status
from ..checkpoints.files import brief
from ..errors import ClusterError
from ..runtime.cancellation import Poll, no_poll
from .connection import ClusterSettings

T = TypeVar("T")


@dataclass(eq=False)
class ActorHandle:
    """An actor of a pool. Times are seconds of the pool's clock."""

    handle: Any  # Ray's
    strategy: object  # Ray's scheduling strategy
    since: float  # when it was requested, later when it was told to load
    node_id: str = ""  # before it is placed: the requested machine, "" for any
    name: str = ""
    gpu: str = ""  # Ray's ids of its GPUs on its machine
    heard: float = 0.0  # when it last answered, or was asked to answer
    loaded: bool = False  # whether it was ready once

    @property
    def place(self) -> tuple[str, str]:
        """The machine and the GPU."""
        return self.node_id, self.gpu


@dataclass
class ActorCache:
    """Actors that have all loaded the same, between the runs that they generate for.

    `changed` are the weights of the transformer that are not those of the file, as Ray's references, by name.
    """

    changed: Mapping[str, object] = field(default_factory=dict)
    actors: list[ActorHandle] = field(default_factory=list)
    groups: list[object] = field(default_factory=list)  # Ray's placement groups of these actors
    lost: list[ActorHandle] = field(default_factory=list)  # whose GPU is still reserved
    machines: dict[str, str] = field(default_factory=dict)  # in words, of each actor that was ever placed, by its name

    def end(self, ray: ModuleType) -> None:
        """Kill the actors."""
        for actor in self.actors:
            ray.kill(actor.handle)
        for group in self.groups:
            ray.util.remove_placement_group(group)
        self.actors, self.groups, self.lost = [], [], []


class ClusterRun(NamedTuple):
    """What a run has of a cluster: Ray, the share of it that it may take, and the actors that are there already.

    `poll`, called at least twice a second, cancels by raising; `on_status` is told what the run waits for.
    """

    ray: ModuleType
    cluster: ClusterSettings
    cache: ActorCache
    poll: Poll = no_poll
    on_status: OnStatus = no_status


# yields results as they come
Work = Callable[[ClusterRun], Generator[T, None, None]]


def put_weights(ray: ModuleType, changed: Mapping[str, torch.Tensor], poll: Poll = no_poll) -> ActorCache:
    """Return a cache without actors, the `changed` weights on the cluster, which each machine gets once.

    One at a time, so that `poll` can cancel by raising.
    """
    references = {}
    for name, weight in changed.items():
        poll()
        references[name] = ray.put(ray.cloudpickle.dumps(weight))
    return ActorCache(references)


class ActorError(Exception):
    """What an actor's work ended with. Without a more specific class, the actor or the work may be the cause."""


class DriverError(ActorError):
    """An accelerator failed, and not the work on it."""


class MachineError(ActorError):
    """A machine lacks something that the work needs: a file, a library, space on a disk."""


def with_name(name: str, cause: BaseException) -> ClusterError:
    """Return the error of an actor or machine, with its name."""
    return cause if isinstance(cause, ClusterError) and name in str(cause) else ClusterError(f"{name}: {cause}")


def last_line(error: BaseException) -> str:
    """Return the reason that an error of Ray's gives: its last line, after those that say what it means."""
    lines = [line.strip() for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    return brief(lines[-1] if lines else type(error).__name__, 300)
