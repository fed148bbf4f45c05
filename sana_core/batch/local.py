"""Every device of this machine: one thread each, in this process."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import torch

from ..errors import InputError
from ..model.fp8 import check_fp8
from ..runtime.accelerator import current_accelerator, is_driver_error, is_out_of_memory, release_memory_of
from ..runtime.cancellation import Poll, no_poll
from .batch_size import has_room_for_encoder, largest_chunk
from .loop import GRACE, Outcome, run_batch
from .pipeline import (
    Conditioning,
    Embedding,
    Models,
    SamplingSettings,
    check_prompts,
    encode_texts,
    generate_chunk,
    load_encoder,
    load_models,
    resolve_settings,
)
from .plan import Chunk, Generated, Workload
from .progress import WorkerReport
from .queue import Queue

logger = logging.getLogger(__name__)

R = TypeVar("R")
GenerateChunk = Callable[[Chunk], Sequence[R]]
# seconds between two looks at who hangs, and two polls
POLL_INTERVAL = 0.2
# how long the end waits for a thread to notice the cancel
JOIN_TIMEOUT = 30.0
# prompts that are encoded before the first image: a CPU takes long for one, an accelerator changes models for them
FIRST_ON_CPU, FIRST = 8, 64
# each window has twice the prompts of the one before, up to 1.4 GB of embeddings of Gemma 2 in fp32
LARGEST_WINDOW = 512


class Cancelled(Exception):
    """The batch ended while a worker was at it."""


class LocalPool(Generic[R]):
    """One thread for each of `devices`, which may name a device twice.

    `prepare(device, poll)` is called in the thread, one thread at a time, and returns what generates a chunk there.
    That must call `poll`, which raises once the batch has ended, every step. A device that fails with an error of its
    own is left out from then on. `cancel`, polled by whoever waits, ends the wait by raising.
    """

    depth = 1
    reports_starts = False

    def __init__(
        self,
        devices: Sequence[torch.device],
        prepare: Callable[[torch.device, Poll], GenerateChunk[R]],
        cancel: Poll = no_poll,
    ) -> None:
        self.prepare, self.cancel = prepare, cancel
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
                generate = self.prepare(device, self.poll)
            while (taken := inbox.get()) is not None:
                chunk = taken
                self.poll()
                self.outcomes.put(self.attempt(name, chunk, generate))
        except Cancelled:
            pass
        except BaseException as error:
            self.outcomes.put(Outcome(name, chunk, error=error))

    def attempt(self, name: str, chunk: Chunk, generate: GenerateChunk[R]) -> Outcome[R]:
        """Generate `chunk`; memory that runs out is an outcome like any other."""
        try:
            return Outcome(name, chunk, generate(chunk))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = error
        # outside the handler, which would keep the failed work's tensors alive
        return Outcome(name, chunk, error=release_memory_of(failed))

    def workers(self) -> list[str]:
        if not self.inboxes and self.reason is not None:
            raise self.reason
        return list(self.inboxes)

    def submit(self, worker: str, chunk: Chunk) -> None:
        self.inboxes[worker].put(chunk)

    def wait(self) -> list[Outcome[R]]:
        self.cancel()
        try:
            outcome = self.outcomes.get(timeout=POLL_INTERVAL)
        except Empty:
            return []
        if outcome.error is None:
            return [outcome]
        if outcome.worker not in self.inboxes:
            return []
        no_weights = is_out_of_memory(outcome.error) and not outcome.chunk
        if no_weights or is_driver_error(outcome.error):
            self.drop(outcome.worker, outcome.error)
            return []
        return [outcome]

    def drop(self, worker: str, reason: BaseException) -> None:
        """Leave `worker` out; its thread ends when it notices, and what it still generates is taken."""
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
            thread.join(JOIN_TIMEOUT)


def local_devices(devices: Sequence[str | torch.device] | None) -> list[torch.device]:
    """Return the devices of that name; without any, every accelerator of this machine, or its CPU.

    A device that this machine lacks is left out with a log. Raises InputError where none is left, and for names that
    torch does not know.
    """
    kind = current_accelerator()
    own = [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())] if kind else []
    if devices is None:
        return own or [torch.device("cpu")]
    found = []
    for name in devices:
        try:
            device = torch.device(name)
        except RuntimeError:
            known = f"names like cpu or {own[0] if own else 'cpu'}"
            raise InputError(f"devices: got {name!r:.40}, expected {known}") from None
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, 0)
        if device.type == "cpu" or device in own:
            found.append(device)
        else:
            logger.warning("batch: this machine has no %s; going on without it", device)
    if not found:
        raise InputError(
            f"devices: got {', '.join(map(str, devices)):.80}, expected some of cpu {' '.join(map(str, own))}"
        )
    return found


def windows(chunks: Iterable[Chunk], first: int) -> Iterator[list[Chunk]]:
    """Yield the chunks in their order, `first` prompts at a time, then twice as many, and so on up to 512: the first
    image comes early, and the embeddings stay few.

    A chunk is never divided, so what is generated together does not depend on the windows.
    """
    limit, seen = first, set[int]()
    window: list[Chunk] = []
    for chunk in chunks:
        own = {image.prompt for image in chunk}
        if window and len(seen | own) > limit:
            yield window
            limit, window, seen = min(2 * limit, LARGEST_WINDOW), [], set()
        window.append(chunk)
        seen |= own
    if window:
        yield window


class LocalGeneration:
    """What the threads of `generate_local` share: the models on each device, and the prompts that are encoded now."""

    def __init__(self, workload: Workload, checkpoint: str | Path, settings: SamplingSettings) -> None:
        self.prompts, self.checkpoint, self.settings = workload.prompts, checkpoint, settings
        self.inputs = workload.inputs
        self.models: dict[torch.device, Models] = {}
        self.loading = threading.Lock()
        self.encoded: tuple[Mapping[str, Embedding], Embedding | None] = workload.encoded or ({}, None)

    def encode(self, window: Sequence[Chunk], device: torch.device) -> None:
        """Encode the prompts of `window` on `device`. If memory is short, its models are unloaded first."""
        prompts = [self.prompts[image.prompt] for chunk in window for image in chunk]
        if self.encoded[0].keys() >= set(prompts):
            return
        if not has_room_for_encoder(self.checkpoint, self.settings, device):
            with self.loading:
                self.models.pop(device, None)
        encoder = load_encoder(self.checkpoint, device, self.settings.dtype, self.settings.reference)
        self.encoded = encode_texts(encoder, prompts, self.settings.negative_prompt)

    def models_on(self, device: torch.device) -> Models:
        """Return the models on `device`, loaded where they are not; threads on one device share its weights."""
        with self.loading:
            if device not in self.models:
                self.models[device] = load_models(self.checkpoint, device, self.settings, self.checkpoint)
            return self.models[device]

    def prepare(self, device: torch.device, poll: Poll) -> GenerateChunk[torch.Tensor]:
        """Load the models on `device`, and return the function that generates chunks there."""
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        self.models_on(device)

        def generate(chunk: Chunk) -> Sequence[torch.Tensor]:
            texts, negative = self.encoded
            if any(self.prompts[image.prompt] not in texts for image in chunk):
                # This copy is from an earlier window, whose images are all finished. The queue ignores its results.
                return [torch.empty(0)] * len(chunk)
            assert negative is not None
            conditioning = Conditioning([texts[self.prompts[image.prompt]] for image in chunk], negative)
            return generate_chunk(self.models_on(device), self.settings, chunk, conditioning, poll, self.inputs)

        return generate


def generate_local(
    workload: Workload,
    checkpoint: str | Path,
    settings: SamplingSettings,
    devices: Sequence[str | torch.device] | None = None,
    grace: float = GRACE,
    report: WorkerReport | None = None,
) -> Generator[Generated, None, None]:
    """Yield each image of `workload` with its pixels [3, H, W] in [-1, 1], as they finish.

    The prompts are encoded some at a time, on the first device, where the text encoder is only meanwhile: before the
    models, and later beside them, or in their place where memory is short. A chunk is thought to hang after `grace`
    seconds at the earliest. Closing the iterator stops all devices within a step. `report` shows who
    generates.

    Raises InputError for prompts that no encoding can carry, settings out of range and devices that are not there;
    CheckpointError, MissingFileError or ReadError for a checkpoint that cannot be loaded.
    """
    check_prompts(workload.prompts)
    found = local_devices(devices)
    if settings.fp8:
        for device in found:
            check_fp8(device)
    settings = resolve_settings(settings, checkpoint)
    queue = Queue()
    if report is not None:
        report.finished = queue.finished
    generation = LocalGeneration(workload, checkpoint, settings)
    first = FIRST_ON_CPU if found[0].type == "cpu" else FIRST
    chunks = workload.split(settings.width, settings.height, len(found))
    pool: LocalPool[torch.Tensor] | None = None
    with ExitStack() as stack:
        for window in windows(chunks, first):
            generation.encode(window, found[0])
            if pool is None:
                prompts = workload.count_prompts()
                fitting = [
                    largest_chunk(checkpoint, settings, device, prompts=prompts)
                    for device in found
                    if not workload.chunk
                ]
                pool = stack.enter_context(closing(LocalPool(found, generation.prepare)))
                if report is not None:
                    report.ready = pool.inboxes
                queue.limits.update(zip(pool.inboxes, fitting, strict=False))
            queue.add(window)
            yield from run_batch(queue, pool, grace)
