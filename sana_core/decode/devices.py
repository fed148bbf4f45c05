"""Decode one image on several devices. Each device decodes a band of rows.

In the attention stages, the bands stay on their devices. The sums of each attention block are added on the first
device, from the top of the image to its bottom, and sent back to all devices. The rows that a band needs beyond its
edges are copied from its neighbours. The boundary map stays on the devices that computed it. Each device decodes rows
of it to pixels, which are copied to the CPU. Sums and strips are the same as on one device, so the pixels are the same
too.

All work on a device runs in a thread of its worker, so every failure can be attributed to a worker. If memory runs out,
the worker gets smaller strips. If its strips are already the smallest, or if its device fails, it is dropped. The other
workers then compute the boundary map again, because a part of it is lost, and decode the missing rows. The latents and
the pixels are on the CPU, so any device may fail. After some driver errors CUDA refuses all work of the process. Then
all devices fail.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from ..errors import InputError
from ..model.layers import arrange_convolutions
from ..runtime.accelerator import current_device, is_driver_error, is_out_of_memory, release_memory_of
from ..runtime.cancellation import Poll
from ..runtime.text import Json
from .attention import GLU_HALO, attend_rows, halo, score_pieces
from .oom import without_first
from .plan import MEBIBYTE, Plan, Planner, smaller
from .row_partition import LARGEST_TENSOR, RowPartition
from .stages import Stages
from .strips import (
    FEW_POSITIONS,
    PIECE,
    convolved,
    global_block,
    global_blocks,
    is_attention,
    ordered_sum,
    output_size,
    pixel_rows,
    project_latents,
    runs_undivided,
)
from .workspace import Workspace, chunks

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_dc import Decoder

# Seconds between two polls of the waiting thread.
SECONDS = 0.02
# Seconds without any result after which a GPU hangs. The first strip of a decode builds kernels.
HANG_TIMEOUT = 300.0
# Seconds to wait for a thread to end after a failure. The longest call on a GPU takes less.
ABORT_TIMEOUT = 30.0
# Strips that a worker computes ahead, while the first one is copied to the CPU, so that its device never waits.
AHEAD = 2
# Share of the free memory that a decode may use, because other programs need some too.
BUDGET = 0.9
T = TypeVar("T")


class Stopped(Exception):
    """The work was cancelled, or another worker failed."""


@dataclass(eq=False)
class Worker:
    """A device that takes part in a decode, with the decoder on it."""

    device: torch.device
    decoder: Decoder
    # The plan that each image begins with. It fits the free memory at the start.
    first_plan: Plan = Plan("strips")
    # The current plan. Its strips are smaller after memory ran out.
    plan: Plan = Plan("strips")


class Failure(NamedTuple):
    worker: Worker
    error: BaseException


class Failed(Exception):
    """Workers failed in a stage that the others cannot finish without them."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__(str(failures[0].error))
        self.failures = failures


@dataclass(eq=False)
class Task:
    """The rows that a worker decodes to pixels."""

    worker: Worker
    strips: Iterator[torch.Tensor]
    # The next row of pixels to yield.
    row: int
    # End of the task, a row of the boundary map.
    bottom: int
    failed: bool = False


