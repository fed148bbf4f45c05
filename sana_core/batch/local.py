"""Every device of this machine: one thread each, in this process."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from ..accelerator import empty_cache, is_driver_error, is_out_of_memory
from ..errors import InputError
from ..polling import Poll
from .batch_size import has_room_for_encoder, largest_chunk
from .draw import (
    Embedding,
    Models,
    Settings,
    draw,
    embeddings_of,
    encode_texts,
    load_encoder,
    load_models,
    resolve_settings,
)
from .loop import GRACE, Outcome, run_batch
from .plan import Chunk, Picture, default_chunk_size, split_into_chunks
from .queue import Queue
from .windows import check_prompts, first_window, prompts_of, windows

logger = logging.getLogger(__name__)

R = TypeVar("R")
Draw = Callable[[Chunk], Sequence[R]]
# seconds between two looks at who hangs
LOOK = 0.5
# how long the end waits for a thread to notice the cancel
JOIN = 30.0


class Cancelled(Exception):
    """The batch ended while a worker was at it."""


class LocalPool(Generic[R]):
    """One thread for each of `devices`, which may name a device twice.

    `prepare(device, poll)` is called in the thread, one thread at a time, and returns what draws a chunk there. That
    must call `poll`, which raises once the batch has ended, every step. A device that fails with an error of its own
    is left out from then on.
    """

    depth = 1

    def __init__(self, devices: Sequence[torch.device], prepare: Callable[[torch.device, Poll], Draw[R]]) -> None:
        self.prepare = prepare
        self.outcomes: SimpleQueue[Outcome[R]] = SimpleQueue()
        self.loading = threading.Lock()
        self.cancelled = threading.Event()
        self.inboxes: dict[str, SimpleQueue[Chunk | None]] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.reason: BaseException | None = None
        seen: Counter[torch.device] = Counter()
        for device in devices:
            seen[device] += 1
            name = f"{device}" if seen[device] == 1 else f"{device} #{seen[device]}"
            self.inboxes[name] = SimpleQueue()
            share = max(1, torch.get_num_threads() // devices.count(device)) if device.type == "cpu" else None
            self.threads[name] = threading.Thread(
                target=self.work, args=(name, device, share), name=f"sana batch {name}", daemon=True
            )
        for thread in self.threads.values():
            thread.start()

    def poll(self) -> None:
        """Raise Cancelled once the batch has ended."""
        if self.cancelled.is_set():
            raise Cancelled

    def work(self, name: str, device: torch.device, cores: int | None) -> None:
        """What a thread does: prepare, then a chunk at a time until the inbox says None."""
        inbox = self.inboxes[name]
        chunk: Chunk = ()
        try:
            if cores is not None:
                torch.set_num_threads(cores)
            with self.loading:
                self.poll()
                draw_chunk = self.prepare(device, self.poll)
            while (taken := inbox.get()) is not None:
                chunk = taken
                self.poll()
                self.outcomes.put(self.attempt(name, chunk, draw_chunk))
        except Cancelled:
            pass
        except BaseException as error:
            self.outcomes.put(Outcome(name, chunk, error=error))

    def attempt(self, name: str, chunk: Chunk, draw_chunk: Draw[R]) -> Outcome[R]:
        """Draw `chunk`; memory that runs out is an outcome like any other."""
        try:
            return Outcome(name, chunk, draw_chunk(chunk))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # its frames hold tensors
            error.__traceback__ = None
            failed = error
        empty_cache()
        return Outcome(name, chunk, error=failed)

    def workers(self) -> list[str]:
        if not self.inboxes and self.reason is not None:
            raise self.reason
        return list(self.inboxes)

    def submit(self, worker: str, chunk: Chunk) -> None:
        self.inboxes[worker].put(chunk)

    def wait(self) -> list[Outcome[R]]:
        try:
            outcome = self.outcomes.get(timeout=LOOK)
        except Empty:
            return []
        if outcome.error is None:
            return [outcome]
        if outcome.worker not in self.inboxes:
            return []
        if is_failure_of_device(outcome):
            self.drop(outcome.worker, outcome.error)
            return []
        return [outcome]

    def drop(self, worker: str, reason: BaseException) -> None:
        """Leave `worker` out; its thread ends when it notices, and what it still draws is taken."""
        logger.error("batch: %s is left out: %s", worker, reason)
        self.reason = reason
        self.inboxes.pop(worker).put(None)
        self.threads.pop(worker)

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Stop all threads within a step."""
        self.cancelled.set()
        for inbox in self.inboxes.values():
            inbox.put(None)
        for thread in self.threads.values():
            thread.join(JOIN)


