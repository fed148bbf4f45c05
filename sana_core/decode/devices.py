"""One picture over several devices: each has a band of rows.

In the attention stages the bands stay where they are. A block's sums come back from every device, are added from the
top of the picture to its bottom, and go out again; the rows that a band's edge looks at are copied from its neighbours.
The kept map is then put together on the first device, and each device takes rows of it to pixels. Sums and strips are
those of one device, so the pixels are too.

A device that fails is left out: the attention stages begin again on the others, and its rows of pixels go to them.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from .attention import GLU_HALO, attend_rows, halo, score_pieces
from .faults import forget
from .layout import Layout
from .plan import Plan
from .rows import Poll, chunks, run
from .strips import (
    PIECE,
    first_map,
    global_block,
    global_blocks,
    is_attention,
    is_quadratic,
    local_layer,
    ordered_sum,
    pixel_rows,
    resized,
)

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_dc import Decoder

SECONDS = 0.02  # between two polls of the thread that waits
ATTENTION_ROWS = 8  # of latents, where the plan has no limit
FEW_POSITIONS = 64  # of latents, in a band
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
            raise ValueError("devices: got none, expected one or more; leave it out for the autoencoder's own")
        own = next(decoder.parameters()).device
        # a device with and without its index is one device
        placed = [torch.empty(0, device=device).device for device in devices]
        copies = {device: decoder if device == own else copy.deepcopy(decoder).to(device) for device in set(placed)}
        self.devices = placed
        self.decoders = [copies[device] for device in placed]

    def drop(self, failure: Failure, note: Callable[[str], None]) -> None:
        """Leave the worker of `failure` out. Raises its error if it was the last."""
        device = self.devices.pop(failure.worker)
        self.decoders.pop(failure.worker)
        error = forget(failure.error)
        if not self.devices:
            raise error
        note(f"{device} failed ({type(error).__name__}), its rows went to the others")


class Bands:
    """A map cut into rows for each device."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts
        self.edges = [0]
        for part in parts:
            self.edges.append(self.edges[-1] + part.shape[2])

    def extended(self, index: int, reach: int) -> tuple[torch.Tensor, int, int]:
        """Return band `index` with `reach` rows of its neighbours, and where its own rows begin and end in that."""
        start, stop = self.edges[index], self.edges[index + 1]
        low, high = max(0, start - reach), min(self.edges[-1], stop + reach)
        rows = [
            part[:, :, max(low, top) - top : min(high, bottom) - top].to(self.parts[index].device)
            for part, top, bottom in zip(self.parts, self.edges, self.edges[1:], strict=False)
            if max(low, top) < min(high, bottom)
        ]
        return torch.cat(rows, dim=2), start - low, stop - low


def shared_rows(
    workers: Workers, layout: Layout, latents: torch.Tensor, plan: Plan, note: Callable[[str], None], poll: Poll
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, pixels [1, 3, n, W]) of `latents` [1, 32, h, w], in the order in which they are done."""
    kept = None
    while kept is None:
        try:
            kept = shared_head(workers, layout, latents, plan.attention_rows or ATTENTION_ROWS, poll)
        except WorkerFailed as failed:
            failure = failed.failure
        if kept is None:
            workers.drop(failure, note)
    height = kept.shape[2]
    waiting = [(top, bottom) for top, bottom in chunks(height, -(-height // len(workers.devices)))]
    while waiting:
        failures: list[Failure] = []
        yield from shared_tail(workers, layout, kept, plan, waiting, failures, poll)
        for failure in sorted(failures, key=lambda one: -one.worker):
            workers.drop(failure, note)


class WorkerFailed(Exception):
    """A worker failed in a phase that the others cannot end without it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