class Workers:
    """The workers of a decode. A device may be named twice. It then has two workers that share the weights.

    `events` gets a line for each device that is left out.
    """

    def __init__(self, decoder: Decoder, devices: Sequence[torch.device], events: list[str]) -> None:
        if not devices:
            raise InputError("devices: got none, expected one or more; leave it out to use the VAE's device")
        self.events = events
        self.living: list[Worker] = []
        # A name without an index means the current device, and cpu:0 is the CPU. Other devices are not touched here.
        resolved = [
            torch.empty(0, device=device).device if device.index is None or device.type == "cpu" else device
            for device in devices
        ]
        source = next(decoder.parameters()).device
        copies: dict[torch.device, Decoder] = {}
        errors: list[BaseException] = []
        for device in dict.fromkeys(resolved):
            try:
                with current_device(device):
                    copies[device] = decoder if device == source else copy_to(device, decoder)
            except Exception as error:
                errors.append(error)
            if device not in copies:
                self.note_left_out(device, release_memory_of(errors[-1], device))
        if not copies:
            raise errors[-1]
        self.living = [Worker(device, copies[device]) for device in resolved if device in copies]

    def note_left_out(self, device: torch.device, error: BaseException) -> None:
        why = "no room for a copy of the decoder" if is_out_of_memory(error) else type(error).__name__
        self.events.append(f"{device} was left out ({why})")

    def choose_plans(self, planner: Planner, max_bytes: int | None, free_bytes: Callable[[torch.device], int]) -> Plan:
        """Choose a plan for each worker, and return the largest one.

        Without `max_bytes`, each plan fits the free memory of its device. Devices without room for the smallest plan
        are left out, unless all are. Raises InputError for a `max_bytes` that is too small.
        """
        floor = planner.floor()
        free: dict[Worker, float] = {}
        failures: list[Failure] = []
        for worker in self.living:
            try:
                free[worker] = free_bytes(worker.device) if max_bytes is None else max_bytes
            except Exception as error:
                failures.append(Failure(worker, error))
        self.drop(failures)
        fitting = [worker for worker in self.living if free[worker] >= floor.peak_bytes]
        if max_bytes is None:
            # The free memory is an estimate. If no device has enough, the best one tries the smallest plan.
            fitting = fitting or [max(self.living, key=lambda worker: free[worker])]
            for worker in self.living:
                if worker not in fitting:
                    has, needs = (int(size) // MEBIBYTE for size in (free[worker], floor.peak_bytes + MEBIBYTE - 1))
                    self.events.append(f"{worker.device} was left out ({has} MiB are free, {needs} MiB are needed)")
            self.living = fitting
        for worker in self.living:
            budget = free[worker] if max_bytes is not None else max(BUDGET * free[worker], floor.peak_bytes)
            worker.first_plan = worker.plan = planner.strips(budget)
        return self.largest_plan()

    def largest_plan(self) -> Plan:
        return max((worker.plan for worker in self.living), key=lambda plan: plan.peak_bytes)

    def recover(self, failures: list[Failure], planner: Planner) -> list[Failure]:
        """Give smaller strips to the workers whose memory ran out. Returns the failures of the workers to drop."""
        broken: list[Failure] = []
        if any(is_driver_error(failure.error) for failure in failures):
            # A worker that copies rows from a failed device raises the error of that device.
            devices = {worker.device: device_error(worker.device) for worker in self.living}
            broken = [Failure(worker, error) for worker in self.living if (error := devices[worker.device])]
        lost = list(broken)
        for worker, error in failures:
            if worker in (failure.worker for failure in broken):
                continue
            following = smaller(planner, worker.plan) if is_out_of_memory(error) else None
            if following is not None:
                release_memory_of(error, worker.device)
                worker.plan = following
                words = following.words(planner.stages)
                self.events.append(f"out of memory on {worker.device}, continued with {words}")
            elif not (broken and is_driver_error(error)):
                lost.append(Failure(worker, error))
        return lost

    def drop(self, failures: list[Failure]) -> None:
        """Remove the workers of `failures`. Raises the error of the last one if no worker remains."""
        for worker, error in failures:
            self.living.remove(worker)
            # The copy of the decoder is freed here.
            del worker.decoder
            # Emptying the cache of CUDA waits for the device, so a hanging device is skipped.
            release_memory_of(error, torch.device("cpu") if isinstance(error, TimeoutError) else worker.device)
            if not self.living:
                raise error
            self.events.append(f"{worker.device} failed ({type(error).__name__}), its rows went to the others")


def copy_to(device: torch.device, decoder: Decoder) -> Decoder:
    """Return a copy of `decoder` on `device`, without a second copy on the device of `decoder`."""
    memo: dict[int, torch.Tensor] = {}
    for weight in decoder.parameters():
        memo[id(weight)] = torch.nn.Parameter(weight.detach().to(device), requires_grad=False)
    for buffer in decoder.buffers():
        memo[id(buffer)] = buffer.to(device)
    # deepcopy uses the tensors of the memo instead of copying the originals.
    duplicate = copy.deepcopy(decoder, memo)
    arrange_convolutions(duplicate)
    return duplicate


def device_error(device: torch.device) -> BaseException | None:
    """Return the driver error that any work on `device` raises, None if the device works."""
    try:
        torch.zeros(1, device=device).cpu()
    except Exception as error:
        return error if is_driver_error(error) else None
    return None


class WorkThread:
    """A thread that does work in the order of its submission.

    It is a daemon, because a thread that hangs in a driver cannot be ended and must not keep the process alive.
    """

    def __init__(self) -> None:
        self.waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self.work, name="sana decode", daemon=True)
        self.thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self.waiting.put((future, work))
        return future

    def work(self) -> None:
        while (job := self.waiting.get()) is not None:
            settle(*job)
            # Results and errors keep tensors alive.
            del job


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work`, and set its result or error on `future`."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        # The error refers to this frame, so they would keep each other alive.
        del future


class Crew:
    """Two threads for each worker: one computes, the other one copies finished pixels to the CPU.

    A context manager. At its end, waiting work is dropped, and running work ends at its next `check`.
    """

    def __init__(self, workers: list[Worker], poll: Poll) -> None:
        self.poll, self.stopped = poll, threading.Event()
        # The inference mode is set per thread, so the threads need the caller's.
        self.inference = torch.is_inference_mode_enabled()
        self.has_gpus = any(worker.device.type != "cpu" for worker in workers)
        self.computing = {worker: WorkThread() for worker in workers}
        self.copying = {worker: WorkThread() for worker in workers}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self.stopped.set()
        threads = (*self.computing.values(), *self.copying.values())
        for thread in threads:
            thread.waiting.put(None)
        deadline = time.monotonic() + ABORT_TIMEOUT
        for thread in threads:
            thread.thread.join(max(0.0, deadline - time.monotonic()))

    def hangs(self, since: float) -> bool:
        """Whether a GPU hangs, if the last result came at `since`. A CPU may take minutes for one result."""
        return self.has_gpus and time.monotonic() - since > HANG_TIMEOUT

    def hanging(self, futures: Iterable[Future[Any]]) -> set[Future[Any]]:
        """Stop the work, and return the futures that hang."""
        self.stopped.set()
        return set(wait(futures, ABORT_TIMEOUT).not_done)

    def check(self) -> None:
        """The poll of the threads. Raises Stopped."""
        if self.stopped.is_set():
            raise Stopped

    def inside(self, worker: Worker, work: Callable[[], T]) -> T:
        self.check()
        with current_device(worker.device), torch.inference_mode(self.inference), torch.no_grad():
            return work()

    def compute(self, worker: Worker, work: Callable[[], T]) -> Future[T]:
        return self.computing[worker].submit(partial(self.inside, worker, work))

    def copy_to_cpu(self, worker: Worker, pixels: torch.Tensor) -> Future[torch.Tensor]:
        return self.copying[worker].submit(partial(self.inside, worker, pixels.cpu))

    def run(self, tasks: list[tuple[Worker, Callable[[], T]]]) -> list[T]:
        """Return the results of `tasks`, in their order. The tasks of a worker run one after another. Raises Failed."""
        futures = [self.compute(worker, work) for worker, work in tasks]
        waiting, since = set(futures), time.monotonic()
        while waiting:
            finished, waiting = wait(waiting, SECONDS, FIRST_EXCEPTION)
            if any(future.exception() for future in finished):
                self.stopped.set()
            self.poll()
            since = time.monotonic() if finished else since
            if self.hangs(since):
                stuck = self.hanging(waiting)
                hanging = [worker for (worker, _), future in zip(tasks, futures, strict=True) if future in stuck]
                if hanging:
                    raise Failed([Failure(worker, no_answer()) for worker in dict.fromkeys(hanging)])
        errors = [(worker, future.exception()) for (worker, _), future in zip(tasks, futures, strict=True)]
        # One failure per worker: its later tasks fail for the same reason.
        failures = {worker: error for worker, error in reversed(errors) if error and not isinstance(error, Stopped)}
        if failures:
            raise Failed([Failure(*failure) for failure in failures.items()])
        return [future.result() for future in futures]


def no_answer() -> TimeoutError:
    return TimeoutError(f"no answer for {HANG_TIMEOUT:.0f} s")


def shared_rows(
    workers: Workers, planner: Planner, latents: torch.Tensor, report: Json, poll: Poll
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, pixels [1, 3, n, W] on the CPU) of `latents` [1, 32, h, w], in the order of completion.

    `latents` are on the CPU. `report` receives the final plan of the workers.
    """
    stages = planner.stages
    height = latents.shape[2] * stages.scale
    for worker in workers.living:
        worker.plan = worker.first_plan
    # Missing rows: (row of pixels, row of the boundary map).
    missing = [(0, height)]
    boundary: RowPartition | None = None
    while missing:
        failures: list[Failure] = []
        if boundary is None:
            try:
                boundary = shared_global_stage(workers.living, stages, latents, poll)
            except Failed as failed:
                failures = failed.failures
        else:
            missing = divided(missing, stages.stride, len(workers.living))
            failures = yield from shared_local_stage(workers.living, stages, boundary, missing, poll)
        if failures:
            lost = workers.recover(failures, planner)
            failures.clear()
            if lost:
                # A part of it is on the lost device, whose memory must be freed.
                boundary = None
                workers.drop(lost)
            report.update(workers.largest_plan().report(stages))


def divided(rows: list[tuple[int, int]], stride: int, parts: int) -> list[tuple[int, int]]:
    """Split the ranges `rows`, (row of pixels, row of the boundary map), into about `parts` ranges of equal height."""
    size = -(-sum(bottom - top // stride for top, bottom in rows) // parts)
    return [
        (max(top, low * stride), min(low + size, bottom))
        for top, bottom in rows
        for low in range(top // stride, bottom, size)
    ]


def shared_global_stage(workers: list[Worker], stages: Stages, latents: torch.Tensor, poll: Poll) -> RowPartition:
    """Return the boundary map, whose bands are on the devices of `workers`. Raises Failed."""
    first, (height, width), count = workers[0], latents.shape[2:], len(workers)
    # A band has complete pieces of the sums, and enough positions that torch chooses its usual kernels.
    share = max(-(-height // count), -(-FEW_POSITIONS // width))
    # A band with the rows of its neighbours has less than 2^31 elements. A worker may have several bands.
    limit = LARGEST_TENSOR // 2 // (stages.boundary_width * width * stages.scale**2)
    share = min(-(-share // PIECE), max(1, limit // PIECE)) * PIECE

    with Crew(workers, poll) as crew:

        def on_first(work: Callable[[], T]) -> T:
            return crew.run([(first, work)])[0]

        def on_each(work: Callable[[Worker, int], T], bands: int) -> list[T]:
            owners = itertools.islice(itertools.cycle(workers), bands)
            return crew.run([(worker, partial(work, worker, band)) for band, worker in enumerate(owners)])

        def project() -> RowPartition:
            return project_latents(first.decoder, latents.to(first.device)).channels_last()

        def band_of(x: RowPartition, worker: Worker, band: int) -> torch.Tensor:
            return x.rows(*spans[band], worker.device)

        spans = list(chunks(height, share))
        bands = RowPartition(on_each(partial(band_of, on_first(project)), len(spans)))
        blocks = {worker: [block for block, _ in global_blocks(worker.decoder, stages)] for worker in workers}
        for number, (block, scale) in enumerate(global_blocks(first.decoder, stages)):
            same_block = {worker: blocks[worker][number] for worker in workers}
            if runs_undivided(block, bands):
                bands = on_first(partial(undivided, first, block, bands, scale, crew.check))
            elif is_attention(block):
                bands = shared_attention(same_block, bands, scale, on_first, on_each, crew.check)
            else:
                # Without a name, which would keep these bands alive during the next block.
                bands = RowPartition(
                    on_each(partial(convolved_band, same_block, bands, scale, crew.check), len(bands.parts))
                )
        return bands


def undivided(worker: Worker, block: torch.nn.Module, bands: RowPartition, scale: int, poll: Poll) -> RowPartition:
    """Run `block` on one device, because the map has few positions."""
    x = bands.moved(0, bands.height, worker.device)
    return global_block(block, x, None, scale, Workspace(x.parts[0], worker.plan.workspace), poll)


def extended(bands: RowPartition, index: int, reach: int, device: torch.device) -> tuple[RowPartition, range]:
    """Return band `index` with `reach` rows of its neighbours, on `device`, and the range of the band's rows in it."""
    start, stop = bands.edges[index], bands.edges[index + 1]
    low, high = max(0, start - reach), min(bands.height, stop + reach)
    return RowPartition([bands.rows(low, high, device)]), range(start - low, stop - low)


def shared_attention(
    blocks: dict[Worker, torch.nn.Module],
    bands: RowPartition,
    scale: int,
    on_first: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
    on_each: Callable,
    poll: Poll,
) -> RowPartition:
    """Run an attention block on `bands`. `blocks` are its copies on the devices of the workers."""
    first = next(iter(blocks))
    reach = halo(blocks[first].attn) + GLU_HALO

    def band_sums(worker: Worker, band: int) -> list[torch.Tensor]:
        x, rows = extended(bands, band, reach, worker.device)
        plan, attn = worker.plan, blocks[worker].attn
        strip = (plan.attention_rows or PIECE) * scale
        return list(score_pieces(attn, x, rows, strip, PIECE * scale, Workspace(x.parts[0], plan.workspace), poll))

    def total() -> torch.Tensor:
        return ordered_sum(piece.to(first.device, copy=True) for piece in pieces)

    def attend(worker: Worker, band: int) -> torch.Tensor:
        x, rows = extended(bands, band, reach, worker.device)
        plan = worker.plan
        strip, workspace = (plan.attention_rows or PIECE) * scale, Workspace(x.parts[0], plan.workspace)
        parts = attend_rows(blocks[worker], x, sums.to(worker.device), rows, strip, workspace, poll)
        return torch.cat(list(parts), dim=2)

    pieces = [piece for sums_of_band in on_each(band_sums, len(bands.parts)) for piece in sums_of_band]
    sums = on_first(total)
    return RowPartition(on_each(attend, len(bands.parts)))


def convolved_band(
    blocks: dict[Worker, torch.nn.Module], bands: RowPartition, scale: int, poll: Poll, worker: Worker, band: int
) -> torch.Tensor:
    """Run a block of convolutions on band `band`. `blocks` are its copies on the devices of the workers."""
    # Two convolutions, or one that upsamples, read two rows beyond the band.
    x, rows = extended(bands, band, 2, worker.device)
    block, strip = blocks[worker], (worker.plan.attention_rows or PIECE) * scale
    out = convolved(block, x, bands, strip, Workspace(x.parts[0], worker.plan.workspace), poll)
    return out.rows(output_size(block, rows.start), output_size(block, rows.stop))


def shared_local_stage(
    workers: list[Worker], stages: Stages, boundary: RowPartition, missing: list[tuple[int, int]], poll: Poll
) -> Generator[tuple[int, torch.Tensor], None, list[Failure]]:
    """Yield (first row, pixels [1, 3, n, W] on the CPU) of the rows in `missing`, in the order of completion.

    Removes finished rows from `missing`. Returns the failures.
    """
    failures: list[Failure] = []
    # A future with a strip on the device, or on the CPU.
    computing: dict[Future[torch.Tensor | None], Task] = {}
    copying: dict[Future[torch.Tensor], Task] = {}
    with Crew(workers, poll) as crew:
        since = time.monotonic()
        while True:
            busy = {task.worker for task in (*computing.values(), *copying.values())}
            # After a failure no worker begins a new range, because its boundary map may be on the failed device.
            for worker in [worker for worker in workers if worker not in busy][: 0 if failures else len(missing)]:
                top, bottom = missing.pop(0)
                strips = range_rows(worker, stages, boundary, top, bottom, crew.check)
                task = Task(worker, strips, top, bottom)
                computing |= {crew.compute(worker, partial(next, strips, None)): task for _ in range(AHEAD)}
            if not computing and not copying:
                return failures
            poll()
            running: list[Future] = [*copying, *computing]
            finished = wait(running, SECONDS, FIRST_COMPLETED).done
            if not finished and crew.hangs(since):
                stuck = crew.hanging(running)
                tasks: dict[Future[Any], Task] = {**copying, **computing}
                missing += [(task.row, task.bottom) for task in set(tasks.values()) if not task.failed]
                hanging = {tasks[future].worker for future in running if future in stuck}
                return failures + [Failure(worker, no_answer()) for worker in hanging]
            # Finished futures in the order in which they were submitted.
            for future in [future for future in running if future in finished]:
                copied = future in copying
                task, error = copying.pop(future) if copied else computing.pop(future), future.exception()
                if task.failed:
                    # A strip that was computed ahead. The rows before it are missing.
                    continue
                if error is not None:
                    task.failed = True
                    missing.append((task.row, task.bottom))
                    failures.append(Failure(task.worker, error))
                    continue
                pixels = future.result()
                if pixels is None:
                    continue
                if copied:
                    row, task.row = task.row, task.row + pixels.shape[2]
                    yield row, pixels
                else:
                    copying[crew.copy_to_cpu(task.worker, pixels)] = task
                    computing[crew.compute(task.worker, partial(next, task.strips, None))] = task
            # The consumer of the rows may have taken long.
            since = time.monotonic() if finished else since


def range_rows(
    worker: Worker, stages: Stages, boundary: RowPartition, top: int, bottom: int, poll: Poll
) -> Iterator[torch.Tensor]:
    """Yield the pixels from row `top` of the image to row `bottom` of the boundary map, strip by strip."""
    first, repeated = divmod(top, stages.stride)
    low, high = max(0, first - stages.halo), min(boundary.height, bottom + stages.halo)
    part = boundary.moved(low, high, worker.device)
    workspace, rows = Workspace(part.parts[0], worker.plan.workspace), range(first - low, bottom - low)
    yield from without_first(
        repeated, pixel_rows(worker.decoder, stages, part, rows, worker.plan.strip, workspace, poll)
    )
