"""Batches on the GPUs of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable
from contextlib import closing
from pathlib import Path
from types import ModuleType

import torch

from ..batch.draw import Settings, resolve_settings
from ..batch.loop import Outcome, run_batch
from ..batch.plan import Chunk, Drawn, Workload
from ..batch.progress import Say, WorkerReport, no_words
from ..batch.queue import Queue
from ..batch.windows import check_prompts
from ..checkpoints.files import Json
from ..checkpoints.fingerprint import fingerprint
from ..runtime.cancellation import Poll, no_poll
from ..runtime.folder_lock import Hold
from ..sampling.trail import Draft
from .actors import ActorCache, ActorError, DriverError
from .connection import ClusterSettings
from .pool import Pool
from .session import run_alone
from .worker import Job


def make_job(workload: Workload, checkpoint: str | Path, settings: Settings) -> Job:
    """Return what the actors are told of a checkpoint, which is at this path on every machine.

    Raises InputError for prompts that no encoding can carry and settings out of range, CheckpointError,
    MissingFileError or ReadError for a checkpoint that cannot be loaded.
    """
    check_prompts(workload.prompts)
    path = str(Path(checkpoint).absolute())
    settings = resolve_settings(settings, path)
    weights = {each: fingerprint(each) for each in (path, *(lora for lora, _ in settings.loras))}
    return Job(settings, weights, path, path, path)


def draw_on_cluster(
    workload: Workload,
    checkpoint: str | Path,
    settings: Settings,
    cluster: ClusterSettings,
    described: Json | None = None,
    report: WorkerReport | None = None,
    shared: Hold | None = None,
    say: Say = no_words,
) -> Generator[Drawn, None, None]:
    """Yield each picture of `workload` as it finishes, drawn on the GPUs of a Ray cluster.

    They come as tensors [3, H, W] in [-1, 1]; with the settings `described`, as the PNG files of `encode_png`, made
    where they are drawn. Into a folder `shared` by all machines, which this run holds, they are written there, by the
    names of `file_name`, and come as the digests of the files; a machine that cannot write there is left out.
    `report` shows who draws. `say` is told what the run waits for.

    Raises what `make_job` does, InputError for a missing ray, ClusterError where no cluster or no GPU of it can be
    reached, and what a machine said where none is left.
    """
    job = make_job(workload, checkpoint, settings)._replace(described=described)
    if shared is not None:
        job = job._replace(shared=(str(shared.folder.absolute()), shared.run.name))
    found = WorkerReport() if report is None else report

    def work(ray: ModuleType, cache: ActorCache, beat: Poll) -> Generator[Drawn, None, None]:
        return draw_with(ray, cache, job, workload, cluster, found, beat, say)

    if not workload.left:
        return
    with closing(run_alone(cluster, work, no_poll, say)) as drawn:
        for picture, result in drawn:
            if isinstance(result, tuple):
                yield picture, Draft(*result)
            else:
                yield picture, torch.from_numpy(result.copy()) if described is None else result


def draw_with(
    ray: ModuleType,
    cache: ActorCache,
    job: Job,
    workload: Workload,
    cluster: ClusterSettings,
    report: WorkerReport,
    poll: Poll = no_poll,
    say: Say = no_words,
) -> Generator[Drawn, None, None]:
    """Yield each picture of `workload` as it finishes, drawn by the actors of `cache` and by others that join it.

    The prompts are text, or encoded where the job has no encoder. `report` shows who draws. `poll`, called at least
    twice a second, cancels by raising; that, and closing the iterator, stops at once all actors that draw. Raises what
    `Pool.wait` does.
    """
    gpus = int(ray.cluster_resources().get("GPU", 0))
    chunks = workload.split(job.settings.width, job.settings.height, max(1, cluster.limit(gpus)))
    queue = Queue(chunks)
    with closing(Pool(job, cluster, cache, len(chunks), poll=poll, say=say)) as pool:
        report.drawn, report.machines, report.ready, report.refused = (
            queue.drawn,
            cache.machines,
            pool.actors,
            pool.refused,
        )
        batch = BatchPool(pool, workload)
        if not workload.chunk:
            queue.limits = pool.loaded
        try:
            yield from run_batch(queue, batch, cluster.grace)
            for batch.workload in workload.later:
                queue.add(batch.workload.split(job.settings.width, job.settings.height, max(1, len(pool.actors))))
                yield from run_batch(queue, batch, cluster.grace)
        except BaseException:
            batch.drop_busy()
            raise


class BatchPool:
    """The actors of a pool as workers of the loop, which gives each a chunk, and another on its way meanwhile."""

    depth = 2

    def __init__(self, pool: Pool, workload: Workload) -> None:
        self.pool, self.workload = pool, workload
        self.flying: dict[Hashable, tuple[str, Chunk]] = {}
        self.now = time.monotonic

    def workers(self) -> list[str]:
        return list(self.pool.actors)

    def submit(self, worker: str, chunk: Chunk) -> None:
        prompts = [self.workload.prompts[picture.prompt] for picture in chunk]
        until, past = self.workload.round
        own = [past[picture.number] for picture in chunk] if past else []
        arguments = [tuple(picture) for picture in chunk], prompts, until, own
        self.flying[self.pool.call(self.pool.actors[worker], "draw", arguments)] = (worker, chunk)

    def wait(self) -> list[Outcome[object]]:
        return [outcome for call in self.pool.wait(list(self.flying)) for outcome in self.settle(call)]

    def settle(self, call: Hashable) -> list[Outcome[object]]:
        """Return how a chunk ended; nothing where its actor was lost, for then the loop gives it to another."""
        worker, chunk = self.flying.pop(call)
        actor = self.pool.actors.get(worker)
        try:
            return [Outcome(worker, chunk, self.pool.unpack(worker, call))]
        except MemoryError as error:
            return [Outcome(worker, chunk, error=error)]
        except (self.pool.ray.exceptions.RayError, DriverError) as error:
            if actor is not None:
                self.pool.drop(actor, error)
        except ActorError as error:
            # a disk that is full or gone, a library that differs; the pictures go to other machines
            if actor is not None:
                self.pool.refuse(actor, error)
        return []

    def drop(self, worker: str, reason: BaseException) -> None:
        if worker in self.pool.actors:
            self.pool.drop(self.pool.actors[worker], reason)

    def drop_busy(self) -> None:
        """End the actors that draw, in the middle of a step."""
        for worker in {worker for worker, _ in self.flying.values()} & self.pool.actors.keys():
            self.pool.end(self.pool.actors[worker])
