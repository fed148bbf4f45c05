"""Batches on the devices of this machine: one thread per device, all in this process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import torch

from ..errors import CheckpointError, InputError, SanaError, first_line
from ..runtime.accelerator import is_driver_error, is_out_of_memory, release_memory_of, set_current_device
from ..runtime.cancellation import Poll, Polled, no_poll
from ..runtime.text import get_logger
from .batch_size import has_room_for_encoder, largest_chunk
from .encoding import Action, EncodingPlan
from .loop import GRACE, Outcome, Started, run_batch, stop_if_all_fail
from .pipeline import (
    Conditioning,
    Embedding,
    Models,
    Request,
    encode_negative,
    encode_text,
    generate_chunk,
    load_encoder,
    load_models,
)
from .plan import Chunk, FailedImage, Generated, Step
from .progress import WorkerReport
from .queue import Queue

logger = get_logger(__name__)

R = TypeVar("R")
GenerateChunk = Callable[[Chunk], Sequence[R | FailedImage]]
# Called in the thread of a worker, with the worker's name and device: everything that a chunk needs before its time
# counts, such as loading models.
BeforeChunk = Callable[[str, torch.device, Chunk, Poll], None]
# Seconds between two looks at the workers, and between two polls while waiting.
POLL_INTERVAL = 0.2
# How many seconds close() waits for all threads together to notice the cancel.
JOIN_TIMEOUT = 30.0
# A worker that loads or encodes counts as hanging after this many seconds without a poll.
LOADING_PATIENCE = 1800.0
# torch.compile may compile again for a chunk of another size, so the shortest time of a hanging chunk is longer.
COMPILE_GRACE = 10 * GRACE
# Prompts of the first session of the text encoder. A CPU takes long for a prompt, a GPU takes long to load the encoder.
FIRST_ON_CPU, FIRST = 8, 64
# After this many images in a row that failed for unknown reasons, the reason is not the image.
LARGEST_FAILURES = 8
CPU = torch.device("cpu")


class Cancelled(BaseException):
    """The batch ended while a worker was busy. No Exception, because loading turns exceptions into errors of files."""


class EncoderError(CheckpointError):
    """The text encoder gave NaN. It may do better on another device."""


class LocalPool(Generic[R]):
    """One thread per device. `devices` may contain a device more than once.

    Each thread calls `prepare(device, poll)` once, one thread at a time. It returns the function that generates chunks
    on the device. `before_chunk` is called before each chunk. Both, and the returned function, must call their poll
    often. It raises once the batch has ended. `cancel` is called by the thread that waits for outcomes, and ends the
    wait by raising.

    A device that raises a driver error is left out. A device that hangs gets no more chunks until it responds again.
    """

    # While a result waits to be taken, the worker generates the next chunk.
    depth = 2
    reports_starts = True

    def __init__(
        self,
        devices: Sequence[torch.device],
        prepare: Callable[[torch.device, Poll], GenerateChunk[R]],
        cancel: Poll = no_poll,
        before_chunk: BeforeChunk | None = None,
    ) -> None:
        self.prepare, self.cancel, self.before_chunk = prepare, cancel, before_chunk
        self.events: SimpleQueue[Outcome[R] | Started] = SimpleQueue()
        self.prepare_lock = threading.Lock()
        self.cancelled = threading.Event()
        # Worker name: the chunks that it has not begun. None ends the thread.
        self.inboxes: dict[str, SimpleQueue[Chunk | None]] = {}
        # The same for workers that hang.
        self.hanging: dict[str, SimpleQueue[Chunk | None]] = {}
        self.threads: dict[str, threading.Thread] = {}
        # Worker name: when it last polled. Only workers that load or encode now: the queue judges generation, and an
        # idle worker does not poll.
        self.loading: dict[str, float] = {}
        self.reason: BaseException | None = None
        seen: Counter[torch.device] = Counter()
        for device in devices:
            seen[device] += 1
            name = f"{device}" if seen[device] == 1 else f"{device} #{seen[device]}"
            inbox = self.inboxes[name] = SimpleQueue()
            cores = max(1, torch.get_num_threads() // devices.count(device)) if device.type == "cpu" else None
            self.threads[name] = threading.Thread(
                target=self.work, args=(name, device, inbox, cores), name=f"sana batch {name}", daemon=True
            )
        for thread in self.threads.values():
            thread.start()

    def work(self, name: str, device: torch.device, inbox: SimpleQueue[Chunk | None], cores: int | None) -> None:
        """The work of one thread: prepare, then generate chunks until the inbox contains None."""
        chunk: Chunk = ()

        def poll() -> None:
            if self.cancelled.is_set():
                raise Cancelled
            if name in self.loading:
                self.loading[name] = time.monotonic()

        try:
            if cores is not None:
                torch.set_num_threads(cores)
            self.loading[name] = time.monotonic()
            with locked(self.prepare_lock, poll):
                generate = self.prepare(device, poll)
            self.loading.pop(name)
            # A worker that counted as hanging while it prepared responds again. It may have no chunk to report.
            self.events.put(Started(name, ()))
            while (next_chunk := inbox.get()) is not None:
                poll()
                if self.before_chunk is not None:
                    self.loading[name] = time.monotonic()
                    self.before_chunk(name, device, next_chunk, poll)
                    self.loading.pop(name)
                chunk = next_chunk
                self.events.put(Started(name, chunk))
                self.events.put(self.attempt(name, device, chunk, generate))
                chunk = ()
        except Cancelled:
            pass
        except BaseException as error:
            self.events.put(Outcome(name, chunk, error=error))
        finally:
            self.loading.pop(name, None)

    def attempt(self, name: str, device: torch.device, chunk: Chunk, generate: GenerateChunk[R]) -> Outcome[R]:
        """Generate `chunk`. Running out of memory becomes an outcome, other errors are raised."""
        started = time.monotonic()
        try:
            return Outcome(name, chunk, generate(chunk), seconds=time.monotonic() - started)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = error
        # Outside the handler, which would keep the tensors of the failed work alive.
        return Outcome(name, chunk, error=release_memory_of(failed, device))

    def workers(self) -> list[str]:
        if not self.inboxes and not self.hanging and self.reason is not None:
            reason, self.reason = self.reason, None
            try:
                raise reason
            finally:
                # The error refers to this frame. A reference back would keep the models of all frames alive until
                # Python's collector runs.
                del reason
        return list(self.inboxes)

    def submit(self, worker: str, chunk: Chunk) -> None:
        self.inboxes[worker].put(chunk)

    def wait(self) -> list[Outcome[R] | Started]:
        self.cancel()
        events: list[Outcome[R] | Started] = []
        try:
            events.append(self.events.get(timeout=POLL_INTERVAL))
            while True:
                events.append(self.events.get_nowait())
        except Empty:
            pass
        events = [event for event in events if self.accept(event)]
        now = time.monotonic()
        for worker, polled in list(self.loading.items()):
            if worker in self.inboxes and now - polled > LOADING_PATIENCE:
                self.drop(worker, TimeoutError(f"{worker}: it has not finished loading for {LOADING_PATIENCE:.0f} s"))
        return events

    def accept(self, event: Outcome[R] | Started) -> bool:
        """Return whether the loop should see an event. Handles devices that respond again, and devices that fail."""
        worker = event.worker
        if isinstance(event, Started) or event.error is None:
            if worker in self.hanging:
                logger.warning("batch: %s responds again", worker)
                self.inboxes[worker] = self.hanging.pop(worker)
            # A chunk that was finished late still counts.
            return True
        if worker in self.hanging:
            # Its chunk was requeued.
            if not is_out_of_memory(event.error) or not event.chunk:
                self.drop(worker, event.error)
            return False
        if worker not in self.inboxes:
            return False
        cannot_load = is_out_of_memory(event.error) and not event.chunk
        if cannot_load or is_driver_error(event.error):
            self.drop(worker, event.error)
            return False
        return True

    def drop(self, worker: str, reason: BaseException) -> None:
        """Stop using `worker`. If it hangs, it is used again when it responds."""
        if worker not in self.inboxes and worker not in self.hanging:
            # Both of its chunks have failed.
            return
        if isinstance(reason, TimeoutError):
            if worker in self.hanging:
                return
            inbox = self.hanging[worker] = self.inboxes.pop(worker)
            # The loop requeues all chunks of the worker, so it must not begin another one.
            while not inbox.empty():
                with suppress(Empty):
                    inbox.get_nowait()
            logger.warning("batch: %s gets no more images until it responds", worker)
            if not self.inboxes:
                logger.warning("batch: no other device is left, so the run waits for %s", ", ".join(self.hanging))
            return
        logger.error("batch: %s is left out: %s", worker, first_line(reason))
        self.reason = reason
        inbox = self.hanging.pop(worker) if worker in self.hanging else self.inboxes.pop(worker)
        inbox.put(None)
        self.threads.pop(worker)

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Stop all threads within a step. A thread that hangs is left alone."""
        self.cancelled.set()
        for inbox in [*self.inboxes.values(), *self.hanging.values()]:
            inbox.put(None)
        deadline = time.monotonic() + JOIN_TIMEOUT
        for worker, thread in self.threads.items():
            if worker not in self.hanging:
                thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def locked(lock: threading.Lock, poll: Poll) -> Iterator[None]:
    """Hold `lock`. The wait for it can be cancelled."""
    while not lock.acquire(timeout=POLL_INTERVAL):
        poll()
    try:
        poll()
        yield
    finally:
        lock.release()


