"""One image over several devices: each has a band of rows.

In the attention stages the bands stay where they are. A block's sums come back from every device, are added from the
top of the image to its bottom, and go out again; the rows that a band's edge looks at are copied from its neighbours.
The boundary map is then put together on the first device, and each device takes rows of it to pixels. Sums and strips
are those of one device, so the pixels are too.

Where memory runs out, all go on with smaller strips. A device that fails otherwise, or has no room for the smallest, is
left out: the attention stages begin again on the others, and its rows of pixels go to them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from ..errors import InputError
from ..model.layers import arrange_convolutions
from ..runtime.accelerator import is_out_of_memory, release_memory_of
from ..runtime.cancellation import Poll, no_poll
from .attention import GLU_HALO, attend_rows, halo, score_pieces
from .oom import OomRetry
from .plan import Plan, smaller
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

SECONDS = 0.02  # between two polls of the thread that waits
# strips that a device goes on with while the one before is taken
AHEAD = 2
T = TypeVar("T")


class Stopped(Exception):
    """The work was cancelled by the thread that waits for it."""


class Failure(Exception):
    """A worker failed, in a phase that the others cannot end without it, or in rows of its own."""

    def __init__(self, worker: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.worker, self.error = worker, error


@dataclass
class Task:
    """Rows of the boundary map that a worker takes to pixels, up to `bottom`; `row` is the next one of pixels."""

    worker: int
    strips: Iterator[torch.Tensor]
    row: int
    bottom: int


class Workers:
    """A decoder on each device. A device may be named twice, and then has two workers and one set of weights."""

    def __init__(self, decoder: Decoder, devices: list[torch.device]) -> None:
        if not devices:
            raise InputError("devices: got none, expected one or more; leave it out for the VAE's own")
        own = next(decoder.parameters()).device
        # a device with and without its index is one device
        placed = [torch.empty(0, device=device).device for device in devices]
        copies = {device: decoder if device == own else copy_to(device, decoder) for device in set(placed)}
        self.devices = placed
        self.decoders = [copies[device] for device in placed]

    def drop(self, failure: Failure, events: list[str]) -> None:
        """Leave the worker of `failure` out. Raises its error if it was the last."""
        device = self.devices.pop(failure.worker)
        self.decoders.pop(failure.worker)
        error = release_memory_of(failure.error)
        if not self.devices:
            raise error
        events.append(f"{device} failed ({type(error).__name__}), its rows went to the others")


def copy_to(device: torch.device, decoder: Decoder) -> Decoder:
    twin = copy.deepcopy(decoder).to(device)
    arrange_convolutions(twin)
    return twin


def shared_rows(
    workers: Workers, stages: Stages, latents: torch.Tensor, retry: OomRetry, poll: Poll
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, pixels [1, 3, n, W]) of `latents` [1, 32, h, w], in the order in which they are done."""
    boundary = None
    while boundary is None:
        failures: list[Failure] = []
        try:
            boundary = shared_global_stage(workers, stages, latents, retry.plan, poll)
        except Failure as failure:
            # without its frames, which would keep the failed work's tensors alive
            failures.append(failure.with_traceback(None))
        recover(workers, failures, retry)
    waiting = list(chunks(boundary.height, -(-boundary.height // len(workers.devices))))
    while waiting:
        failures = yield from shared_local_stage(workers, stages, boundary, retry.plan, waiting, poll)
        recover(workers, failures, retry)


def recover(workers: Workers, failures: list[Failure], retry: OomRetry) -> None:
    """Take half the budget where memory ran out and strips can be smaller; leave out the workers of other failures."""
    short = [failure for failure in failures if is_out_of_memory(failure.error)]
    if short and smaller(retry.planner, retry.plan) is not None:
        retry.shrink([short[0].error])
        failures = [failure for failure in failures if failure not in short]
    for failure in sorted(failures, key=lambda one: -one.worker):
        workers.drop(failure, retry.report["events"])


def shared_global_stage(
    workers: Workers, stages: Stages, latents: torch.Tensor, plan: Plan, poll: Poll
) -> RowPartition:
    """Return the boundary map, on the first device. Raises Failure."""
    rows = plan.attention_rows or PIECE
    x = project_latents(workers.decoders[0], latents.to(workers.devices[0])).channels_last()
    (height, width), count = latents.shape[2:], len(workers.devices)
    # whole pieces of the sums for each, and enough positions that no kernel for a few of them is chosen
    share = max(-(-height // count), -(-FEW_POSITIONS // width))
    # but no band, with its neighbours' rows, of 2^31 elements: a device may have several
    most = LARGEST_TENSOR // 2 // (stages.boundary_width * width * stages.scale**2)
    share = min(-(-share // PIECE), max(1, most // PIECE)) * PIECE
    spans = enumerate(chunks(height, share))
    bands = RowPartition([x.rows(*span, workers.devices[index % count]) for index, span in spans])
    blocks = [list(global_blocks(decoder, stages)) for decoder in workers.decoders]

    def workspace(like: torch.Tensor) -> Workspace:
        return Workspace(like, plan.workspace)

    with ThreadPoolExecutor(count) as pool:

        def phase(work: Callable[[int], T]) -> list[T]:
            return all_of(pool, len(bands.parts), count, work, poll)

        for number, (block, scale) in enumerate(blocks[0]):
            own = [blocks[index % count][number][0] for index in range(len(bands.parts))]
            if runs_undivided(block, bands):
                # so few positions that one device has them all
                few = bands.moved(0, bands.height, workers.devices[0])
                bands = global_block(block, few, None, scale, workspace(few.parts[0]), poll)
            elif is_attention(block):
                bands = shared_attention(own, bands, (rows * scale, PIECE * scale), workspace, phase)
            else:
                bands = shared_local(own, bands, rows * scale, workspace, phase)
    return bands.moved(0, bands.height, workers.devices[0])


def extended(bands: RowPartition, index: int, reach: int) -> tuple[RowPartition, int, int]:
    """Return band `index` with `reach` rows of its neighbours, and where its own rows begin and end in that."""
    start, stop = bands.edges[index], bands.edges[index + 1]
    low, high = max(0, start - reach), min(bands.height, stop + reach)
    return RowPartition([bands.rows(low, high, bands.parts[index].device)]), start - low, stop - low


def shared_attention(
    own: list,
    bands: RowPartition,
    rows: tuple[int, int],
    workspace: Callable[[torch.Tensor], Workspace],
    phase: Callable,
) -> RowPartition:
    """Return an attention block of `bands`; `own` is the block on each device, `rows` those of a strip and a piece."""
    reach = halo(own[0].attn) + GLU_HALO

    def sums(index: int) -> list[torch.Tensor]:
        x, start, stop = extended(bands, index, reach)
        return list(score_pieces(own[index].attn, x, range(start, stop), *rows, workspace(x.parts[0]), no_poll))

    pieces = [piece for band in phase(sums) for piece in band]
    scores = ordered_sum(one.to(pieces[0].device, copy=True) for one in pieces)

    def attend(index: int) -> torch.Tensor:
        x, start, stop = extended(bands, index, reach)
        known = scores.to(bands.parts[index].device)
        parts = attend_rows(own[index], x, known, range(start, stop), rows[0], workspace(x.parts[0]), no_poll)
        return torch.cat(list(parts), dim=2)

    return RowPartition(phase(attend))


def shared_local(
    own: list, bands: RowPartition, rows: int, workspace: Callable[[torch.Tensor], Workspace], phase: Callable
) -> RowPartition:
    """Return a block of convolutions of `bands`, with `rows` rows at a time."""

    def convolve(index: int) -> torch.Tensor:
        # two rows: what one convolution after the other, and an upsampling one, can see
        x, start, stop = extended(bands, index, 2)
        out = convolved(own[index], x, bands, rows, workspace(x.parts[0]), no_poll)
        return out.rows(output_size(own[index], start), output_size(own[index], stop))

    return RowPartition(phase(convolve))


def all_of(pool: ThreadPoolExecutor, bands: int, workers: int, work: Callable[[int], T], poll: Poll) -> list[T]:
    """Return work(0) .. work(bands - 1), the bands dealt out in turn. Raises Failure for the first that fails."""

    def quiet(index: int) -> T:
        with torch.no_grad():
            return work(index)

    futures: list[Future[T]] = [pool.submit(quiet, index) for index in range(bands)]
    while wait(futures, SECONDS).not_done:
        poll()
    for index, future in enumerate(futures):
        error = future.exception()
        if error is not None:
            raise Failure(index % workers, error)
    return [future.result() for future in futures]


def shared_local_stage(
    workers: Workers,
    stages: Stages,
    boundary: RowPartition,
    plan: Plan,
    waiting: list[tuple[int, int]],
    poll: Poll,
) -> Generator[tuple[int, torch.Tensor], None, list[Failure]]:
    """Yield (first row, pixels [1, 3, n, W]) of the row ranges in `waiting`, in the order in which they are done.

    What a failing worker leaves goes back into `waiting`, and its failure is among those that are returned.
    """
    failures: list[Failure] = []
    running: dict[Future[torch.Tensor | None], Task] = {}
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise Stopped

    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in workers.devices]
        stack.callback(stop.set)
        while True:
            busy = {task.worker for task in running.values()} | {failure.worker for failure in failures}
            for index in sorted(set(range(len(threads))) - busy)[: len(waiting)]:
                top, bottom = waiting.pop(0)
                strips = range_rows(workers, index, stages, boundary, plan, range(top, bottom), check)
                task = Task(index, strips, top * stages.stride, bottom)
                running |= {threads[index].submit(next_rows, strips): task for _ in range(AHEAD)}
            if not running:
                return failures
            poll()
            done = wait(running, SECONDS, FIRST_COMPLETED).done
            # of a device in the order of its strips
            for future in [each for each in running if each in done]:
                task, error = running.pop(future), future.exception()
                if error is not None:
                    # from the last whole row of the boundary map; a few rows of pixels are made twice
                    waiting.append((task.row // stages.stride, task.bottom))
                    failures.append(Failure(task.worker, error))
                elif (pixels := future.result()) is not None:
                    running[threads[task.worker].submit(next_rows, task.strips)] = task
                    row, task.row = task.row, task.row + pixels.shape[2]
                    yield row, pixels


def range_rows(
    workers: Workers, index: int, stages: Stages, boundary: RowPartition, plan: Plan, span: range, poll: Poll
) -> Iterator[torch.Tensor]:
    """Yield the pixels of the rows in `span` of the boundary map, strip by strip, made by one of the workers."""
    low, high = max(0, span.start - stages.halo), min(boundary.height, span.stop + stages.halo)
    part = boundary.moved(low, high, workers.devices[index])
    workspace, own = Workspace(part.parts[0], plan.workspace), range(span.start - low, span.stop - low)
    yield from pixel_rows(workers.decoders[index], stages, part, own, plan.strip, workspace, poll)


@torch.no_grad()
def next_rows(strips: Iterator[torch.Tensor]) -> torch.Tensor | None:
    """Return the next strip, None after the last."""
    return next(strips, None)
