"""A batch on the devices of this machine: a thread for one device, a process for each of several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from ..batch.pipeline import Request
from ..batch.plan import Chunk, FailedImage, Generated, Step, WorkerReport, stop_if_all_fail
from ..checkpoints import Checkpoint, inspect_checkpoint
from ..runtime.accelerator import release_memory_of
from ..runtime.limits import LIMITS, Limits
from ..runtime.text import Json, get_logger
from .body import Body, Job, describe_failure, pack, pack_texts, unpack
from .child import TaskRunner
from .loop import Run
from .process import kill_left_out, processes
from .schedule import Worker
from .switches import read_switches

logger = get_logger(__name__)


class ThreadWorker:
    """A thread with a device, for a single device or for a MODEL that no other process can load.

    `make_body(device, post, poll)` returns the object that works: Body, or the host's.
    """

    depth = 2
    # A thread cannot be killed.
    can_restart = False
    machine = None
    birth = 1

    def __init__(self, name: str, device: torch.device, make_body: Callable[..., Any] = Body) -> None:
        self.name, self.device, self.make_body = name, device, make_body
        self.tasks: SimpleQueue[tuple | None] = SimpleQueue()
        # Runs up to this number are cancelled.
        self.cancelled = 0
        self.thread: threading.Thread | None = None

    def attach(self, events: SimpleQueue[tuple]) -> None:
        self.events = events
        self.thread = threading.Thread(target=self.work, name=f"sana {self.name}", daemon=True)
        self.thread.start()

    def work(self) -> None:
        def post(name: str, *values: Any) -> None:
            if name == "image" and callable(values[1]):
                values = values[0], values[1]()
            self.events.put((self, self.birth, runner.run, name, *values))

        def describe(error: BaseException) -> tuple[str, str, BaseException]:
            kind, text, _ = describe_failure(error)
            if kind in ("memory", "driver"):
                release_memory_of(error, self.device)
            return kind, text, error

        make_body = partial(self.make_body, str(self.device))
        runner = TaskRunner(make_body, post, lambda run: run <= self.cancelled, describe)
        try:
            while (message := self.tasks.get()) is not None:
                runner.do(*message)
                # Embeddings must not stay in memory until the next task.
                message = None
        finally:
            # The body refers to the runner. They would keep each other, and the models, alive until Python's collector
            # runs.
            del runner.body, runner.make_body

    def send(self, *message: Any) -> None:
        self.tasks.put(message)

    def cancel(self, run: int) -> None:
        """End the run, within a step, and then the thread."""
        self.cancelled = run
        self.tasks.put(None)

    def leave(self) -> None:
        if self.thread is not None:
            self.thread.join(LIMITS.ending)


def generate_local(
    request: Request,
    report: WorkerReport | None = None,
    described: Json | None = None,
    limits: Limits = LIMITS,
) -> Generator[Generated, None, None]:
    """Yield each image of `request` as it finishes, or a FailedImage: pixels [3, H, W] in [-1, 1].

    A single device works in a thread of this process, and each of several in a process of its own. With `described`,
    the settings of `describe_settings`, an image of such a process is its PNG file. Closing the iterator stops
    all devices within a step. `report` shows which worker generates how many images.
    """
    workload, _, settings, devices = request
    if len(devices) > 1 and inspect_checkpoint(request.checkpoint.path) != request.checkpoint:
        logger.warning("batch: only %s works, because other processes cannot load a part of a file", devices[0])
        devices = devices[:1]
    chunks = workload.split(settings.width, settings.height, len(devices))
    if not chunks:
        return
    texts: dict[Any, Any] = {}
    if workload.encoded is not None:
        texts = pack_texts(*workload.encoded)
    latents, callback = workload.inputs.latents, workload.inputs.callback

    def rows(images: Chunk) -> Json:
        return {} if latents is None else {"latents": pack(latents[[image.number for image in images]])}

    def on_step(worker: Worker, step: int, sigma: float, packed: Any, images: list[int]) -> None:
        if callback is not None:
            callback(Step(step, sigma, unpack(packed), tuple(images)))

    job = make_job(request, described if len(devices) > 1 else None).pack()
    with local_workers(devices, request.checkpoint) as workers:
        run = Run(
            job,
            chunks,
            workers,
            workload.prompts,
            texts,
            rows,
            on_step=on_step,
            on_left_out=kill_left_out,
            limits=limits.compiled() if settings.compiled else limits,
        )
        if report is not None:
            report.finished, report.steps, report.ready = run.finished, run.steps, run.ready
        images = run.images()
        try:
            yield from stop_if_all_fail(((image, restore(content)) for image, content in images), workload)
        finally:
            images.close()


@contextmanager
def local_workers(devices: Sequence[torch.device], checkpoint: Checkpoint) -> Iterator[list[Any]]:
    """A context with a worker for each device. A single one is a thread, which starts at once and can use any
    `checkpoint`."""
    if len(devices) == 1:
        yield [ThreadWorker(str(devices[0]), devices[0], partial(Body, checkpoint=checkpoint))]
        return
    with processes().borrow(devices) as workers:
        yield workers


def make_job(request: Request, described: Json | None) -> Job:
    workload, checkpoint, settings, _ = request
    path = str(checkpoint.path.absolute())
    init, edit = workload.inputs.init, workload.inputs.edit
    return Job(
        settings,
        path,
        path,
        path,
        revision=repr(
            [revision_of(checkpoint), *(revision_of(inspect_checkpoint(file)) for file, _ in settings.loras)]
        ),
        described=described,
        init=None if init is None else (pack(init.latents), None if init.mask is None else pack(init.mask)),
        edit=None if edit is None else (pack(edit.latents), edit.guidance),
        steps=workload.inputs.callback is not None,
        prompts=workload.count_prompts(),
        fixed_chunk=bool(workload.chunk),
        switches=read_switches(),
    )


def revision_of(checkpoint: Checkpoint) -> list[Any]:
    """Return the sizes and times of a checkpoint's weights, and its settings. They change with its content.

    Tokenizers are read again for each block of prompts.
    """
    components: Iterable[Checkpoint] = checkpoint.components
    files = {header.file for part in components for header in part.headers.values()}
    settings = [(part.config, part.scheduler_config, part.reference, part.resolution) for part in components]
    return [settings, *((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files))]


def restore(content: Any) -> Any:
    return content if isinstance(content, bytes | FailedImage) else torch.from_numpy(content)