class DeviceModels:
    """The models on one device, which all threads of the device share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.models: Models | None = None
        # How many threads generate with the models now.
        self.users = 0
        # Whether a thread is loading the models, or has unloaded them because the text encoder needs their memory.
        self.reserved = False

    @contextmanager
    def reserve(self, poll: Poll, unload: bool = False) -> Iterator[None]:
        """Keep other threads from loading the models. `unload`: wait until nobody uses the models, and unload them."""
        with self.changed:
            while self.reserved:
                self.changed.wait(POLL_INTERVAL)
                poll()
            self.reserved = True
        try:
            with self.changed:
                while unload and self.users:
                    self.changed.wait(POLL_INTERVAL)
                    poll()
                if unload:
                    self.models = None
            yield
        finally:
            with self.changed:
                self.reserved = False
                self.changed.notify_all()

    @contextmanager
    def use(self, load: Callable[[], Models], poll: Poll) -> Iterator[Models]:
        """Give the models, which nobody unloads meanwhile. Loads them with `load` if necessary."""
        while True:
            with self.changed:
                if self.models is not None and not self.reserved:
                    self.users += 1
                    models = self.models
                    break
            with self.reserve(poll):
                if self.models is None:
                    self.models = load()
        try:
            yield models
        finally:
            with self.changed:
                self.users -= 1
                self.changed.notify_all()


class LocalGeneration:
    """The state that the threads of generate_local() share: the models on each device, and the encoded prompts."""

    def __init__(self, request: Request, chunks: Sequence[Chunk]) -> None:
        workload, self.checkpoint, self.settings, devices = request
        self.prompts, self.devices = workload.prompts, list(dict.fromkeys(devices))
        self.inputs, self.callback = workload.inputs, workload.inputs.callback
        if self.callback is not None:
            self.inputs = self.inputs._replace(callback=self.call_back)
        # What the caller's function raised. It ends the batch, as no other error of an image does.
        self.callback_errors: list[Exception] = []
        self.models = {device: DeviceModels() for device in self.devices}
        texts: Mapping[str, Embedding] = {}
        self.negative: Embedding | None = None
        if workload.encoded is not None:
            texts, self.negative = workload.encoded
        first = FIRST_ON_CPU if devices[0].type == "cpu" else FIRST
        prompts = [self.prompts[image.prompt] for chunk in chunks for image in chunk]
        self.plan: EncodingPlan[Embedding] = EncodingPlan(prompts, first, texts)
        # Protects the plan and the two counters.
        self.lock = threading.Lock()
        # How many images were finished, and how many failed for unknown reasons since the last success.
        self.finished = self.failures = 0
        # (device, whether the models were unloaded): where the text encoder did not fit, or gave NaN.
        self.too_small: set[tuple[torch.device, bool]] = set()

    def load_models_on(self, device: torch.device, poll: Poll) -> Models:
        """Load the models on `device`. If memory runs out, tries once more without the leftovers of other work."""
        for attempt in range(2):
            try:
                with Polled(poll):
                    return load_models(self.checkpoint, device, self.settings, self.checkpoint)
            except Exception as error:
                if attempt or not is_out_of_memory(error):
                    raise
                failed = error
            release_memory_of(failed, device)
        raise AssertionError

    def call_back(self, step: Step) -> None:
        assert self.callback is not None
        try:
            self.callback(step)
        except Exception as error:
            self.callback_errors.append(error)
            raise

    def use_models(self, device: torch.device, poll: Poll) -> AbstractContextManager[Models]:
        return self.models[device].use(lambda: self.load_models_on(device, poll), poll)

    def prompts_of(self, chunk: Chunk) -> list[str]:
        return [self.prompts[image.prompt] for image in chunk]

    def before_chunk(self, worker: str, device: torch.device, chunk: Chunk, poll: Poll) -> None:
        """Encode prompts and load the models on `device`, until `chunk` can be generated there."""
        prompts = self.prompts_of(chunk)
        has_room: bool | None = None
        while True:
            poll()
            with self.lock:
                is_missing = self.plan.missing(prompts)
            if is_missing and has_room is None:
                # Not under the lock, which all threads need: the disk may be slow, and the device may hang.
                has_room = has_room_for_encoder(self.checkpoint, self.settings, device)
            with self.lock:
                action = self.plan.next_action(
                    worker,
                    device,
                    prompts,
                    self.models[device].models is not None,
                    bool(has_room),
                    len(self.devices) - 1,
                    time.monotonic(),
                )
            if action is None:
                return
            if action is Action.WAIT:
                time.sleep(POLL_INTERVAL / 10)
                continue
            has_room = None
            if action is Action.ENCODE:
                self.encode(worker, device, prompts, poll)
            else:
                with self.use_models(device, poll):
                    pass

    def encode(self, worker: str, device: torch.device, needed: Collection[str], poll: Poll) -> None:
        """Encode the prompts of a session on `device`, or if its memory is too small on another device or the CPU."""
        try:
            failed: BaseException | None = None
            for target, unload in self.places_for_encoder(device):
                try:
                    self.encode_on(target, unload, worker, needed, poll)
                    return
                except Exception as error:
                    # The device of this thread must be left out. Another device is only too busy for the encoder.
                    is_of_place = is_out_of_memory(error) or isinstance(error, EncoderError)
                    if not is_of_place and (target == device or not is_driver_error(error)):
                        raise
                    failed = error
                failed = release_memory_of(failed, target)
                self.too_small.add((target, unload))
                logger.warning("batch: %s cannot encode prompts: %s", target, first_line(failed))
            if failed is not None:
                raise failed
        finally:
            with self.lock:
                self.plan.end(worker)

    def places_for_encoder(self, device: torch.device) -> Iterator[tuple[torch.device, bool]]:
        """Yield devices for the text encoder, and whether their models must be unloaded before."""
        if (device, False) not in self.too_small and has_room_for_encoder(self.checkpoint, self.settings, device):
            yield device, False
        if (device, True) not in self.too_small:
            yield device, True
        for other in [*self.devices, CPU]:
            try:
                has_room = other == CPU or has_room_for_encoder(self.checkpoint, self.settings, other)
            except Exception as error:
                # A full device has no memory for the question either.
                if not is_driver_error(error) and not is_out_of_memory(error):
                    raise
                continue
            if has_room and other != device and (other, False) not in self.too_small:
                yield other, False
        # Everything was too small before. Another run may have released memory since.
        yield device, True

    def encode_on(self, device: torch.device, unload: bool, worker: str, needed: Collection[str], poll: Poll) -> None:
        """Load the text encoder on `device`, and encode the prompts of the session of `worker`."""
        with ExitStack() as stack:
            if unload:
                stack.enter_context(self.models[device].reserve(poll, unload=True))
            stack.enter_context(Polled(poll))
            encoder = load_encoder(self.checkpoint, device, self.settings.dtype, self.settings.reference)
            if self.negative is None:
                negative = encode_negative(encoder, self.settings.negative_prompt)
                if not negative[0].isfinite().all():
                    raise EncoderError(
                        f"text encoder: it gave NaN for the negative prompt on {device}, so all images would fail; "
                        "choose dtype float32, or download the checkpoint again"
                    )
                self.negative = negative
            while True:
                poll()
                with self.lock:
                    prompt = self.plan.next_prompt(worker, needed, time.monotonic())
                if prompt is None:
                    return
                text = encode_text(encoder, prompt, instruction=True)
                with self.lock:
                    self.plan.store(worker, prompt, text, time.monotonic())

    def prepare(self, device: torch.device, poll: Poll) -> GenerateChunk[torch.Tensor]:
        """Return the function that generates chunks on `device`."""
        set_current_device(device)

        def generate(chunk: Chunk) -> Sequence[torch.Tensor | FailedImage]:
            with self.lock:
                texts = [self.plan.texts.get(prompt) for prompt in self.prompts_of(chunk)]
            # This may be a late copy. If all images of a prompt are finished, its text is gone, and the queue ignores
            # the results.
            late = FailedImage("another device has finished it")
            results: dict[int, torch.Tensor | FailedImage] = {}
            encoded = [(image, text) for image, text in zip(chunk, texts, strict=True) if text is not None]
            if encoded:
                images = tuple(image for image, _ in encoded)
                generated = self.generate_images(device, images, [text for _, text in encoded], poll)
                results = {image.number: result for image, result in zip(images, generated, strict=True)}
            return [results.get(image.number, late) for image in chunk]

        return generate

    def generate_images(
        self, device: torch.device, images: Chunk, texts: Sequence[Embedding], poll: Poll
    ) -> Sequence[torch.Tensor | FailedImage]:
        """Generate images together. If that fails for an unknown reason, generate each alone, to find the one at fault.

        An unknown error is raised if no image was finished before, or if many images fail: it is not about one image.
        """
        assert self.negative is not None
        conditioning = Conditioning(texts, self.negative)
        try:
            with self.use_models(device, poll) as models:
                results = generate_chunk(models, self.settings, images, conditioning, poll, self.inputs)
            with self.lock:
                self.finished += sum(not isinstance(result, FailedImage) for result in results)
                self.failures = 0
            return results
        except Exception as error:
            with self.lock:
                self.failures += 1
                is_about_one_image = (
                    (not isinstance(error, SanaError) or isinstance(error, InputError))
                    and not is_out_of_memory(error)
                    and not is_driver_error(error)
                    and error not in self.callback_errors
                    and self.finished > 0
                    and self.failures < LARGEST_FAILURES
                )
            if not is_about_one_image:
                raise
            if len(images) == 1:
                return [FailedImage(first_line(error))]
        return [
            result
            for image, text in zip(images, texts, strict=True)
            for result in self.generate_images(device, (image,), [text], poll)
        ]

    def finish_image(self, prompt: int) -> None:
        with self.lock:
            self.plan.finish_image(self.prompts[prompt])


def generate_local(
    request: Request, grace: float = GRACE, report: WorkerReport | None = None
) -> Generator[Generated, None, None]:
    """Yield each image of `request` with its pixels [3, H, W] in [-1, 1], or a FailedImage, as they finish.

    Every device encodes prompts, see encoding.py, and generates images. If memory is short, the text encoder takes the
    place of the models on its device. A chunk counts as hanging after `grace` seconds at the earliest. Closing the
    iterator stops all devices within a step. `report` shows which worker generates how many images.

    Raises CheckpointError, MissingFileError or ReadError for a checkpoint that cannot be loaded, and InputError if all
    images fail.
    """
    workload, _, settings, devices = request
    limits = [None] * len(devices) if workload.chunk else find_limits(request)
    devices = [device for device, limit in zip(devices, limits, strict=True) if limit != 0]
    chunks = workload.split(settings.width, settings.height, len(devices))
    queue = Queue(chunks)
    if report is not None:
        report.finished = queue.finished
    if not chunks:
        return
    generation = LocalGeneration(request._replace(devices=devices), chunks)
    with closing(LocalPool(devices, generation.prepare, before_chunk=generation.before_chunk)) as pool:
        if report is not None:
            report.ready = pool.inboxes
        for worker, limit in zip(list(pool.threads), [limit for limit in limits if limit != 0], strict=True):
            if limit is not None:
                queue.limits[worker] = limit
        generated = run_batch(queue, pool, max(grace, COMPILE_GRACE) if settings.compiled else grace)
        for image, result in stop_if_all_fail(generated, workload):
            generation.finish_image(image.prompt)
            yield image, result


def find_limits(request: Request) -> list[int]:
    """Return how many images each device can generate at once, and 0 for a device that fails already.

    Raises the error of the last device if all of them fail.
    """
    prompts = request.workload.count_prompts()
    limits: list[int] = []
    failed: BaseException | None = None
    for device in request.devices:
        try:
            limits.append(largest_chunk(request.checkpoint, request.settings, device, prompts=prompts))
        except Exception as error:
            # A device that other programs have filled has no memory for the question either.
            if not is_driver_error(error) and not is_out_of_memory(error):
                raise
            failed = error
            logger.error("batch: %s is left out: %s", device, first_line(error))
            limits.append(0)
    if failed is not None and not any(limits):
        raise failed
    return limits
