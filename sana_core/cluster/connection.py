"""How a process reaches a Ray cluster: as a driver of its own, or through Ray Client, whose driver is on the head.

Ray's calls run in a thread that may hang, so that the caller can always cancel. Timeouts and intervals are in seconds.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, Full, Queue
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..batch.plan import OnStatus, no_status
from ..errors import ClusterError, InputError, VersionError
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_number
from ..runtime.limits import LIMITS, WatchClock
from ..runtime.text import Json, brief

if TYPE_CHECKING:
    from ray.client_builder import ClientContext

# Connecting a driver to the head, which may be busy. If there is no head, Ray itself would try for longer.
CONNECT_TIMEOUT = 40.0
# Connecting Ray Client. The head starts a process for the client, slowly if it is busy. If there is no head, Ray gives
# up after 30 s.
CLIENT_TIMEOUT = 120.0
# A call of Ray. No call takes this long while the head is alive. Ray itself gives up after 90 s.
CALL_TIMEOUT = 40.0
# The first call on a connection that was idle.
PROBE_TIMEOUT = 5.0
# How long a server keeps idle actors after a run. They keep their GPUs and their loaded models.
ACTOR_IDLE_TIMEOUT = 300.0
# How long a run waits for a GPU: longer than idle actors of another run keep it.
GPU_TIMEOUT = 2 * ACTOR_IDLE_TIMEOUT
# How long Ray may take to place an actor on a machine, before another machine is requested too.
PLACEMENT_TIMEOUT = 10.0
# How long an actor may be silent before it counts as hung, when it is ready and while it loads from a slow disk.
ACTOR_TIMEOUT, LOADING_TIMEOUT = 30.0, 300.0
# The time between two calls of a poll, and between two checks of the machines and actors.
POLL_INTERVAL, HEALTH_CHECK_INTERVAL = 0.5, 3.0

T = TypeVar("T")
# Results that wait for the caller. Then the work pauses, so that a slow disk of the caller bounds the memory.
BACKLOG = 32


class Abandoned(Exception):
    """The caller does not wait for the work any more."""


class LostError(TimeoutError):
    """The work has not responded for too long, or its connection is lost."""


def iterate_in_thread(
    work: Callable[[Poll], Generator[T, None, None]], poll: Poll, timeout: float
) -> Generator[T, None, None]:
    """Run the generator `work(alive)` in a thread, and yield its results.

    The generator must call `alive` often. `alive` raises Abandoned when the caller does not wait any more. `poll` is
    called twice a second in this thread, and cancels by raising. Raises the errors of the generator, and LostError if
    `alive` is not called for `timeout` seconds. Time in which the caller does not wait for a result, or in which this
    process is stopped, does not count.
    """
    results: Queue[tuple[Any, BaseException | None]] = Queue(BACKLOG)
    abandoned = threading.Event()
    called = threading.Event()

    def alive() -> None:
        called.set()
        if abandoned.is_set():
            raise Abandoned

    def put(result: Any, error: BaseException | None = None) -> None:
        while True:
            try:
                results.put((result, error), timeout=POLL_INTERVAL)
                return
            except Full:
                alive()

    def run() -> None:
        ending: BaseException = StopIteration()
        try:
            with closing(work(alive)) as generated:
                for result in generated:
                    put(result)
        except BaseException as error:
            ending = error
        with suppress(Abandoned):
            put(None, ending)

    threading.Thread(target=run, name="sana cluster", daemon=True).start()
    clock = WatchClock()
    last_alive = clock()
    try:
        while True:
            poll()
            try:
                result, error = results.get(timeout=POLL_INTERVAL)
            except Empty:
                if called.is_set():
                    called.clear()
                    last_alive = clock()
                elif clock() - last_alive > timeout:
                    raise LostError(f"no answer for {timeout:.0f} s") from None
                continue
            last_alive = clock()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield result
    finally:
        abandoned.set()


def call_in_thread(work: Callable[[], T], undo: Callable[[T], object], poll: Poll, timeout: float) -> T:
    """Return the result of `work`, which runs in a thread, because calls of Ray may wait for minutes.

    `poll` cancels by raising. Raises the error of `work`, and LostError after `timeout` seconds. If the result arrives
    when nobody waits any more, it is passed to `undo`.
    """

    def once(alive: Poll) -> Generator[T, None, None]:
        result = work()
        try:
            alive()
        except Abandoned:
            undo(result)
            raise
        yield result

    return next(iterate_in_thread(once, poll, timeout))


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
