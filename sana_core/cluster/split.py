"""Images that the GPUs of a Ray cluster share: actors that exchange tensors with each other directly.

They generate whole images, or answer the calls of a model that something else samples with. A member that dies, or has
no memory, ends the image or the call for all; it is begun again on those that live.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable
from contextlib import closing
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from ..batch.pipeline import SamplingSettings
from ..batch.plan import ImageSpec, Workload
from ..batch.progress import OnStatus, no_status
from ..batch.queue import FIRST_PATIENCE, PATIENCE
from ..errors import ClusterError, InputError
from ..model.latents import DOWNSCALE
from ..runtime.cancellation import Poll, no_poll
from ..split.generate import check_workload
from .actors import ActorError, ActorHandle, ClusterRun, DriverError, with_name
from .batch import make_job
from .connection import ClusterSettings
from .pool import Pool
from .session import run_alone
from .timeouts import PEER_LOSS_TIMEOUT, POLL_INTERVAL
from .worker import Job

# how often an image is begun again where all members have gone: a dead one aborts NCCL for the others
TRIES = 3


def generate_split_on_cluster(
    workload: Workload,
    checkpoint: str | Path,
    settings: SamplingSettings,
    cluster: ClusterSettings,
    poll: Poll = no_poll,
    on_status: OnStatus = no_status,
) -> Generator[tuple[ImageSpec, torch.Tensor], None, None]:
    """Yield each image of `workload` with its pixels [3, H, W] in [-1, 1], sampled by all GPUs of a Ray cluster.

    One of them encodes the prompts and decodes. `checkpoint` is the path on every machine. `on_status` is told what the
    run waits for, and `poll`, called at least twice a second, cancels by raising. Raises InputError for what
    `generate_split` refuses and a missing ray, CheckpointError, MissingFileError or ReadError for a checkpoint that
    cannot be loaded, ClusterError where no two GPUs can be had, and what a machine said where none is left.
    """
    check_workload(workload, settings)
    job = make_job(workload, checkpoint, settings)
    path, job = job.transformer, job._replace(encoder=None, autoencoder=None)
    rows = settings.height // DOWNSCALE
    images = workload.remaining
    used = list(dict.fromkeys(workload.prompts[image.prompt] for image in images))

    def work(run: ClusterRun) -> Generator[tuple[ImageSpec, torch.Tensor], None, None]:
        with closing(Pool(run, job, rows, together=True)) as pool:
            group = Group(pool)
            texts, negative = group.call_first("encode_once", path, used)
            for image in images:
                text = texts[workload.prompts[image.prompt]]
                latents = group.compute("generate_sharded", rows, *map(pool.put, (tuple(image), text, negative)))
                yield image, group.call_first("decode_one", path, latents)

    with closing(run_alone(cluster, work, poll, on_status)) as results:
        yield from results


class Call(NamedTuple):
    """A call of the model: its inputs, the number of its prompts, and where that is new the prompts, as
    `Worker.velocity` takes them.
    """

    inputs: tuple[torch.Tensor | None, ...]
    number: int
    prompts: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, frozenset[int], int] | None


def answer_calls(run: ClusterRun, job: Job, calls: SimpleQueue[Call]) -> Generator[torch.Tensor, None, None]:
    """Yield how many GPUs of the cluster share each image, and then the velocity of each of `calls` as they come.

    Whoever asks closes the generator after the last. Raises as `generate_split_on_cluster` does.
    """
    rows = job.settings.height // DOWNSCALE
    with closing(Pool(run, job, rows, together=True)) as pool:
        group = Group(pool)
        yield torch.tensor(len(group.members()))
        # each on the cluster once
        prompts: dict[int, object] = {}
        while True:
            run.poll()
            try:
                call = calls.get(timeout=POLL_INTERVAL)
            except Empty:
                continue
            if call.prompts is not None:
                prompts[call.number] = pool.put(call.prompts)
            own = pool.put(call.inputs), pool.put(call.number), prompts[call.number]
            x = call.inputs[0]
            assert x is not None
            yield group.compute("velocity", x.shape[2], *own)


class Group:
    """The actors of a pool that compute each image together, neighbours on one machine.

    Raises InputError for a cluster of fewer than two GPUs, and for less than a GPU for each.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.speeds: dict[str, tuple[str, float]] = {}
        self.slowest = 0.0  # seconds for an image, or a call of the model
        # the names of the actors that are connected, and the address of their store
        self.rendezvous: tuple[list[str], tuple[str, int]] = [], ("", 0)
        gpus = min(sum(map(pool.capacity, pool.nodes)), pool.max_actors)
        if gpus < 2:
            raise InputError(f"cluster: got {gpus} GPUs to share an image, expected two or more; leave split out")
        if pool.cluster.gpus_per_worker < 1:
            got = pool.cluster.gpus_per_worker
            raise InputError(f"gpus_per_worker: got {got} to share an image, expected 1; leave it out")

    def members(self) -> list[ActorHandle]:
        """Return the actors that are ready, by machine. The first time, wait for two, and for others that soon are.

        Raises what `Pool.wait` does.
        """
        pool, initial = self.pool, not self.speeds
        while len(pool.actors) < pool.min_actors or (initial and (pool.starting or pool.may_place())):
            pool.wait([])
        pool.min_actors = 1
        found = sorted(pool.actors.values(), key=lambda actor: (actor.node_id, actor.name))
        new = [actor for actor in found if actor.name not in self.speeds]
        for actor, result in zip(new, self.call_each(new, "speed"), strict=True):
            if isinstance(result, BaseException):
                pool.drop(actor, result)
            else:
                self.speeds[actor.name] = result
        return [actor for actor in found if actor.name in pool.actors]

    def call_first(self, method: str, *arguments: object) -> Any:
        """Return what the first member's `method` makes of the arguments; another's where that one is lost."""
        while True:
            actor = self.members()[0]
            (result,) = self.call_each([actor], method, *arguments)
            if not isinstance(result, BaseException):
                return result
            if not self.drop_failed(actor, result) or not self.pool.actors:
                raise with_name(actor.name, result)

    def compute(self, method: str, rows: int, *arguments: object) -> torch.Tensor:
        """Return what the members' `method` makes together of `rows` rows of latents, as the first of them has it.

        The `arguments` are those that `Pool.put` has returned.
        Raises what a member said where none is left, or its mistake.
        """
        emptied = 0
        while True:
            members, began = self.members()[:rows], time.monotonic()
            results = self.attempt(members, method, arguments)
            errors = [each for each in zip(members, results, strict=True) if isinstance(each[1], BaseException)]
            if not errors:
                self.slowest = max(self.slowest, time.monotonic() - began)
                return results[0]
            lost = [self.drop_failed(actor, error) for actor, error in errors]
            emptied += not self.pool.actors
            if not any(lost) or emptied == TRIES:
                raise with_name(errors[0][0].name, errors[0][1])
            self.rendezvous = [], ("", 0)

    def attempt(self, members: list[ActorHandle], method: str, arguments: tuple) -> list[Any]:
        """Return what each of `members` made of its rows, or why not."""
        names = [actor.name for actor in members]
        if self.rendezvous[0] != names:
            (place,) = self.call_each(members[:1], "open_store", len(members))
            if isinstance(place, BaseException):
                gone = ClusterError("cluster: another actor of the image has gone; it is begun again")
                return [place, *(gone for _ in members[1:])]
            self.rendezvous = names, place
        found = [self.speeds[name] for name in names]
        equal = len({kind for kind, _ in found}) == 1
        speeds = [1.0 if equal else speed for _, speed in found]
        calls = [
            self.pool.call(actor, method, (rank, speeds, self.rendezvous[1]), *arguments)
            for rank, actor in enumerate(members)
        ]
        grace = self.pool.cluster.grace
        timeout = max(grace, PATIENCE * self.slowest) if self.slowest else FIRST_PATIENCE * grace
        return self.results(members, calls, timeout)

    def call_each(self, members: list[ActorHandle], method: str, *arguments: object) -> list[Any]:
        """Return what the `method` of each of `members` makes of the arguments; errors too."""
        calls = [self.pool.call(actor, method, arguments) for actor in members]
        return self.results(members, calls, FIRST_PATIENCE * self.pool.cluster.grace)

    def results(self, members: list[ActorHandle], calls: list[Hashable], timeout: float) -> list[Any]:
        """Return what the calls of `members` have made, errors too.

        Those that have not ended after `timeout` seconds, or some after another's error, are thought to hang.
        """
        found: dict[Hashable, Any] = {}
        deadline = time.monotonic() + timeout
        while len(found) < len(calls):
            for call in self.pool.wait([call for call in calls if call not in found]):
                try:
                    found[call] = self.pool.unpack(members[calls.index(call)].name, call)
                except (MemoryError, ActorError, self.pool.ray.exceptions.RayError) as error:
                    found[call] = error
                    deadline = min(deadline, time.monotonic() + PEER_LOSS_TIMEOUT)
            if time.monotonic() > deadline:
                late = TimeoutError("no answer for far longer than usual, or since another's error")
                found |= {call: late for call in calls if call not in found}
        return [found[call] for call in calls]

    def drop_failed(self, actor: ActorHandle, error: BaseException) -> bool:
        """Drop a member that `error` has ended. Return whether it has, and not only interrupted its work."""
        if isinstance(error, ActorError | ClusterError) and not isinstance(error, DriverError):
            # its own mistake, or what torch says to the partners of one that has died
            return False
        self.pool.drop(actor, error)
        return True
