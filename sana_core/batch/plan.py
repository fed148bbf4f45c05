"""The images of a batch and their inputs, how they are divided into chunks, and reports of steps and workers.

An image depends only on its prompt and its seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch

from ..errors import FailedImagesError, InputError
from ..model.controlnet import Control
from ..runtime.checks import check_whole
from ..sampling.guidance import EditImage
from ..sampling.samplers import InitImage

LARGEST_SEED = 2**64 - 1
LARGEST_COUNT = 100_000
LARGEST_CHUNK = 32
# This many pixels at once keep an accelerator busy.
BUSY_PIXELS = 8 * 1024 * 1024
# At least this many chunks for each worker, so that all workers finish at about the same time.
ROUNDS = 3
# If this number of images failed and none was ever finished, the reason is not the images.
FAILURES_AT_START = 32


class ImageSpec(NamedTuple):
    # Its place in the order of the results, from 0.
    number: int
    # The number of its prompt, from 0.
    prompt: int
    seed: int


Chunk = tuple[ImageSpec, ...]


class FailedImage(NamedTuple):
    """The result for an image that failed for a reason of its own, such as NaN in its pixels."""

    # One line.
    reason: str


# Embeddings [1, T, C] and mask [1, T] of a prompt, without padding.
Embedding = tuple[torch.Tensor, torch.Tensor]
# A finished image, with its pixels [3, H, W] in [-1, 1], its PNG file as bytes, or the digest of its PNG file.
Generated = tuple[ImageSpec, Any]


def failed_images(failed: dict[int, str], remedy: str) -> FailedImagesError:
    """Return the error for a batch with failed images. `failed` has the reason for each image number."""
    number, reason = min(failed.items())
    numbers = ", ".join(map(str, sorted(failed)))
    return FailedImagesError(
        f"images: {len(failed)} failed, number {numbers:.80}, counted from 0; number {number} failed because of "
        f"{reason}; {remedy}",
        failed,
    )


def batch_images(prompts: int, count: int, seed: int | Sequence[int]) -> list[ImageSpec]:
    """Return `count` images of each of `prompts` prompts. Image i of a prompt has seed + i.

    `seed` is one number, or a number for each prompt. Raises InputError for no prompts, a count that is not from 1 to
    100000, and a seed that is not from 0 to 2^64 - 1.
    """
    if prompts < 1:
        raise InputError("prompts: got none, expected at least one")
    check_whole("count", count, 1, LARGEST_COUNT)
    seeds = seed if isinstance(seed, Sequence) else [seed] * prompts
    for first_seed in dict.fromkeys(seeds):
        check_whole("seed", first_seed, 0, LARGEST_SEED)
    return [
        ImageSpec(prompt * int(count) + i, prompt, (int(first_seed) + i) % 2**64)
        for prompt, first_seed in zip(range(prompts), seeds, strict=True)
        for i in range(int(count))
    ]


def split_into_chunks(images: Iterable[ImageSpec], size: int) -> list[Chunk]:
    """Return the images in chunks of at most `size`. Raises InputError for a size below 1.

    The chunk of an image depends only on its number and on `size`, not on which images are done already.
    """
    check_whole("chunk", size, 1, LARGEST_COUNT)
    return [tuple(group) for _, group in groupby(images, key=lambda image: image.number // int(size))]


def default_chunk_size(width: int, height: int, images: int, workers: int) -> int:
    """Return how many images of `width` x `height` pixels a worker should generate at once.

    The number keeps a worker busy, and is small enough to divide `images` evenly among `workers`. A worker whose memory
    runs out generates half as many at once.
    """
    busy = min(LARGEST_CHUNK, max(1, BUSY_PIXELS // (width * height)))
    return busy if workers == 1 else max(1, min(busy, -(-images // (ROUNDS * workers))))


def samples_one_by_one(device: torch.device) -> bool:
    """Whether `device` generates the images of a chunk one after another.

    A CPU gains little from a batch. One by one, an image has the same bits in any chunk.
    """
    return device.type == "cpu"


def sampled_together(chunk: Chunk, device: torch.device) -> list[Chunk]:
    """Return the parts of `chunk` that `device` generates as one batch."""
    return [(image,) for image in chunk] if samples_one_by_one(device) else [chunk]


class Step(NamedTuple):
    """The argument of a callback that is called after each step."""

    # From 0.
    step: int
    # The noise level of the latents after the step.
    sigma: float
    # [n, 32, h, w] in the model's scale.
    latents: torch.Tensor
    # The number of the image of each row of the latents, from 0.
    images: tuple[int, ...]


class ImageInputs(NamedTuple):
    """All inputs of a chunk except its prompts."""

    # Images for a ControlNet: one for the whole chunk, or one per image.
    control: Control | None = None
    # The image that sampling starts from.
    init: InitImage | None = None
    # [N, 32, h, w], indexed by the number of the image: sampling starts from these instead of the seed's noise.
    latents: torch.Tensor | None = None
    # Called after every step.
    callback: Callable[[Step], object] | None = None
    # Called in every step. The latents are the model's x0, and sigma is the noise level before the step.
    preview: Callable[[Step], object] | None = None
    # The image that VIBE edits.
    edit: EditImage | None = None


NO_IMAGES = ImageInputs()


class Workload(NamedTuple):
    """The images of a run, except those whose number is in `done`. A worker generates `chunk` of them at once. None and
    0 choose a number that fits.

    `prompts` are texts, or embeddings if the workers receive embeddings. `encoded` has the embeddings of all prompts
    and of the negative prompt, if the caller passes embeddings. `inputs` has the other inputs of the images, such as
    latents. Both work only on devices of this machine.
    """

    prompts: Sequence[Any]
    images: Sequence[ImageSpec]
    chunk: int | None = None
    done: frozenset[int] = frozenset()
    encoded: tuple[Mapping[str, Embedding], Embedding] | None = None
    inputs: ImageInputs = NO_IMAGES

    @property
    def remaining(self) -> list[ImageSpec]:
        return [image for image in self.images if image.number not in self.done]

    def count_prompts(self) -> int:
        return max(1, len({image.prompt for image in self.remaining}))

    def split(self, width: int, height: int, workers: int) -> list[Chunk]:
        """Return the remaining images in chunks for `workers`. Raises InputError for a chunk size out of range."""
        images = self.remaining
        check_whole("chunk", self.chunk or 0, 0, LARGEST_COUNT)
        return split_into_chunks(images, self.chunk or default_chunk_size(width, height, len(images), workers))


def stop_if_all_fail(generated: Iterator[Generated], workload: Workload) -> Iterator[Generated]:
    """Pass on the images of `generated`. Raises InputError if its first FAILURES_AT_START images all failed.

    A run that resumes has images of these settings and does not end early. One prompt out of several may fail with
    every seed, so the failures must be of different prompts.
    """
    prompts: set[int] = set()
    failures, expected = 0, min(2, workload.count_prompts())
    may_stop = not workload.done
    for image, result in generated:
        yield image, result
        if not may_stop:
            continue
        if not isinstance(result, FailedImage):
            may_stop = False
            continue
        failures += 1
        prompts.add(image.prompt)
        if failures >= FAILURES_AT_START and len(prompts) >= expected:
            raise InputError(
                f"images: all of the first {failures} failed, the last because of {result.reason}; "
                "choose dtype bfloat16 or float32, or another checkpoint"
            )


OnStatus = Callable[[str], None]


def no_status(text: str) -> None:
    """No-op default: no status is shown."""


@dataclass
class WorkerReport:
    """The workers of a run. The fields are live views, which change while the run continues."""

    # Worker name: how many images it has generated.
    finished: Mapping[str, int] = field(default_factory=dict)
    # How many steps were recorded as a CUDA graph, and replayed, see StepGraph.
    steps: Mapping[str, int] = field(default_factory=dict)
    # The names of the workers that generate now.
    ready: Collection[str] = ()
    # Cluster only. Worker name: its machine.
    machines: Mapping[str, str] = field(default_factory=dict)
    # Cluster only. Machine that was left out: the reason.
    refused: Mapping[str, Exception] = field(default_factory=dict)


class Progress:
    """Counts finished images and measures their rate. `done` of the `total` images exist before the run."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done, self.done_before = total, done, done
        # When the first image of this run was finished.
        self.first_time = 0.0

    def step(self) -> None:
        self.done += 1
        if self.done == self.done_before + 1:
            self.first_time = time.monotonic()

    def describe(self, workers: int) -> str:
        """Return a text like "3 of 8, 1.20 a second, 4 s left, 2 workers".

        The rate is measured from the first image on, because loading takes long. So the text has no rate before the
        second image.
        """
        parts = [f"{self.done} of {self.total}"]
        images, seconds = self.done - self.done_before - 1, time.monotonic() - self.first_time
        if images > 0 and seconds > 0:
            rate = images / seconds
            parts.append(f"{rate:.2f} a second")
            if self.done < self.total:
                parts.append(f"{in_words((self.total - self.done) / rate)} left")
        return ", ".join([*parts, counted(workers, "worker")])


def in_words(seconds: float) -> str:
    """Return a text like "42 s", "12 min" or "3 h 20 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def counted(number: int, thing: str) -> str:
    """Return a text like "1 machine" or "2 machines"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
