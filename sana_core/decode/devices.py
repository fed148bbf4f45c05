"""Decode one image on several devices. Each device decodes a band of rows.

In the attention stages, the bands stay on their devices. The sums of each attention block are added on the first
device, from the top of the image to its bottom, and sent back to all devices. The rows that a band needs beyond its
edges are copied from its neighbours. At the end, each device gets the rows of the boundary map that it decodes to
pixels, and all devices are synchronised. From then on no device needs data of another one. Each strip of pixels counts
once it has been copied to the CPU, because the copy waits for its device. Sums and strips are the same as on one
device, so the pixels are the same too.

If a device fails, hangs or runs out of memory, it is left out. The others compute the boundary map again from the
latents, and decode the rows whose pixels are missing. A device that is left alone decodes them as if it were the only
one. The latents and the pixels are on the CPU, so any device may fail.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from ..errors import InputError
from ..model.layers import arrange_convolutions
from ..runtime.accelerator import is_out_of_memory
from ..runtime.cancellation import Poll
from ..runtime.device_team import Attempt, DeviceThread, DeviceThreads, Failed, Team
from ..runtime.text import Json
from .attention import GLU_HALO, attend_rows, halo, score_pieces
from .oom import OomRetry, without_first
from .plan import MEBIBYTE, Plan, Planner
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

# Strips that a worker has to compute at any time, so that its thread never waits for the one that takes them.
AHEAD = 2
# Share of the free memory that a decode may use, because other programs need some too.
BUDGET = 0.9
T = TypeVar("T")


@dataclass(eq=False)
class Worker:
    """A device that takes part in a decode, with the decoder on it."""

    thread: DeviceThread
    decoder: Decoder
    # Bytes that a decode may allocate on the device.
    free: int = 0
    plan: Plan = Plan("strips")

    @property
    def device(self) -> torch.device:
        return self.thread.device


@dataclass(eq=False)
class Task:
    """Rows that a worker decodes to pixels."""

    worker: Worker
    # The next row of pixels to yield.
    row: int
    # End of the task, a row of the boundary map.
    bottom: int


class Workers:
    """The workers of a decode. A device may be named twice. It then has two workers that share the weights.

    `free_bytes` returns the bytes that a decode may allocate on a device. `events` gets a line for each device that is
    left out. `threads` may come from earlier images.
    """

    def __init__(
        self,
        decoder: Decoder,
        devices: Sequence[torch.device],
        free_bytes: Callable[[torch.device], int],
        events: list[str],
        threads: DeviceThreads | None,
        poll: Poll,
    ) -> None:
        if not devices:
            raise InputError("devices: got none, expected one or more; leave it out to use the VAE's device")
        self.events = events
        # A name without an index means the current device, and cpu:0 is the CPU. Other devices are not touched here.
        resolved = [
            torch.empty(0, device=device).device if device.index is None or device.type == "cpu" else device
            for device in devices
        ]
        self.team = Team(resolved, threads)
        source = next(decoder.parameters()).device

        def prepare(device: torch.device) -> tuple[Decoder, int]:
            prepared = decoder if device == source else copy_to(device, decoder)
            return prepared, free_bytes(device)

        def attempt_copies() -> list[Worker]:
            living = self.team.living
            with Attempt(self.team, poll) as attempt:
                threads_of_devices = {thread.device: thread for thread in reversed(living)}
                results = attempt.run(
                    (thread, partial(prepare, device)) for device, thread in threads_of_devices.items()
                )
                attempt.synchronize(source)
            by_device = dict(zip(threads_of_devices, results, strict=True))
            return [Worker(thread, *by_device[thread.device]) for thread in living]

        def report(thread: DeviceThread, error: BaseException) -> None:
            why = "no room for a copy of the decoder" if is_out_of_memory(error) else type(error).__name__
            events.append(f"{thread.device} was left out ({why})")

        self.living = self.team.repeat(attempt_copies, poll, source, report)

    def choose_plans(self, planner: Planner, max_bytes: int | None) -> Plan:
        """Choose a plan for each worker, and return the largest one.

        Without `max_bytes`, each plan fits the free memory of its device. Devices without room for the smallest plan
        are left out, unless all are.
        """
        floor = planner.floor().peak_bytes
        if max_bytes is None:
            # The free memory is an estimate. If no device has enough, the best one tries the smallest plan.
            fitting = [worker for worker in self.living if worker.free >= floor]
            fitting = fitting or [max(self.living, key=lambda worker: worker.free)]
            for worker in self.living:
                if worker not in fitting:
                    has, needs = worker.free // MEBIBYTE, -(-floor // MEBIBYTE)
                    self.events.append(f"{worker.device} was left out ({has} MiB are free, {needs} MiB are needed)")
            self.keep(fitting)
        for worker in self.living:
            worker.plan = planner.strips(max(BUDGET * worker.free, floor) if max_bytes is None else max_bytes)
        return self.largest_plan()

    def largest_plan(self) -> Plan:
        return max((worker.plan for worker in self.living), key=lambda plan: plan.peak_bytes)

    def keep(self, workers: list[Worker]) -> None:
        """Leave out all but `workers`. Their copies of the decoder are freed."""
        self.living, self.team.living = workers, [worker.thread for worker in workers]

    def leave_out(self, failed: Failed, poll: Poll) -> None:
        """Leave out the workers because of which a decode failed. Raises the error if no worker remains."""
        for thread, error in self.team.leave_out(failed, poll):
            self.events.append(f"{thread.device} failed ({type(error).__name__}), its rows went to the others")
        self.keep([worker for worker in self.living if worker.thread in self.team.living])


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


def shared_rows(
    workers: Workers, planner: Planner, latents: torch.Tensor, report: Json, poll: Poll
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, pixels [1, 3, n, W] on the CPU) of `latents` [1, 32, h, w], in the order of completion.

    `latents` are on the CPU. `report` receives the final plan of the workers.
    """
    stages = planner.stages
    # Rows without pixels: (row of pixels, row of the boundary map).
    missing = [(0, latents.shape[2] * stages.scale)]
    while missing:
        ranges = divided(missing, stages.stride, len(workers.living))
        tasks = [Task(worker, *rows) for worker, rows in zip(itertools.cycle(workers.living), ranges, strict=False)]
        failure: Failed | None = None
        try:
            yield from decode_tasks(workers, planner, latents, tasks, report, poll)
        except Failed as failed:
            # Its frames would keep the tensors of the failed attempt alive.
            failure = failed.with_traceback(None)
        missing = [(task.row, task.bottom) for task in tasks if task.row < task.bottom * stages.stride]
        if failure is not None:
            workers.leave_out(failure, poll)
            report.update(workers.largest_plan().report(stages))
    workers.team.experienced = True


