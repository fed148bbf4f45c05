"""How a process reaches a Ray cluster: as a driver of its own, or through Ray Client, whose driver is on the head."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoints.files import brief
from ..errors import ClusterError, InputError
from ..polling import Poll, no_poll
from .progress import Say, no_words

T = TypeVar("T")
# seconds between two calls of a poll
LOOK = 0.5
# seconds for the cluster's head to answer; Ray's own tries take 40 and more
ANSWER = 25.0
CLIENT = "ray://"
# what a run is called among the cluster's jobs
NAMESPACE = "sana"
PACKAGE = Path(__file__).parents[1]


@contextmanager
def connected(address: str, poll: Poll = no_poll, say: Say = no_words) -> Iterator[Any]:
    """A context with ray, this process a driver of the cluster; whoever was connected before it stays so.

    Raises InputError where ray is not installed, ClusterError where nobody answers.
    """
    ray = import_ray()
    before = ray.is_initialized()
    connect(address, poll, say)
    try:
        yield ray
    finally:
        # a process that stays, as a server does, would die with the cluster
        if not before:
            ray.shutdown()


def import_ray() -> Any:
    """Return ray. Raises InputError where it is not installed."""
    try:
        import ray
    except ImportError:
        raise InputError("cluster: ray is not installed on this machine; pip install '.[cluster]'") from None
    return ray


def connect(address: str, poll: Poll = no_poll, say: Say = no_words) -> Any:
    """Return ray, this process a driver of the cluster, which Ray ends together with the cluster.

    `poll`, called twice a second until somebody answers, cancels by raising. Raises InputError where ray is not
    installed, ClusterError where nobody answers.
    """
    ray = import_ray()
    if not ray.is_initialized():
        # what ray list jobs shows
        # as their working directory: without one Ray puts that of this process before all else on their path, where
        # another checkout may be
        excludes = ["/*", "!/.", f"!/{PACKAGE.name}", "__pycache__"]
        own = run_options({"working_dir": str(PACKAGE.parent), "excludes": excludes})
        options = {**own, "job_config": ray.job_config.JobConfig(metadata={"job_name": NAMESPACE})}
        reach(address, lambda: ray.init(address=address, **options), lambda context: ray.shutdown(), poll, say)
    return ray


def connect_client(address: str, poll: Poll = no_poll, say: Say = no_words) -> Any:
    """Return the context of a connection through Ray Client, at an address that begins with ray://.

    What is done with ray inside of `with context` goes there, in that thread alone. Its `disconnect` ends it. Polls and
    raises as `connect` does, and InputError where Ray's client is not installed.
    """
    ray = import_ray()
    try:
        import grpc  # noqa: F401
    except ImportError:
        raise InputError("cluster: ray is installed without its client; pip install 'ray[client]'") from None
    # other connections of this process, one that is lost too, are no part of it
    # a driver on the head whose working directory is the package's cannot unpickle tensors there
    own = run_options({"py_modules": [str(PACKAGE)], "excludes": ["**/__pycache__"]})
    options = {**own, "allow_multiple": True}
    return reach(address, lambda: ray.init(address=address, **options), lambda context: context.disconnect(), poll, say)


def run_options(environment: dict[str, Any]) -> dict[str, Any]:
    """Return what Ray is told of a run in `environment`, which brings this very code to the machines."""
    return {
        "runtime_env": environment,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": NAMESPACE,
    }


def reach(address: str, work: Callable[[], T], undo: Callable[[T], Any], poll: Poll, say: Say) -> T:
    """Return what `work` does, which connects to `address`. Raises ClusterError where nobody answers."""
    import ray

    say(f"connecting to the cluster, {address}")
    try:
        return wait_for(work, undo, poll, ANSWER)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"cluster: nobody answers at {address} ({reason(error)}); start Ray there, correct the address, or set "
            "its token"
        ) from None


def reason(error: BaseException) -> str:
    """Return why there is no connection, in a few words; Ray's own advice names flags that are not ours."""
    text = brief(error)
    return "no Ray runs on this machine" if "Could not find any running Ray instance" in text else text


def wait_for(work: Callable[[], T], undo: Callable[[T], Any], poll: Poll, longest: float) -> T:
    """Do `work` in a thread, since Ray itself waits for minutes, and cannot be interrupted, and return its result.

    `poll` cancels by raising. Raises what `work` does, and TimeoutError after `longest` seconds. Whichever ends the
    wait, what the thread brings about later is undone.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            with suppress(InvalidStateError):
                outcome.set_exception(error)
            return
        try:
            outcome.set_result(result)
        except InvalidStateError:
            undo(result)

    threading.Thread(target=run, daemon=True).start()
    deadline = time.monotonic() + longest
    try:
        poll()
        while not wait([outcome], LOOK).done:
            poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer for {longest:.0f} s")
    finally:
        outcome.cancel()
    return outcome.result()
