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

from ..batch.progress import OnStatus, no_status
from ..errors import ClusterError, InputError, VersionError
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_number
from ..runtime.limits import LIMITS
from ..runtime.text import Json, brief
from .background import CLIENT_TIMEOUT, CONNECT_TIMEOUT, GPU_TIMEOUT, call_in_thread

if TYPE_CHECKING:
    from ray.client_builder import ClientContext

T = TypeVar("T")
CLIENT = "ray://"
# Tokens exist since 2.52, and earlier versions ignore them silently. 2.54 fixes CVE-2026-27482.
OLDEST_RAY = "2.54"
# The namespace and the job name of a run in the cluster.
NAMESPACE = "sana"
# The most GPUs of a run, and the most processes on one GPU.
LARGEST = 10_000


class ClusterSettings(NamedTuple):
    """A Ray cluster, the part of it that a run may use, and the timeouts of a run."""

    address: str = "auto"
    # The most GPUs of a run. None: all.
    gpus: int | None = None
    # GPUs that each actor reserves. Below 1, several actors share a GPU.
    gpus_per_worker: float = 1.0
    # Ray's custom resources that each actor reserves: (name, amount).
    resources: tuple[tuple[str, float], ...] = ()
    # Seconds before a chunk can count as hanging.
    grace: float = LIMITS.grace
    # Seconds that a run without any actor waits for Ray to place one.
    wait: float = GPU_TIMEOUT

    def check(self) -> None:
        """Raise InputError for numbers out of range, and for a `gpus_per_worker` such as 1.5."""
        if self.gpus is not None:
            check_number("gpus", self.gpus, 1, LARGEST)
        check_number("gpus_per_worker", self.gpus_per_worker, 1 / LARGEST, LARGEST)
        if self.gpus_per_worker > 1 and self.gpus_per_worker % 1:
            raise InputError(f"gpus_per_worker: got {self.gpus_per_worker}, expected a whole number or less than one")
        for name, amount in self.resources:
            check_number(f"resource {name}", amount, 1 / LARGEST, LARGEST)

    @property
    def needs(self) -> dict[str, float]:
        """The resources that an actor reserves on its machine, by Ray's names."""
        return {"GPU": self.gpus_per_worker, **dict(self.resources)}

    def limit(self, most: int) -> int:
        """Return how many actors a run may have that can use at most `most`."""
        return most if self.gpus is None else min(most, max(1, int(self.gpus / self.gpus_per_worker)))


@contextmanager
def connected(address: str, poll: Poll = no_poll, on_status: OnStatus = no_status) -> Iterator[ModuleType]:
    """Make this process a driver of the cluster, and disconnect it at the end of the context.

    A process that was connected before stays connected. `poll` is called twice a second until the cluster answers, and
    cancels by raising. Raises InputError or VersionError if ray is not installed or too old, and ClusterError if the
    cluster does not answer.
    """
    ray = import_ray()
    before = ray.is_initialized()
    if not before:
        # `ray list jobs` shows this name. Ray Client has no such option.
        options = {**run_options(), "job_config": ray.job_config.JobConfig(metadata={"job_name": NAMESPACE})}
        on_status(f"connecting to the cluster, {address}")
        reach(address, lambda: ray.init(address, **options), lambda context: ray.shutdown(), poll, CONNECT_TIMEOUT)
        if threading.current_thread() is threading.main_thread():
            # Ray has replaced Python's handler by a native one, which prints a stack trace or aborts. Restore it.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    try:
        yield ray
    finally:
        # Ray ends a connected driver together with the cluster, and this process may continue for long.
        if not before:
            ray.shutdown()


def import_ray() -> ModuleType:
    """Return ray. Raises InputError if it is not installed, and VersionError if it is too old."""
    from packaging.version import Version

    try:
        import ray
    except ImportError:
        raise InputError("cluster: ray is not installed on this machine; pip install '.[cluster]'") from None
    if Version(ray.__version__) < Version(OLDEST_RAY):
        raise VersionError(
            f"cluster: got Ray {ray.__version__}, expected {OLDEST_RAY} or newer, which checks tokens; install one "
            "version on all machines"
        )
    return ray


def connect_client(address: str, poll: Poll = no_poll, on_status: OnStatus = no_status) -> ClientContext:
    """Return the context of a connection through Ray Client, at an address that begins with ray://.

    Inside of `with context`, calls of ray in that thread use this connection. `context.disconnect()` ends it. `poll`
    and the errors are as in `connected`. Raises InputError also if Ray's client is not installed.
    """
    ray = import_ray()
    try:
        import grpc  # noqa: F401
    except ImportError:
        raise InputError("cluster: ray is installed without its client; pip install 'ray[client]'") from None
    # This process may have other connections, even a lost one.
    options = {**run_options(), "allow_multiple": True}
    on_status(f"connecting to the cluster, {address}")
    return reach(
        address, lambda: ray.init(address, **options), lambda context: context.disconnect(), poll, CLIENT_TIMEOUT
    )


def run_options() -> Json:
    """Return the options of `ray.init`, which send this copy of the package to the machines.

    The package is in the run's working directory. Without a working directory, Ray puts the current folder of this
    process first on the machines' import path, and another checkout may be there.
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
    """Connect to `address` with `work`. Returns its result. Raises ClusterError after `timeout` seconds."""
    import ray

    try:
        return call_in_thread(work, undo, poll, timeout)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        # Ray's error recommends command line options that we do not have.
        text = brief(error)
        text = "no Ray runs on this machine" if "Could not find any running Ray instance" in text else text
        raise ClusterError(
            f"cluster: nobody answers at {address} ({text}); start Ray there, correct the address, or set its token"
        ) from None
