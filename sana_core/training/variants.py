"""What becomes of the images of a data set before they are learnt: repeats, sizes, crops, mirrors and captions.

Each variant is a sample with entries of its own in the cache, and an epoch learns one of each image's. So what an epoch
draws depends on the seed and its number alone, and costs no encoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..runtime.cancellation import Poll
from .buckets import Crop
from .dataset import Sample, read_dataset
from .entries import digest_of
from .loss import CHOICE, generator
from .settings import Phase


def read_phase(phase: Phase, poll: Poll) -> list[Sample]:
    """Return the samples of `phase`, each image of its data sets as often as that is repeated, then as many of its
    regularisation images, once more for each of its resolutions. Raises as `read_dataset` does."""
    samples: list[Sample] = []
    for path, repeats, weight in itertools.zip_longest(phase.data, phase.repeats, phase.weights):
        found = [each._replace(weight=1.0 if weight is None else weight) for each in read_dataset(Path(path), poll)]
        samples += found * (repeats or 1)
    prior = [each for path in phase.regularisation for each in read_dataset(Path(path), poll)]
    for each in itertools.islice(itertools.cycle(prior), len(samples)):
        samples.append(each._replace(weight=phase.prior_loss_weight, prior=True))
    sizes = (phase.resolution, *phase.resolutions)
    return [each._replace(resolution=size) for size in sizes for each in samples]


def vary(samples: Sequence[Sample], phase: Phase) -> list[Sample]:
    """Return the variants of each of `samples`, whose `group` is the number of its image among them."""
    return [
        each._replace(group=number, crop=crop, caption=caption, share=share)
        for number, each in enumerate(samples)
        for crop in crops_of(each, phase)
        for caption, share in captions_of(each, phase)
    ]


def crops_of(sample: Sample, phase: Phase) -> list[Crop]:
    """Return the middle, or `crops` places that depend on the name, and of each its mirror image with `flip`."""
    places = [Crop()]
    if phase.crops > 1:
        numbers = generator(CHOICE, (seed_of(sample.name),)).random((phase.crops, 2)).round(4).tolist()
        places = [Crop(*each) for each in numbers]
    return places + ([each._replace(mirrored=True) for each in places] if phase.flip else [])


def captions_of(sample: Sample, phase: Phase) -> list[tuple[str, float]]:
    """Return the captions with their shares, of each `tag_orders` orders of what its commas divide; the first
    `keep_tags` stay where they are (kohya's shuffle_caption and keep_tokens)."""
    found = []
    for caption, share in sample.captions or [(sample.caption, 1.0)]:
        tags, orders = caption.split(", "), {caption: None}
        first, numbers = phase.keep_tags, generator(CHOICE, (seed_of(caption),))
        for _ in range(phase.tag_orders - 1):
            turns = numbers.permutation(len(tags[first:]))
            orders[", ".join(tags[:first] + [tags[first + turn] for turn in turns])] = None
        found += [(order, share / len(orders)) for order in orders]
    return found


def seed_of(text: str) -> int:
    return int(digest_of(text.encode())[:16], 16)


def groups_of(samples: Sequence[Sample]) -> dict[int, list[int]]:
    """Return the indices of each image's variants by the first of them."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    return {indices[0]: indices for indices in groups.values()}


def choose(samples: Sequence[Sample], indices: Sequence[int], seed: int, epoch: int) -> int:
    """Return which of the variants at `indices` the epoch learns."""
    if len(indices) == 1:
        return indices[0]
    bounds = np.cumsum([samples[index].share for index in indices])
    drawn = generator(CHOICE, (seed, epoch, indices[0])).random() * bounds[-1]
    return indices[int(np.searchsorted(bounds[:-1], drawn, side="right"))]
