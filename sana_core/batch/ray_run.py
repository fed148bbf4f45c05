"""One run of a batch on a Ray cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any, NamedTuple

from ..polling import Poll, no_poll
from .loop import GRACE, run_batch
from .plan import Picture, Workload
from .progress import Say, no_words
from .queue import Queue
from .ray_actor import Crew
from .ray_pool import RayPool
from .worker import Job

# seconds
WAIT_FOR_ACTORS = 300.0


class ClusterSettings(NamedTuple):
    """Which Ray cluster draws, and how long a run waits for it."""

    address: str = "auto"
    grace: float = GRACE  # seconds; no chunk is thought to hang before
    wait: float = WAIT_FOR_ACTORS  # for a first worker, or for another after the last one died


def draw_with(
    ray: Any,
    crew: Crew,
    job: Job,
    workload: Workload,
    cluster: ClusterSettings,
    report: dict[str, Any],
    poll: Poll = no_poll,
    say: Say = no_words,
) -> Generator[tuple[Picture, Any], None, None]:
    """Yield each picture of `workload` as it finishes, drawn by the actors of `crew` and by others that join it.

    The prompts are text, or encoded where the job has no encoder. A machine without the checkpoint, or with other
    weights there, is left out with a log. `report` gets "drawn", the pictures of each worker, "machines", where it is,
    and "ready", the workers that draw now. `poll`, called at least twice a second, cancels by raising; that, and
    closing the iterator, stops at once all actors that draw.

    Raises ClusterError where no GPU of the cluster can be had, and what a machine said where none is left.
    """
    gpus = int(ray.cluster_resources().get("GPU", 0))
    chunks = workload.split(job.settings.width, job.settings.height, max(1, gpus))
    queue = Queue(chunks)
    with closing(RayPool(job, workload.prompts, len(chunks), cluster.wait, crew, poll, say)) as pool:
        report.update(drawn=queue.drawn, machines=pool.machines, ready=pool.actors)
        if not workload.chunk:
            queue.limits = pool.largest
        try:
            yield from run_batch(queue, pool, cluster.grace)
        except BaseException:
            pool.drop_busy()
            raise
        finally:
            pool.rest()