def is_failure_of_device(outcome: Outcome) -> bool:
    """Whether the device failed and not the work: an error of its driver, or no memory for the weights."""
    if is_out_of_memory(outcome.error):
        return not outcome.chunk
    return is_driver_error(outcome.error)


def local_devices(devices: Sequence[str | torch.device] | None) -> list[torch.device]:
    """Return the devices of that name; without any, every accelerator of this machine, or its CPU.

    A device that this machine lacks is left out with a log. Raises InputError where none is left, and for names that
    torch does not know.
    """
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    own = [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())] if kind else []
    if devices is None:
        return own or [torch.device("cpu")]
    found = []
    for name in devices:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise InputError(f"devices: got {name!r}, expected names like cpu or {own[0] if own else 'cpu'}") from None
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, 0)
        if device.type == "cpu" or device in own:
            found.append(device)
        else:
            logger.warning("batch: this machine has no %s; going on without it", device)
    if not found:
        raise InputError(f"devices: got {', '.join(map(str, devices))}, expected some of cpu {' '.join(map(str, own))}")
    return found


def draw_local(
    prompts: Sequence[str],
    checkpoint: str | Path,
    settings: Settings,
    pictures: Sequence[Picture],
    devices: Sequence[str | torch.device] | None = None,
    chunk: int | None = None,
    done: frozenset[int] = frozenset(),
    grace: float = GRACE,
    report: dict[str, Any] | None = None,
) -> Generator[tuple[Picture, torch.Tensor], None, None]:
    """Yield each of `pictures` that is not in `done` with its pixels [3, H, W] in [-1, 1], as they finish.

    The prompts are encoded some at a time, on the first device, where the text encoder is only meanwhile: before the
    models, and later beside them, or in their place where memory is short. Closing the iterator stops all devices
    within a step. `report` gets "drawn", the pictures of each worker.

    Raises as `check_prompts`, `resolve_settings`, `local_devices` and the loaders do.
    """
    check_prompts(prompts)
    found = local_devices(devices)
    settings = resolve_settings(settings, checkpoint)
    left = [picture for picture in pictures if picture.number not in done]
    size = chunk or default_chunk_size(settings.width, settings.height, len(left), len(found))
    chunks, queue = split_into_chunks(pictures, size, done), Queue()
    if report is not None:
        report["drawn"] = queue.drawn
    if not left:
        return
    encoded: tuple[dict[str, Embedding], Embedding]
    shared: dict[torch.device, Models] = {}
    loading = threading.Lock()

    def models_on(device: torch.device) -> Models:
        # threads on one device share its weights
        with loading:
            if device not in shared:
                shared[device] = load_models(
                    checkpoint, device, settings.dtype, checkpoint, reference=settings.reference
                )
            return shared[device]

    def prepare(device: torch.device, poll: Poll) -> Draw[torch.Tensor]:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        models_on(device)

        def draw_chunk(chunk: Chunk) -> Sequence[torch.Tensor]:
            texts, negative = encoded
            if any(prompts[picture.prompt] not in texts for picture in chunk):
                # a copy that is late by a window: others have drawn all of it, and nobody will look at it
                return [torch.empty(0)] * len(chunk)
            return draw(models_on(device), settings, chunk, embeddings_of(chunk, prompts, texts), negative, poll)

        return draw_chunk

    pool: LocalPool[torch.Tensor] | None = None
    with ExitStack() as stack:
        for window in windows(chunks, first_window(found[0])):
            if not has_room_for_encoder(checkpoint, settings, found[0]):
                with loading:
                    shared.pop(found[0], None)
            encoder = load_encoder(checkpoint, found[0], settings.dtype)
            encoded = encode_texts(encoder, prompts_of(window, prompts), settings.negative_prompt)
            del encoder
            if pool is None:
                largest = [largest_chunk(checkpoint, settings, device) for device in found] if not chunk else []
                pool = stack.enter_context(closing(LocalPool(found, prepare)))
                queue.limits.update(zip(pool.inboxes, largest, strict=False))
            queue.add(window)
            yield from run_batch(queue, pool, grace)
