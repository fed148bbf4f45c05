"""What a batch is made of: images, each a function of its prompt and its seed alone, and how they are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from ..errors import FailedImagesError, InputError
from ..model.controlnet import Control
from ..runtime.checks import check_whole
from ..sampling.masked import InitImage

LARGEST_SEED = 2**64 - 1
LARGEST_COUNT = 100_000
LARGEST_CHUNK = 32
# images of this many pixels at once keep an accelerator busy
BUSY_PIXELS = 8 * 1024 * 1024
# chunks for each worker, so that the last ones end together
ROUNDS = 3


class ImageSpec(NamedTuple):
    """One image: its place in the order of the results, the number of its prompt, its seed."""

    number: int
    prompt: int
    seed: int


Chunk = tuple[ImageSpec, ...]


class FailedImage(NamedTuple):
    """The result for an image that failed for a reason of its own, such as NaN in its pixels."""

    reason: str  # one line


# embeddings [1, T, C] and mask [1, T] of a prompt, without the padding behind it
Embedding = tuple[torch.Tensor, torch.Tensor]
# A finished image, with its pixels [3, H, W] in [-1, 1], its PNG file as bytes, or the digest of its PNG file.
Generated = tuple[ImageSpec, Any]


def failed_images(failed: dict[int, str], remedy: str) -> FailedImagesError:
    """Return the error for images that failed, by their number: the reason."""
    number, reason = min(failed.items())
    numbers = ", ".join(map(str, sorted(failed)))
    return FailedImagesError(
        f"images: {len(failed)} failed, number {numbers:.80}, counted from 0; number {number} failed because of "
        f"{reason}; {remedy}",
        failed,
    )


def batch_images(prompts: int, count: int, seed: int) -> list[ImageSpec]:
    """Return `count` images of each of `prompts` prompts; image i of a prompt has seed + i.

    Raises InputError for no prompts, a count that is not from 1 to 100000, and a seed that is not from 0 to 2^64 - 1.
    """
    if prompts < 1:
        raise InputError("prompts: got none, expected at least one")
    check_whole("count", count, 1, LARGEST_COUNT)
    check_whole("seed", seed, 0, LARGEST_SEED)
    return [
        ImageSpec(prompt * int(count) + i, prompt, (int(seed) + i) % 2**64)
        for prompt in range(prompts)
        for i in range(int(count))
    ]


def split_into_chunks(images: Iterable[ImageSpec], size: int) -> list[Chunk]:
    """Return the images in chunks of at most `size`. Raises InputError for a size below 1.

    Where a chunk begins depends on the number alone, so that what is generated together does not depend on what is
    done.
    """
    check_whole("chunk", size, 1, LARGEST_COUNT)
    return [tuple(group) for _, group in groupby(images, key=lambda image: image.number // int(size))]


def default_chunk_size(width: int, height: int, images: int, workers: int) -> int:
    """Return how many images of `width` x `height` pixels a worker should generate at once.

    As many as keep it busy, but few enough that several workers share `images` out evenly. It is a start: a worker
    whose memory runs out halves it.
    """
    busy = min(LARGEST_CHUNK, max(1, BUSY_PIXELS // (width * height)))
    return busy if workers == 1 else max(1, min(busy, -(-images // (ROUNDS * workers))))


def samples_one_by_one(device: torch.device) -> bool:
    """Whether `device` generates the images of a chunk one after another.

    A CPU gains little from a batch, and one by one the images have the same bits in any chunk.
    """
    return device.type == "cpu"


def sampled_together(chunk: Chunk, device: torch.device) -> list[Chunk]:
    """Return the parts of `chunk` that `device` generates as one batch."""
    return [(image,) for image in chunk] if samples_one_by_one(device) else [chunk]


class Step(NamedTuple):
    """What a callback sees after each step: the step, from 0; the noise level of the latents then; the latents
    [n, 32, h, w] in the model's scale; and which of the images, from 0, they are of."""

    step: int
    sigma: float
    latents: torch.Tensor
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
        """The images that are not done."""
        return [image for image in self.images if image.number not in self.done]

    def count_prompts(self) -> int:
        """Return the number of different prompts of the remaining images, at least 1."""
        return max(1, len({image.prompt for image in self.remaining}))

    def split(self, width: int, height: int, workers: int) -> list[Chunk]:
        """Return the remaining images in chunks for `workers`. Raises InputError for a chunk size out of range."""
        images = self.remaining
        check_whole("chunk", self.chunk or 0, 0, LARGEST_COUNT)
        return split_into_chunks(images, self.chunk or default_chunk_size(width, height, len(images), workers))