def divided(rows: list[tuple[int, int]], stride: int, parts: int) -> list[tuple[int, int]]:
    """Split the ranges `rows`, (row of pixels, row of the boundary map), into about `parts` ranges of equal height."""
    size = -(-sum(bottom - top // stride for top, bottom in rows) // parts)
    return [
        (max(top, low * stride), min(low + size, bottom))
        for top, bottom in rows
        for low in range(top // stride, bottom, size)
    ]


def decode_tasks(
    workers: Workers, planner: Planner, latents: torch.Tensor, tasks: list[Task], report: Json, poll: Poll
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows of `tasks` as `shared_rows` does, and advance the tasks. Raises Failed."""
    with Attempt(workers.team, poll) as attempt:
        decode = decode_alone if len(workers.living) == 1 else decode_together
        strips = decode(attempt, workers.living, planner, latents, tasks, report)
        # Jobs that return a strip on the CPU, or None at the end.
        running: dict[Future[tuple[Task, torch.Tensor] | None], DeviceThread] = {}
        for thread in [*strips] * AHEAD:
            running[attempt.submit(thread, partial(next, strips[thread], None))] = thread
        while running:
            finished = attempt.wait(running)
            # In the order in which they were submitted.
            for future in [future for future in running if future in finished]:
                thread, strip = running.pop(future), future.result()
                if strip is not None:
                    running[attempt.submit(thread, partial(next, strips[thread], None))] = thread
                    task, pixels = strip
                    row, task.row = task.row, task.row + pixels.shape[2]
                    yield row, pixels
                    del strip, pixels


def decode_alone(
    attempt: Attempt, workers: list[Worker], planner: Planner, latents: torch.Tensor, tasks: list[Task], report: Json
) -> dict[DeviceThread, Iterator[tuple[Task, torch.Tensor]]]:
    """Let the only one of `workers` decode as a single device does, also after memory ran out. Returns its strips."""
    (worker,), stages = workers, planner.stages
    # Attention is added in the pieces of `decode_together`, so that the pixels have the same bits.
    retry = OomRetry(planner, replace(worker.plan, attention_rows=worker.plan.attention_rows or PIECE), report)

    def global_stage() -> RowPartition:
        return retry.global_stage(worker.decoder, stages, latents.to(worker.device), attempt.check)

    (boundary,) = attempt.run([(worker.thread, global_stage)])

    def strips() -> Iterator[tuple[Task, torch.Tensor]]:
        for task in tasks:
            rows = range(task.row, task.bottom * stages.stride)
            for _, pixels in retry.local_stage(worker.decoder, stages, boundary, attempt.check, rows):
                yield task, pixels.cpu()
                del pixels

    return {worker.thread: strips()}


def decode_together(
    attempt: Attempt, workers: list[Worker], planner: Planner, latents: torch.Tensor, tasks: list[Task], report: Json
) -> dict[DeviceThread, Iterator[tuple[Task, torch.Tensor]]]:
    """Compute the boundary map with all `workers`, and let each decode its `tasks`. Returns the strips by thread."""
    stages = planner.stages
    boundary = shared_global_stage(attempt, workers, stages, latents)

    def part_of(task: Task) -> RowPartition:
        # The rows of the task, and those that its first and last rows reach.
        low, high = max(0, task.row // stages.stride - stages.halo), min(boundary.height, task.bottom + stages.halo)
        return boundary.moved(low, high, task.worker.device)

    parts = attempt.run((task.worker.thread, partial(part_of, task)) for task in tasks)
    attempt.synchronize()

    def strips(worker: Worker) -> Iterator[tuple[Task, torch.Tensor]]:
        for task, part in zip(tasks, parts, strict=True):
            if task.worker is not worker:
                continue
            first, repeated = divmod(task.row, stages.stride)
            top = max(0, first - stages.halo)
            workspace, rows = Workspace(part.parts[0], worker.plan.workspace), range(first - top, task.bottom - top)
            pieces = pixel_rows(worker.decoder, stages, part, rows, worker.plan.strip, workspace, attempt.check)
            for pixels in without_first(repeated, pieces):
                yield task, pixels.cpu()
                del pixels

    return {worker.thread: strips(worker) for worker in workers}


def shared_global_stage(attempt: Attempt, workers: list[Worker], stages: Stages, latents: torch.Tensor) -> RowPartition:
    """Return the boundary map, whose bands are on the devices of `workers`. Raises Failed."""
    first, (height, width), count = workers[0], latents.shape[2:], len(workers)
    # A band has complete pieces of the sums, and enough positions that torch chooses its usual kernels.
    share = max(-(-height // count), -(-FEW_POSITIONS // width))
    # A band with the rows of its neighbours has less than 2^31 elements. A worker may have several bands.
    limit = LARGEST_TENSOR // 2 // (stages.boundary_width * width * stages.scale**2)
    share = min(-(-share // PIECE), max(1, limit // PIECE)) * PIECE

    def on_first(work: Callable[[], T]) -> T:
        return attempt.run([(first.thread, work)])[0]

    def on_each(work: Callable[[Worker, int], T], bands: int) -> list[T]:
        owners = itertools.islice(itertools.cycle(workers), bands)
        return attempt.run((worker.thread, partial(work, worker, band)) for band, worker in enumerate(owners))

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
            bands = on_first(partial(undivided, first, block, bands, scale, attempt.check))
        elif is_attention(block):
            bands = shared_attention(same_block, bands, scale, on_first, on_each, attempt.check)
        else:
            # Without a name, which would keep these bands alive during the next block.
            bands = RowPartition(
                on_each(partial(convolved_band, same_block, bands, scale, attempt.check), len(bands.parts))
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
