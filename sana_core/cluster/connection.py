"""How a process reaches a Ray cluster: as a driver of its own, or through Ray Client, whose driver is on the head."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..batch.loop import GRACE
from ..batch.progress import OnStatus, no_status
from ..errors import ClusterError, InputError
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_number
from ..runtime.text import Json, brief
from .background import call_in_thread
from .timeouts import CLIENT_TIMEOUT, CONNECT_TIMEOUT, GPU_TIMEOUT

if TYPE_CHECKING:
    from ray.client_builder import ClientContext

T = TypeVar("T")
CLIENT = "ray://"
# what a run is called among the cluster's jobs
NAMESPACE = "sana"
# GPUs of a run, or processes on one
LARGEST = 10_000


class ClusterSettings(NamedTuple):
    """Which Ray cluster generates, with how much of it, and how long a run waits for it.

    A run takes at most `gpus` GPUs, all without it, and each of its processes asks Ray for `gpus_per_worker` and for
    the custom `resources`, amounts by name. No chunk is thought to hang before `grace` seconds; `wait` are those for a
    first actor, or for another after the last one died, to be placed on a machine.
    """

    address: str = "auto"
    gpus: int | None = None
    gpus_per_worker: float = 1.0
    resources: tuple[tuple[str, float], ...] = ()
    grace: float = GRACE
    wait: float = GPU_TIMEOUT

    def check(self) -> None:
        """Raise InputError for numbers out of range, and for what no GPU can be divided into."""
        if self.gpus is not None:
            check_number("gpus", self.gpus, 1, LARGEST)
        check_number("gpus_per_worker", self.gpus_per_worker, 1 / LARGEST, LARGEST)
        if self.gpus_per_worker > 1 and self.gpus_per_worker % 1:
            raise InputError(f"gpus_per_worker: got {self.gpus_per_worker}, expected a whole number or less than one")
        for name, amount in self.resources:
            check_number(f"resource {name}", amount, 1 / LARGEST, LARGEST)

    @property
    def needs(self) -> dict[str, float]:
        """What an actor needs of a machine, by Ray's names."""
        return {"GPU": self.gpus_per_worker, **dict(self.resources)}

    def limit(self, most: int) -> int:
        """Return how many actors a run that can use `most` may have."""
        return most if self.gpus is None else min(most, max(1, int(self.gpus / self.gpus_per_worker)))


@contextmanager
def connected(address: str, poll: Poll = no_poll, on_status: OnStatus = no_status) -> Iterator[ModuleType]:
    """A context with ray, this process a driver of the cluster, which Ray ends together with the cluster.

    Whoever was connected before it stays so. `poll`, called twice a second until somebody answers, cancels by raising.
    Raises InputError where ray is not installed, ClusterError where nobody answers.
    """
    ray = import_ray()
    before = ray.is_initialized()
    if not before:
        # what ray list jobs shows; Ray Client takes none
        options = {**run_options(), "job_config": ray.job_config.JobConfig(metadata={"job_name": NAMESPACE})}
        on_status(f"connecting to the cluster, {address}")
        reach(address, lambda: ray.init(address, **options), lambda context: ray.shutdown(), poll, CONNECT_TIMEOUT)
        if threading.current_thread() is threading.main_thread():
            # Ray's native handler, now before Python's, prints a stack trace or aborts
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    try:
        yield ray
    finally:
        # a process that stays, as a server does, would die with the cluster
        if not before:
            ray.shutdown()


def import_ray() -> ModuleType:
    """Return ray. Raises InputError where it is not installed."""
    try:
        import ray
    except ImportError:
        raise InputError("cluster: ray is not installed on this machine; pip install '.[cluster]'") from None
    return ray


def connect_client(address: str, poll: Poll = no_poll, on_status: OnStatus = no_status) -> ClientContext:
    """Return the context of a connection through Ray Client, at an address that begins with ray://.

    What is done with ray inside of `with context` goes there, in that thread alone. Its `disconnect` ends it. Polls and
    raises as `connected` does, and InputError where Ray's client is not installed.
    """
    ray = import_ray()
    try:
        import grpc  # noqa: F401
    except ImportError:
        raise InputError("cluster: ray is installed without its client; pip install 'ray[client]'") from None
    # other connections of this process, one that is lost too, are no part of it
    options = {**run_options(), "allow_multiple": True}
    on_status(f"connecting to the cluster, {address}")
    return reach(
        address, lambda: ray.init(address, **options), lambda context: context.disconnect(), poll, CLIENT_TIMEOUT
    )


def run_options() -> Json:
    """Return what Ray is told of a run: the machines get this very code.

    As their working directory: without one Ray puts that of this process before all else on their path, where another
    checkout may be.
    """
    package = Path(__file__).parents[1]
    excludes = ["/*", "!/.", f"!/{package.name}", "__pycache__"]
    return {
        "runtime_env": {"working_dir": str(package.parent), "excludes": excludes},
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": NAMESPACE,
    }


def reach(address: str, work: Callable[[], T], undo: Callable[[T], object], poll: Poll, timeout: float) -> T:
    """Return what `work` does, which connects to `address`. Raises ClusterError after `timeout` seconds."""
    import ray

    try:
        return call_in_thread(work, undo, poll, timeout)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        # Ray's own advice names flags that are not ours
        text = brief(error)
        text = "no Ray runs on this machine" if "Could not find any running Ray instance" in text else text
        raise ClusterError(
            f"cluster: nobody answers at {address} ({text}); start Ray there, correct the address, or set its token"
        ) from None
