"""Pictures that the GPUs of a Ray cluster share: an actor for each, which exchange tensors with each other directly.

They draw whole pictures, or answer the calls of a model that something else samples with. A member that dies, or has no
memory, ends the picture or the call for all; it is begun again on those that live.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from ..accelerator import is_driver_error, is_out_of_memory
from ..batch.connection import LOOK
from ..batch.draw import Settings, resolve_settings
from ..batch.fingerprint import fingerprint
from ..batch.plan import Picture, Workload
from ..batch.progress import no_words
from ..batch.ray_actor import Candidate, Crew
from ..batch.ray_pool import named
from ..batch.ray_run import ClusterSettings
from ..batch.session import run_alone
from ..batch.windows import check_prompts
from ..batch.worker import Job
from ..errors import ClusterError, InputError
from ..latents import DOWNSCALE
from ..polling import Poll, no_poll
from .draw import check_workload

logger = logging.getLogger(__name__)

# after a member's death, how long the others have to notice it: more than they wait for each other
NOTICE = 90.0
# seconds for Ray to place the actors that it has a GPU for
PLACEMENT = 30.0
# how often all members are asked for anew where the last one has gone: NCCL takes the others of a dead one along
TRIES = 3


def draw_split_on_cluster(
    workload: Workload, checkpoint: str | Path, settings: Settings, cluster: ClusterSettings, poll: Poll = no_poll
) -> Generator[tuple[Picture, torch.Tensor], None, None]:
    """Yield each picture of `workload` with its pixels [3, H, W] in [-1, 1], drawn by all GPUs of a Ray cluster.

    `checkpoint` is the path on every machine. `poll`, called at least twice a second, cancels by raising. Raises
    InputError for what `draw_split` refuses and a missing ray, CheckpointError, MissingFileError or ReadError for a
    checkpoint that cannot be loaded, ClusterError where no two GPUs can be had, and what a machine said where none is
    left.
    """
    check_prompts(workload.prompts)
    check_workload(workload, settings)
    path = str(Path(checkpoint).absolute())
    settings = resolve_settings(settings, path)
    weights = {each: fingerprint(each) for each in (path, *(lora for lora, _ in settings.loras))}
    job = Job(settings, weights, path, path, path)
    rows = settings.height // DOWNSCALE

    def work(ray: Any, crew: Crew, beat: Poll) -> Generator[tuple[Picture, torch.Tensor], None, None]:
        with closing(Team(ray, job, crew, cluster.wait, beat)) as team:
            for picture in workload.pictures:
                if picture.number not in workload.done:
                    prompt = workload.prompts[picture.prompt]
                    yield picture, team.compute("draw", rows, tuple(picture), prompt)

    with closing(run_alone(cluster, work, poll, no_words)) as drawn:
        yield from drawn


class Call(NamedTuple):
    """A call of the model: latents [B, 32, h, w], timesteps [B] and guidance [B] or None; the number of its prompts,
    and where that is new the prompts, as `Member.velocity` takes them.
    """

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    number: int
    prompts: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, frozenset[int]] | None


def answer_calls(
    ray: Any, crew: Crew, job: Job, wait: float, calls: SimpleQueue[Call], poll: Poll
) -> Generator[torch.Tensor, None, None]:
    """Yield how many GPUs of the cluster share each picture, and then the velocity of each of `calls` as they come.

    Whoever asks closes the generator after the last. Raises as `draw_split_on_cluster` does.
    """
    with closing(Team(ray, job, crew, wait, poll)) as team:
        yield torch.tensor(len(team.members))
        # each on the cluster once
        prompts: dict[int, Any] = {}
        while True:
            poll()
            try:
                call = calls.get(timeout=LOOK)
            except Empty:
                continue
            if call.prompts is not None:
                prompts[call.number] = ray.put(call.prompts)
            rows, inputs = call.inputs[0].shape[2], ray.put(call.inputs)
            yield team.compute("velocity", rows, inputs, call.number, prompts[call.number])


class Actor(NamedTuple):
    """An actor of the cluster, by the number it was asked for with, and the kind and speed of its device."""

    number: int
    handle: Any
    kind: str = ""
    speed: float = 1.0


class Team:
    """The actors that compute each picture together, in the order of their rows.

    Those of `crew` are asked first, and go back to it at the end. Raises InputError for fewer than two GPUs,
    ClusterError unless two actors have loaded what the job wants in `longest` seconds.
    """

    def __init__(self, ray: Any, job: Job, crew: Crew, longest: float, poll: Poll) -> None:
        self.ray, self.job, self.crew, self.longest, self.poll = ray, job.pack(), crew, longest, poll
        self.tries, self.asked = 0, 0
        self.members: list[Actor] = []
        # where so many of the members have found each other
        self.met: tuple[int, tuple[str, int]] | None = None
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus < 2:
            raise InputError(f"cluster: got {gpus} GPUs to share an image, expected two or more; leave split out")
        self.start()

    def start(self) -> None:
        """Take the actors of the crew, ask for others up to a member for each GPU, and wait until all have loaded.

        Those that Ray has no place for, since others have the GPUs, are given up when two have one.
        """
        self.tries += 1
        gpus = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in self.ray.nodes() if node["Alive"]}
        kind = actor_class(self.ray).options(num_gpus=1, num_cpus=0, scheduling_strategy="SPREAD")
        handles = [candidate.handle for candidate in self.crew.take()]
        handles += [kind.remote() for _ in range(max(1, sum(gpus.values())) - len(handles))]
        self.members = [Actor(self.asked + number, handle) for number, handle in enumerate(handles)]
        self.asked += len(self.members)
        placed = [member.handle.answer.remote() for member in self.members]
        found = self.results(placed, PLACEMENT)
        if sum(map(failed, found)) > len(found) - 2:
            found = self.results(placed, self.longest)
        self.drop_failed(found)
        changed = self.crew.changed
        rest = self.job, max(1, *gpus.values()), list(changed), *changed.values()
        results = self.results([member.handle.prepare.remote(*rest) for member in self.members], self.longest)
        self.drop_failed(results)
        ready = [result for result in results if not failed(result)]
        self.members = [
            member._replace(kind=kind, speed=speed) for member, (kind, speed) in zip(self.members, ready, strict=True)
        ]

    def drop_failed(self, results: list[Any]) -> None:
        """Drop the members whose result is an error. Raises ClusterError with the first unless two are left."""
        errors = [(member, result) for member, result in zip(self.members, results, strict=True) if failed(result)]
        for member, error in errors:
            self.drop(member, error)
        if len(self.members) < 2:
            raise named("cluster", cause_of(errors[0][1]))

    def compute(self, method: str, rows: int, *arguments: Any) -> torch.Tensor:
        """Return what the members' `method` makes together of `rows` rows of latents, along the last dimension but one.

        Raises what a member said where none is left, or its mistake.
        """
        while True:
            members = self.members[:rows]
            results = self.attempt(members, method, arguments)
            errors = [(member, each) for member, each in zip(members, results, strict=True) if failed(each)]
            if not errors:
                return torch.cat(results, dim=-2)
            self.met = None
            lost = [(member, error) for member, error in errors if self.is_loss(error)]
            if not lost:
                raise named(f"actor {errors[0][0].number}", cause_of(errors[0][1]))
            for member, error in lost:
                self.drop(member, error)
            if not self.members and self.tries == TRIES:
                raise named(f"actor {lost[0][0].number}", cause_of(lost[0][1]))
            if not self.members:
                self.start()

    def attempt(self, members: list[Actor], method: str, arguments: tuple) -> list[Any]:
        """Return what each of `members` made of its rows, or why not."""
        alive = self.results([member.handle.answer.remote() for member in members], NOTICE)
        if any(map(failed, alive)):
            # nobody waits for one that is not there
            return [each if failed(each) else interrupted() for each in alive]
        equal = len({member.kind for member in members}) == 1
        speeds = [1.0 if equal else member.speed for member in members]
        if self.met is None or self.met[0] != len(members):
            try:
                self.met = len(members), self.ray.get(members[0].handle.open_store.remote(len(members)))
            except self.ray.exceptions.RayError as error:
                return [error, *(interrupted() for _ in speeds[1:])]
        place = self.met[1]
        calls = [
            member.handle.compute.remote(method, rank, speeds, place, *arguments) for rank, member in enumerate(members)
        ]
        return self.results(calls, None)

    def results(self, calls: Sequence[Any], longest: float | None) -> list[Any]:
        """Return the results of `calls`, errors among them; TimeoutError for those that take too long."""
        found: dict[Any, Any] = {}
        deadline = None if longest is None else time.monotonic() + longest
        while len(found) < len(calls):
            self.poll()
            ready, _ = self.ray.wait([call for call in calls if call not in found], num_returns=1, timeout=LOOK)
            for call in ready:
                try:
                    found[call] = self.ray.get(call)
                except self.ray.exceptions.RayError as error:
                    found[call] = error
                    deadline = deadline or time.monotonic() + NOTICE
            if deadline is not None and time.monotonic() > deadline:
                found |= {call: TimeoutError("no answer") for call in calls if call not in found}
        return [found[call] for call in calls]

    def is_loss(self, error: BaseException) -> bool:
        """Whether a member is lost by `error`, and not only interrupted by another's."""
        if isinstance(error, self.ray.exceptions.RayTaskError):
            return is_out_of_memory(error.cause) or is_driver_error(error.cause)
        return not isinstance(error, ClusterError)

    def drop(self, member: Actor, reason: BaseException) -> None:
        """Kill the actor; its rows go to the others."""
        logger.warning("split: lost actor %d: %s", member.number, str(cause_of(reason)).splitlines()[0])
        self.ray.kill(member.handle)
        self.members.remove(member)

    def close(self) -> None:
        """Give the actors back to the crew; one in the middle of a step ends that first."""
        self.crew.candidates = [Candidate(member.handle, time.monotonic()) for member in self.members]


