"""Shapes that pictures are cropped to, and which of them are learnt together, the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..errors import InputError
from ..model.known_models import SHAPES
from ..model.latents import DOWNSCALE
from ..runtime.checks import check_whole

if TYPE_CHECKING:
    from PIL.Image import Image

# of the rule that `fit_picture` crops by; a higher one makes every cached latent anew
CROP_RULE = 1
LARGEST_SIDE = 8192

Bucket = tuple[int, int]


class Crop(NamedTuple):
    """Which part of an image is learnt: the shares of what is cut off that lie to its left and above it."""

    left: float = 0.5
    top: float = 0.5
    mirrored: bool = False


MIDDLE = Crop()


def choose_bucket(size: tuple[int, int], resolution: int) -> Bucket:
    """Return (width, height) of the shape at `resolution` pixels whose ratio is nearest to that of `size`.

    The shapes are SANA's forty, those of them whose sides are multiples of 32 at this resolution. Raises InputError for
    a resolution that is not a multiple of 32.
    """
    check_whole("resolution", resolution, DOWNSCALE, LARGEST_SIDE)
    if resolution % DOWNSCALE:
        raise InputError(
            f"resolution: got {resolution}, expected a multiple of {DOWNSCALE}; 1024 is what most models know"
        )
    ratio = math.log(size[0] / size[1])
    return min(shapes_at(resolution), key=lambda shape: abs(math.log(shape[0] / shape[1]) - ratio))


def shapes_at(resolution: int) -> list[Bucket]:
    """Return (width, height) of those of SANA's shapes whose sides are multiples of 32 at `resolution` pixels."""
    whole = 1024 * DOWNSCALE
    return [
        (width * resolution // 1024, height * resolution // 1024)
        for width, height in SHAPES.values()
        if width * resolution % whole == 0 and height * resolution % whole == 0
    ]


def plan_epoch(buckets: Sequence[Bucket], batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of an epoch: indices of samples, each once, of one bucket each, in a random order.

    `buckets` has the bucket of each sample. The order depends on `seed` and `epoch` alone. The last batch of a bucket
    may be smaller. Raises InputError for a batch below 1.
    """
    check_whole("batch", batch, 1, 1_000_000)
    # raw numbers, for those are the same in every version of numpy. With a spawn key they are not those of a sample,
    # whose words end with an index
    numbers = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    order = np.argsort(numbers.random_raw(len(buckets)), kind="stable")
    members: dict[Bucket, list[int]] = {}
    for index in order.tolist():
        members.setdefault(buckets[index], []).append(index)
    batches = [
        indices[start : start + batch] for indices in members.values() for start in range(0, len(indices), batch)
    ]
    turns = np.argsort(numbers.random_raw(len(batches)), kind="stable")
    return [batches[turn] for turn in turns.tolist()]


def fit_picture(
    image: Image, mask: Image | None, bucket: Bucket, crop: Crop = MIDDLE
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return pixels [3, h, w] in [-1, 1] and the loss's weight of each latent cell [1, h / 32, w / 32] in [0, 1].

    The picture (RGB) is scaled by Lanczos to cover the bucket (width, height) and cut to `crop`; the mask (L, of
    the same size) with it, and then averaged over cells. Both float32.
    """
    from PIL.Image import Resampling

    width, height = bucket
    pixels = torch.from_numpy(np.asarray(crop_picture(image, bucket, crop), np.float32).transpose(2, 0, 1) / 127.5 - 1)
    pixels = pixels.flip(-1) if crop.mirrored else pixels
    if mask is None:
        return pixels.contiguous(), None
    box = part_of(image.size, bucket, crop)
    cells = mask.resize((width // DOWNSCALE, height // DOWNSCALE), Resampling.BOX, box=box)
    weight = torch.from_numpy(np.asarray(cells, dtype=np.float32)[None] / 255)
    return pixels.contiguous(), weight.flip(-1) if crop.mirrored else weight


def crop_picture(image: Image, bucket: Bucket, crop: Crop = MIDDLE) -> Image:
    """Return `image` scaled by Lanczos to cover the bucket (width, height), and cut to `crop`, not mirrored."""
    from PIL.Image import Resampling

    return image.resize(bucket, Resampling.LANCZOS, box=part_of(image.size, bucket, crop))


def is_smaller(size: tuple[int, int], bucket: Bucket) -> bool:
    """Whether a picture of that (width, height) has to be enlarged to be learnt."""
    return any(side < other for side, other in zip(size, bucket, strict=True))


def part_of(size: tuple[int, int], bucket: Bucket, crop: Crop = MIDDLE) -> tuple[float, float, float, float]:
    """Return (left, top, right, bottom) of the largest part of `size`, at `crop`, that has the bucket's ratio.

    To cut before scaling gives the same pixels but for rounding, and a panorama does not grow to a gigabyte on the way.
    """
    scale = min(size[0] / bucket[0], size[1] / bucket[1])
    width, height = (min(side, scale * other) for side, other in zip(size, bucket, strict=True))
    left, top = (size[0] - width) * crop.left, (size[1] - height) * crop.top
    return left, top, left + width, top + height