def shared_head(workers: Workers, layout: Layout, latents: torch.Tensor, rows: int, poll: Poll) -> torch.Tensor:
    """Return the kept map, on the first device. Raises WorkerFailed."""
    x = first_map(workers.decoders[0], latents.to(workers.devices[0])).contiguous(memory_format=torch.channels_last)
    height, width = latents.shape[2:]
    # whole pieces of the sums for each, and enough positions that no kernel for a few of them is chosen
    share = max(-(-height // len(workers.devices)), -(-FEW_POSITIONS // width))
    share = -(-share // PIECE) * PIECE
    parts = [x[:, :, top:bottom] for top, bottom in chunks(height, share)]
    bands = Bands([part.to(device) for part, device in zip(parts, workers.devices, strict=False)])
    blocks = [list(global_blocks(decoder, layout)) for decoder in workers.decoders]
    with ThreadPoolExecutor(len(bands.parts)) as pool:

        def phase(work: Callable[[int], T]) -> list[T]:
            return all_of(pool, len(bands.parts), work, poll)

        for number, (block, scale) in enumerate(blocks[0]):
            own = [blocks[index][number][0] for index in range(len(bands.parts))]
            if is_attention(block) and is_quadratic(block, x):
                # so few positions that one device has them all
                whole = torch.cat([part.to(workers.devices[0]) for part in bands.parts], dim=2)
                whole = global_block(block, whole, None, scale, poll)
                bands = Bands([whole])
            elif is_attention(block):
                bands = shared_attention(own, bands, rows * scale, PIECE * scale, phase)
            else:
                bands = shared_local(own, bands, phase)
            x = bands.parts[0]
    return torch.cat([part.to(workers.devices[0]) for part in bands.parts], dim=2)


def shared_attention(own: list, bands: Bands, rows: int, piece: int, phase: Callable) -> Bands:
    """Return an attention block of `bands`; `own` is the block on each device."""
    reach = halo(own[0].attn) + GLU_HALO

    def sums(index: int) -> list[torch.Tensor]:
        x, start, stop = bands.extended(index, reach)
        return list(score_pieces(own[index].attn, x, start, stop, rows, piece, proceed))

    pieces = [piece for band in phase(sums) for piece in band]
    scores = ordered_sum(one.to(pieces[0].device, copy=True) for one in pieces)

    def attend(index: int) -> torch.Tensor:
        x, start, stop = bands.extended(index, reach)
        return torch.cat(list(attend_rows(own[index], x, scores.to(x.device), start, stop, rows, proceed)), dim=2)

    return Bands(phase(attend))


def shared_local(own: list, bands: Bands, phase: Callable) -> Bands:
    """Return a block of convolutions of `bands`."""

    def convolve(index: int) -> torch.Tensor:
        # two rows: what one convolution after the other, and an upsampling one, can see
        x, start, stop = bands.extended(index, 2)
        out = run([local_layer(own[index], (bands.edges[-1], x.shape[3]))], x, True, proceed)
        return out[:, :, resized(own[index], start) : resized(own[index], stop)]

    return Bands(phase(convolve))


def proceed() -> None:
    """A poll for phases so short that they are not cancelled within."""


def all_of(pool: ThreadPoolExecutor, count: int, work: Callable[[int], T], poll: Poll) -> list[T]:
    """Return work(0) .. work(count - 1), done at once. Raises WorkerFailed for the first that fails."""

    def quiet(index: int) -> T:
        with torch.no_grad():
            return work(index)

    futures: list[Future[T]] = [pool.submit(quiet, index) for index in range(count)]
    while wait(futures, SECONDS).not_done:
        poll()
    for index, future in enumerate(futures):
        error = future.exception()
        if error is not None:
            raise WorkerFailed(Failure(index, error))
    return [future.result() for future in futures]


def shared_tail(
    workers: Workers,
    layout: Layout,
    kept: torch.Tensor,
    plan: Plan,
    waiting: list[tuple[int, int]],
    failures: list[Failure],
    poll: Poll,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Take row ranges out of `waiting` to pixels and yield those; put back what a failing worker leaves."""
    stop, lock = threading.Event(), threading.Lock()
    done: queue.Queue[tuple[int, torch.Tensor] | None] = queue.Queue(2 * len(workers.devices))

    def check() -> None:
        if stop.is_set():
            raise Stopped

    def hand(item: tuple[int, torch.Tensor] | None) -> None:
        while not stop.is_set():
            try:
                return done.put(item, timeout=SECONDS)
            except queue.Full:
                continue

    def work(index: int) -> None:
        try:
            with torch.no_grad():
                while (span := next_span()) is not None:
                    take(index, *span)
        except Stopped:
            return
        except Exception as error:
            failures.append(Failure(index, error))
        finally:
            hand(None)

    def next_span() -> tuple[int, int] | None:
        with lock:
            return waiting.pop(0) if waiting else None

    def take(index: int, top: int, bottom: int) -> None:
        low, high = max(0, top - layout.halo), min(kept.shape[2], bottom + layout.halo)
        row = top * layout.stride
        try:
            part = kept[:, :, low:high].to(workers.devices[index])
            decoder, height = workers.decoders[index], kept.shape[2]
            for pixels in pixel_rows(
                decoder, layout, part, top - low, bottom - low, plan.rows, plan.columns, check, height
            ):
                hand((row, pixels))
                row += pixels.shape[2]
        except Exception:
            # from the last whole row of the kept map; a few rows of pixels are made twice
            waiting.append((row // layout.stride, bottom))
            raise

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(workers.devices))]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            poll()
            try:
                item = done.get(timeout=SECONDS)
            except queue.Empty:
                continue
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        stop.set()
        for thread in threads:
            thread.join()
