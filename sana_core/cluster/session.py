"""Runs on a Ray cluster, and what stays between them: actors with their loaded models, and weights that were sent.

A long-lived process, such as a server, connects through Ray Client, so its driver is a process of the head. If that
driver fails, this process only gets an error. Ray would end a driver in this process a minute after the head, or with
this machine's raylet. When this process ends, the head ends its actors half a minute later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from ..batch.plan import OnStatus, no_status
from ..engine.body import pack
from ..errors import ClusterError, SanaError
from ..runtime.cancellation import Poll, no_poll
from ..runtime.limits import WatchClock
from ..runtime.text import Json, brief, get_logger
from .connection import (
    ACTOR_IDLE_TIMEOUT,
    CALL_TIMEOUT,
    CLIENT,
    POLL_INTERVAL,
    PROBE_TIMEOUT,
    ClusterSettings,
    LostError,
    call_in_thread,
    connect_client,
    connected,
    import_ray,
    iterate_in_thread,
)

if TYPE_CHECKING:
    from ray.client_builder import ClientContext

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


logger = get_logger(__name__)


class Session:
    """The connection to a cluster, and the actors of the last run. The next run uses them if it has the same key."""

    def __init__(self, cluster: ClusterSettings, idle: float = ACTOR_IDLE_TIMEOUT) -> None:
        self.cluster, self.idle = cluster, idle
        # A run holds the lock, and so does a thread that ends the actors.
        self.busy = threading.Lock()
        # Whether the head does not answer. Then a call to it may never return.
        self.lost = False
        self.context: ClientContext | None = None
        self.key: Hashable = None
        self.cache = ActorCache()
        self.used = time.monotonic()
        self.unwanted = threading.Event()

    def run(
        self,
        key: Hashable,
        changed: Callable[[], Mapping[str, torch.Tensor]],
        work: Work[T],
        poll: Poll = no_poll,
        on_status: OnStatus = no_status,
    ) -> Generator[T, None, None]:
        """Yield the results of the generator `work`. If `key` is the last run's, it gets the actors of that run.

        `key` identifies the loaded models: files, precision and patches. If it differs from the last one, `changed` is
        called. It returns the transformer's weights that differ from the file. `poll` is called twice a second, even if
        Ray hangs, and cancels by raising. `work` receives a run, and must call its `poll` as often.
        """
        ray = import_ray()
        self.acquire(poll)
        try:
            self.unwanted.clear()
            self.check_connection(poll)
            weights = None if key == self.key else changed()
        except BaseException:
            self.busy.release()
            raise

        def connected_work(alive: Poll) -> Generator[T, None, None]:
            try:
                with self.connect(alive, on_status):
                    if weights is not None:
                        self.key = None
                        self.cache.end(ray)
                        self.cache, self.key = put_weights(ray, weights, alive), key
                    yield from work(ClusterRun(ray, self.cluster, self.cache, alive, on_status))
            except Exception as error:
                if isinstance(error, SanaError) or not is_of_ray(error):
                    raise
                self.lost = True
                raise LostError(brief(error)) from None
            finally:
                self.used = time.monotonic()
                if self.lost:
                    disconnect_in_thread(self.context)
                self.busy.release()

        try:
            yield from iterate_in_thread(connected_work, poll, CALL_TIMEOUT)
        except LostError as error:
            raise self.give_up(str(error)) from None

    def acquire(self, poll: Poll) -> None:
        """Wait until the last run, which was cancelled, has ended its actors. Raises ClusterError if it cannot."""
        clock = WatchClock()
        while not self.busy.acquire(timeout=POLL_INTERVAL):
            poll()
            if clock() > CALL_TIMEOUT:
                raise self.give_up(f"no answer for {CALL_TIMEOUT:.0f} s")

    def check_connection(self, poll: Poll) -> None:
        """Give up the connection of the last run if the head does not answer any more."""
        context = self.context
        if context is None:
            return
        try:
            call_in_thread(self.list_nodes, lambda nodes: disconnect_in_thread(context), poll, PROBE_TIMEOUT)
        except BaseException as error:
            # The thread of `list_nodes` may still use the old context, so forget that context.
            self.context, self.cache, self.key = None, ActorCache(), None
            if not isinstance(error, TimeoutError):
                disconnect_in_thread(context)
            if not is_of_ray(error):
                raise
            logger.warning("cluster: lost %s since the last run (%s)", self.cluster.address, brief(error))

    def list_nodes(self) -> list[Json]:
        assert self.context is not None
        with self.context:
            return import_ray().nodes()

    def connect(self, poll: Poll, on_status: OnStatus) -> ClientContext:
        """Return the connection of the last run, or a new one. Raises the errors of `connect_client`."""
        if self.context is None:
            self.context = connect_client(self.cluster.address, poll, on_status)
            threading.Thread(target=self.watch, args=(self.context,), name="sana cluster watch", daemon=True).start()
        return self.context

    def forget(self, key: Hashable) -> None:
        """End the actors soon if they were loaded for `key`, because no run will use it again. Does not wait."""
        if key == self.key:
            self.unwanted.set()

    def watch(self, context: ClientContext | None) -> None:
        """End the actors and the connection when no run has used them for `idle` seconds, or after `forget`."""
        while self.context is context and not self.lost:
            unwanted = self.unwanted.wait(POLL_INTERVAL)
            idle = time.monotonic() - self.used > self.idle
            if (unwanted or idle) and self.busy.acquire(blocking=False):
                try:
                    self.end()
                finally:
                    self.busy.release()
                return

    def end(self) -> None:
        """End the connection, and with it the actors."""
        context, self.context = self.context, None
        self.cache, self.key = ActorCache(), None
        if context is not None:
            context.disconnect()

    def leave(self) -> None:
        """End the connection. If a run still uses it after a few seconds, that run ends it."""
        if self.busy.acquire(timeout=PROBE_TIMEOUT):
            self.end()
        else:
            self.lost = True

    def give_up(self, why: str) -> ClusterError:
        """Mark the connection as lost, and return the error for the user. The waiting thread disconnects later."""
        self.lost = True
        return ClusterError(
            f"cluster: lost the head at {self.cluster.address} ({why}); start Ray there again, then queue again"
        )


def disconnect_in_thread(context: ClientContext | None) -> None:
    """End a connection whose other end may not answer. Its actors end too."""
    if context is not None:
        threading.Thread(target=context.disconnect, name="sana cluster end", daemon=True).start()


def is_of_ray(error: BaseException) -> bool:
    """Whether Ray or its client raised `error` because it cannot reach the cluster."""
    import grpc
    import ray

    # Ray Client raises plain exceptions if its connection is lost.
    if type(error) is Exception or "Cannot invoke RPC" in str(error):
        return True
    return isinstance(error, (ConnectionError, TimeoutError, RuntimeError, grpc.RpcError, ray.exceptions.RayError))


def run_alone(cluster: ClusterSettings, work: Work[T], poll: Poll, on_status: OnStatus) -> Generator[T, None, None]:
    """Yield the results of the generator `work`, with a connection and actors for this run alone."""
    if cluster.address.startswith(CLIENT):
        session = Session(cluster)
        try:
            yield from session.run(None, dict, work, poll, on_status)
        finally:
            session.leave()
        return
    with connected(cluster.address, poll, on_status) as ray:
        cache = ActorCache()
        try:
            yield from work(ClusterRun(ray, cluster, cache, poll, on_status))
        finally:
            cache.end(ray)
