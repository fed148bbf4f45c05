"""Batches on every GPU of a Ray cluster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..checkpoints.files import brief
from ..errors import ClusterError, InputError
from ..polling import Poll, no_poll
from .draw import Settings, resolve_settings
from .fingerprint import fingerprint
from .hold import Hold
from .loop import GRACE, run_batch
from .plan import Picture, default_chunk_size, split_into_chunks
from .queue import Queue
from .ray_pool import LOOK, WAIT_FOR_ACTORS, RayPool
from .windows import check_prompts
from .worker import Job

T = TypeVar("T")


def draw_on_cluster(
    prompts: Sequence[str],
    checkpoint: str | Path,
    settings: Settings,
    pictures: Sequence[Picture],
    address: str = "auto",
    chunk: int | None = None,
    done: frozenset[int] = frozenset(),
    described: dict[str, Any] | None = None,
    grace: float = GRACE,
    wait: float = WAIT_FOR_ACTORS,
    report: dict[str, Any] | None = None,
    shared: Hold | None = None,
) -> Generator[tuple[Picture, Any], None, None]:
    """Yield each of `pictures` that is not in `done` as it finishes, drawn on the GPUs of a Ray cluster.

    They come as tensors [3, H, W] in [-1, 1]; with the settings `described`, as the PNG files of `encode_png`, made
    where they are drawn. Into a folder `shared` by all machines, which this run holds, they are written there, by the
    names of `file_name`, and come as the digests of the files; a machine that cannot write there is left out.
    `checkpoint` is the path on every machine. The rest is as in `run_job`.

    Raises as `check_prompts`, `resolve_settings` and `run_job` do.
    """
    check_prompts(prompts)
    path = str(Path(checkpoint).absolute())
    job = Job(resolve_settings(settings, path), {path: fingerprint(path)}, path, path, path, described=described)
    if shared is not None:
        job = job._replace(shared=(str(shared.folder.absolute()), shared.run.name))
    drawing = run_job(job, prompts, pictures, address, chunk, done, grace, wait, report)
    with closing(drawing) as drawn:
        for picture, result in drawn:
            yield picture, torch.from_numpy(result.copy()) if described is None else result


def run_job(
    job: Job,
    prompts: Sequence[Any],
    pictures: Sequence[Picture],
    address: str = "auto",
    chunk: int | None = None,
    done: frozenset[int] = frozenset(),
    grace: float = GRACE,
    wait: float = WAIT_FOR_ACTORS,
    report: dict[str, Any] | None = None,
    changed: Mapping[str, torch.Tensor] | None = None,
    poll: Poll = no_poll,
) -> Generator[tuple[Picture, Any], None, None]:
    """Yield each of `pictures` that is not in `done` as it finishes, in the form that `job` wants.

    `prompts` are text, or encoded where the job has no encoder. A machine without the checkpoint, or with other
    weights there, is left out with a log. `report` gets "drawn", the pictures of each worker. `changed` are weights of
    the transformer that are not those of the file. `poll`, called at least twice a second, cancels by raising; that,
    and closing the iterator, stops all actors at once.

    Raises InputError without ray, ClusterError where no cluster or no GPU of it can be reached, and what a machine
    said where none is left.
    """
    left = sum(picture.number not in done for picture in pictures)
    if not left:
        return
    settings = job.settings
    with connected(address, poll) as ray:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        size = chunk or default_chunk_size(settings.width, settings.height, left, max(1, gpus))
        queue = Queue(split_into_chunks(pictures, size, done))
        if report is not None:
            report["drawn"] = queue.drawn
        with closing(RayPool(job, prompts, wait, changed, poll)) as pool:
            if not chunk:
                queue.limits = pool.largest
            yield from run_batch(queue, pool, grace)


@contextmanager
def connected(address: str, poll: Poll = no_poll) -> Iterator[Any]:
    """A context with ray, connected to the cluster; whoever was connected before it stays so. Raises as `connect`."""
    ray = import_ray()
    before = ray.is_initialized()
    connect(address, poll)
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


def connect(address: str, poll: Poll = no_poll) -> Any:
    """Return ray, connected to the cluster, whose machines get this very code.

    `poll`, called twice a second until somebody answers, cancels by raising. Raises ClusterError.
    """
    ray = import_ray()
    if not ray.is_initialized():
        head = head_of(address)
        if head is not None:
            try:
                # half a minute where nobody answers; ray.init itself would go on trying for twelve
                wait_for(lambda: ray._raylet.GcsClient(address=head), poll)
            except ray.exceptions.RayError as error:
                raise ClusterError(
                    f"cluster: nobody answers at {head} ({brief(error)}); start Ray there, or correct the address"
                ) from None
        package = Path(__file__).parents[1]
        environment = {"py_modules": [str(package)], "excludes": ["**/__pycache__"]}
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level=logging.WARNING)
    return ray


def head_of(address: str) -> str | None:
    """Return host and port of the cluster's head, None where only ray.init can tell them."""
    if "://" in address:
        return None
    if address != "auto":
        return address if ":" in address else None
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError):
        return None


def wait_for(work: Callable[[], T], poll: Poll) -> T:
    """Return what `work` gives, done in a thread; `poll` cancels by raising, and the thread ends by itself."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    poll()
    while not wait([outcome], LOOK).done:
        poll()
    return outcome.result()
