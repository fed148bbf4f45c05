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
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from ..errors import InputError
from ..model.weight_layout import arrange_convolutions
from ..runtime.accelerator import is_out_of_memory, release_memory_of
from ..runtime.cancellation import Poll, no_poll
from .attention import GLU_HALO, attend_rows, halo, score_pieces
from .oom import OomRetry
from .plan import Plan
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
T = TypeVar("T")


class Stopped(Exception):
    """The work was cancelled by the thread that waits for it."""


class Failure(NamedTuple):
    worker: int
    error: BaseException


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

    def drop(self, failure: Failure, note: Callable[[str], None]) -> None:
        """Leave the worker of `failure` out. Raises its error if it was the last."""
        device = self.devices.pop(failure.worker)
        self.decoders.pop(failure.worker)
        error = release_memory_of(failure.error)
        if not self.devices:
            raise error
        note(f"{device} failed ({type(error).__name__}), its rows went to the others")


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
        try:
            boundary = shared_global_stage(workers, stages, latents, retry.plan, poll)
        except WorkerFailed as failed:
            failure = failed.failure
        if boundary is None:
            recover(workers, [failure], retry)
    waiting = list(chunks(boundary.height, -(-boundary.height // len(workers.devices))))
    while waiting:
        local = SharedLocalStage(workers, stages, boundary, retry.plan, waiting)
        yield from local.rows(poll)
        recover(workers, local.failures, retry)


def recover(workers: Workers, failures: list[Failure], retry: OomRetry) -> None:
    """Take half the budget where memory ran out and strips can be smaller; leave out the workers of other failures."""
    short = [failure for failure in failures if is_out_of_memory(failure.error)]
    if short and retry.can_shrink():
        retry.shrink([short[0].error])
        failures = [failure for failure in failures if failure not in short]
    for failure in sorted(failures, key=lambda one: -one.worker):
        workers.drop(failure, retry.report.add)


class WorkerFailed(Exception):
    """A worker failed in a phase that the others cannot end without it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


def shared_global_stage(
    workers: Workers, stages: Stages, latents: torch.Tensor, plan: Plan, poll: Poll
) -> RowPartition:
    """Return the boundary map, on the first device. Raises WorkerFailed."""
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
    """Return work(0) .. work(bands - 1), the bands dealt out in turn. Raises WorkerFailed for the first that fails."""

    def quiet(index: int) -> T:
        with torch.no_grad():
            return work(index)

    futures: list[Future[T]] = [pool.submit(quiet, index) for index in range(bands)]
    while wait(futures, SECONDS).not_done:
        poll()
    for index, future in enumerate(futures):
        error = future.exception()
        if error is not None:
            raise WorkerFailed(Failure(index % workers, error))
    return [future.result() for future in futures]


class SharedLocalStage:
    """The local stage on several devices: a thread for each takes row ranges out of `waiting` to pixels.

    What a failing worker leaves goes back into `waiting`, and its error into `failures`.
    """

    def __init__(
        self, workers: Workers, stages: Stages, boundary: RowPartition, plan: Plan, waiting: list[tuple[int, int]]
    ) -> None:
        self.workers, self.stages, self.boundary, self.plan = workers, stages, boundary, plan
        self.waiting = waiting
        self.failures: list[Failure] = []
        self.stop, self.lock = threading.Event(), threading.Lock()
        # None from each thread at its end
        self.done: queue.Queue[tuple[int, torch.Tensor] | None] = queue.Queue(2 * len(workers.devices))

    def rows(self, poll: Poll) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, pixels [1, 3, n, W]), in the order in which they are done."""
        running = len(self.workers.devices)
        threads = [threading.Thread(target=self.work, args=(index,), daemon=True) for index in range(running)]
        for thread in threads:
            thread.start()
        try:
            while running:
                poll()
                try:
                    item = self.done.get(timeout=SECONDS)
                except queue.Empty:
                    continue
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()

    def work(self, index: int) -> None:
        """What a thread does: one row range after another."""
        try:
            with torch.no_grad():
                while (span := self.next_span()) is not None:
                    self.take(index, *span)
        except Stopped:
            return
        except Exception as error:
            self.failures.append(Failure(index, error))
        finally:
            self.hand(None)

    def next_span(self) -> tuple[int, int] | None:
        with self.lock:
            return self.waiting.pop(0) if self.waiting else None

    def take(self, index: int, top: int, bottom: int) -> None:
        """Take rows `top` to `bottom` of the boundary map to pixels."""
        halo, stride, height = self.stages.halo, self.stages.stride, self.boundary.height
        low, high = max(0, top - halo), min(height, bottom + halo)
        row, decoder = top * stride, self.workers.decoders[index]
        try:
            part = self.boundary.moved(low, high, self.workers.devices[index])
            workspace = Workspace(part.parts[0], self.plan.workspace)
            span = range(top - low, bottom - low)
            for pixels in pixel_rows(decoder, self.stages, part, span, self.plan.strip, workspace, self.check):
                self.hand((row, pixels))
                row += pixels.shape[2]
        except Exception:
            # from the last whole row of the boundary map; a few rows of pixels are made twice
            self.waiting.append((row // stride, bottom))
            raise

    def hand(self, item: tuple[int, torch.Tensor] | None) -> None:
        while not self.stop.is_set():
            try:
                return self.done.put(item, timeout=SECONDS)
            except queue.Full:
                continue

    def check(self) -> None:
        """Raise Stopped once nobody waits for pixels any more."""
        if self.stop.is_set():
            raise Stopped