def failed(result: Any) -> bool:
    return isinstance(result, BaseException)


def interrupted() -> ClusterError:
    """Return the error of a member that another's death has kept from its work."""
    return ClusterError("cluster: another actor of the image has gone; it is begun again")


def cause_of(error: BaseException) -> BaseException:
    """Return what a task raised, for an error that Ray has wrapped."""
    return getattr(error, "cause", None) or error


def actor_class(ray: Any) -> Any:
    """Return the actors' class. It is made here, because Ray finds a class of a module by the name of the module."""

    class SplitActor:
        def __init__(self) -> None:
            self.member: Any = None

        def prepare(self, job: dict[str, Any], neighbours: int, names: list[str], *weights: Any) -> tuple[str, float]:
            from importlib import import_module

            if self.member is not None:
                return self.member.begin(job)
            # as the machines know it
            member = import_module("sana_core.split.worker").Member(job)
            device = member.load(neighbours, dict(zip(names, weights, strict=True)))
            self.member = member
            return device

        def answer(self) -> None:
            pass

        def open_store(self, world: int) -> tuple[str, int]:
            import ray

            host = ray.util.get_node_ip_address()
            return host, self.member.open_store(host, world)

        def compute(self, method: str, *arguments: Any) -> Any:
            return getattr(self.member, method)(*arguments)

    return ray.remote(SplitActor)
