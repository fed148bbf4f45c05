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
    """An actor: what Ray calls it by, where it may be, and since when it is asked for, placed, or asked to answer."""

    handle: Any
    strategy: object
    since: float
    node_id: str = ""
    name: str = ""


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
    """What an actor's work ended with."""


class DriverError(ActorError):
    """An accelerator failed, and not the work on it."""


def with_name(name: str, cause: BaseException) -> ClusterError:
    """Return the error of an actor or machine, with its name."""
    return cause if isinstance(cause, ClusterError) and name in str(cause) else ClusterError(f"{name}: {cause}")


def last_line(error: BaseException) -> str:
    """Return the reason that an error of Ray's gives: its last line, after those that say what it means."""
    lines = [line.strip() for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    return brief(lines[-1] if lines else type(error).__name__, 200)
