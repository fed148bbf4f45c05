"""What each phase learns: its samples, the order of their batches in each epoch, and the learning rate of each step.

Repeats, sizes, crops, mirrors and captions of an image are its variants. Each variant is a sample with its own entries
in the cache, and an epoch learns one variant of each image. So the choice of an epoch depends only on the seed and the
epoch's number, and encodes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..checkpoints.fingerprint import digest_json
from ..runtime.atomic_files import digest_of
from ..runtime.cancellation import Poll
from ..runtime.libraries import without_collection
from ..runtime.text import get_logger
from ..runtime.user_files import FileRange
from .cache import BrokenImages, Cache, Encoders, ModelIds, Store, Stream, build_cache
from .dataset import Sample, check_controls, read_dataset
from .images import MIDDLE, Bucket, Crop, SizeOf, choose_bucket, is_smaller, upright_size
from .loss import CHOICE, generator
from .settings import Phase, TrainingSettings

logger = get_logger(__name__)
# `warn_of_rate` warns if the schedule is further than the steps of the phase by more than this fraction.
LONGER = 0.05
# The batches of one step, as indices of samples.
StepBatches = list[list[int]]


class TrainProgress(NamedTuple):
    """The position of a run between two steps."""

    # Finished steps of the run.
    step: int = 0
    # Number of the phase, from 0.
    phase: int = 0
    # Finished steps of the phase.
    phase_step: int = 0
    # Number of the epoch in the phase, from 0.
    epoch: int = 0
    # Finished steps of the epoch.
    position: int = 0
    # How much of the learning rate's schedule after the warmup is done, from 0 to 1.
    done: float = 0.0


class Best(NamedTuple):
    """The lowest validation loss of a phase."""

    loss: float
    # The step of this validation. 0: no state of it exists (step 0, or its save failed), so the next validation
    # replaces it.
    step: int
    phase: int
    # The first validation loss of the phase.
    first: float


def better(best: Best | None, loss: float, progress: TrainProgress) -> Best:
    """Return the best validation after one at `progress`. Phases have different images, so each has its own best."""
    if best is None or best.phase != progress.phase:
        return Best(loss, progress.step, progress.phase, loss)
    return best._replace(loss=loss, step=progress.step) if not best.step or loss < best.loss else best


class PhaseData(NamedTuple):
    """The images of a phase. Indices are positions in `samples`."""

    samples: Sequence[Sample]
    # Has an entry for each sample.
    cache: Cache | Stream
    # The first variant of each image that is learned.
    learned: list[int]
    # One variant of each image that is only validated.
    held_out: list[int]
    # Changes if the epochs change. See `digest_data`.
    digest: str
    # The variants of each image by the first of them. An epoch learns one of them.
    variants: dict[int, list[int]]


def read_samples(settings: TrainingSettings, poll: Poll, size_of: SizeOf = upright_size) -> list[list[Sample]]:
    """Return the samples of each phase. They have control images if a ControlNet is trained."""
    has_controls = settings.method.kind == "controlnet"
    phases = []
    for phase in settings.phase:
        samples = read_phase(phase, poll, settings.skip_broken, size_of)
        if has_controls:
            check_controls(samples)
        small = [sample for sample in samples if is_smaller(sample.size, sample.bucket)]
        if small:
            logger.warning(
                "dataset: %d of %d images are smaller than they are learned at and will be blurred, the first is %s "
                "of %d x %d",
                len(small),
                len(samples),
                small[0].name,
                *small[0].size,
            )
        phases.append(
            make_variants(samples if has_controls else [sample._replace(control=None) for sample in samples], phase)
        )
    return phases


def read_phase(phase: Phase, poll: Poll, skip_broken: bool = False, size_of: SizeOf = upright_size) -> list[Sample]:
    """Return the samples of `phase` at all of its resolutions: the images of its data sets with their repeats, and the
    same number of regularisation images."""
    samples: list[Sample] = []
    for path, repeats, weight in itertools.zip_longest(phase.data, phase.repeats, phase.weights):
        weighted = [
            sample._replace(weight=1.0 if weight is None else weight)
            for sample in read_dataset(Path(path), poll, skip_broken, phase.caption, size_of)
        ]
        samples += weighted * (repeats or 1)
    prior = [
        sample
        for path in phase.regularisation
        for sample in read_dataset(Path(path), poll, skip_broken, phase.regularisation_caption, size_of)
    ]
    for sample in itertools.islice(itertools.cycle(prior), len(samples)):
        samples.append(sample._replace(weight=phase.prior_loss_weight, prior=True))
    resolutions, sizes = (phase.resolution, *phase.resolutions), {sample.size for sample in samples}
    buckets = {(size, resolution): choose_bucket(size, resolution) for size in sizes for resolution in resolutions}
    return [
        sample._replace(bucket=buckets[sample.size, resolution]) for resolution in resolutions for sample in samples
    ]


def prepare_phase(
    samples: Sequence[Sample],
    phase: Phase,
    settings: TrainingSettings,
    store: Store,
    encode: Encoders,
    ids: ModelIds,
    poll: Poll,
    progress: Callable[[int, int], None],
    broken: BrokenImages,
) -> PhaseData:
    """Return the images of a phase with their cache. Images that cannot be read are added to `broken`."""
    # A streamed run only caches the empty prompt.
    cached = () if settings.stream else samples
    cache = build_cache(cached, store, encode, ids, broken, poll, progress)
    with without_collection():
        variants = groups_of(samples)
        learned, held_out = hold_out(samples, variants, settings.validation.share)
        # Only the range of bytes of a file, because machines may have the same files under different paths.
        described = [
            (
                (sample.name, sample.caption, sample.size, sample.bucket, sample.crop),
                [file and file[1:] for file in (*sample.files, sample.control)],
            )
            for sample in samples
        ]
        order = [described, ids, learned, phase.batch, phase.accumulate]
        entry_paths = filter(None, (cache.latents, cache.texts, cache.controls))
        entries = [[path.rpartition("/")[2] for path in paths] for paths in entry_paths]
        # The files of a streamed data set are too large for a digest of their contents.
        digest = digest_data(order, None if settings.stream else entries)
    source = Stream(samples, encode, cache.empty) if settings.stream else cache
    return PhaseData(samples, source, learned, held_out, digest, variants)


def make_variants(samples: Sequence[Sample], phase: Phase) -> list[Sample]:
    """Return the variants of each of `samples`. Their `group` is the number of the sample."""
    return [
        sample._replace(group=number, crop=crop, caption=caption, share=share)
        for number, sample in enumerate(samples)
        for crop in crops_of(sample, phase)
        for caption, share in captions_of(sample, phase)
    ]


def crops_of(sample: Sample, phase: Phase) -> list[Crop]:
    """Return the crops of an image: the middle, or `phase.crops` positions that depend on its name. `phase.flip` adds
    the mirror image of each."""
    crops = [MIDDLE]
    if phase.crops > 1:
        corners = generator(CHOICE, (seed_of(sample.name),)).random((phase.crops, 2)).round(4).tolist()
        crops = [Crop(*corner) for corner in corners]
    return crops + ([crop._replace(mirrored=True) for crop in crops] if phase.flip else [])


def captions_of(sample: Sample, phase: Phase) -> list[tuple[str, float]]:
    """Return the captions of an image with the fraction of epochs that learn each.

    Each caption has `phase.tag_orders` orders of its tags, which commas divide. The first `phase.keep_tags` tags stay
    where they are (kohya's shuffle_caption and keep_tokens).
    """
    if phase.tag_orders == 1:
        return list(sample.captions)
    captions = []
    for caption, share in sample.captions:
        tags, orders = caption.split(", "), {caption: None}
        first, rng = phase.keep_tags, generator(CHOICE, (seed_of(caption),))
        for _ in range(phase.tag_orders - 1):
            turns = rng.permutation(len(tags[first:]))
            orders[", ".join(tags[:first] + [tags[first + turn] for turn in turns])] = None
        captions += [(order, share / len(orders)) for order in orders]
    return captions


def seed_of(text: str) -> int:
    return int(digest_of(text.encode())[:16], 16)


def groups_of(samples: Sequence[Sample]) -> dict[int, list[int]]:
    """Return the indices of each image's variants by the first of them."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    return {indices[0]: indices for indices in groups.values()}


def hold_out(samples: Sequence[Sample], variants: dict[int, list[int]], fraction: float) -> tuple[list[int], list[int]]:
    """Return the indices of images that are learned, and of images that are only validated, about `fraction` of them.

    A digest of the name decides, so a new image moves no other image from one side to the other. If there are two
    images or more, each side has at least one. A single image is learned. All repeats and resolutions of an image are
    on the same side, and the first of them is validated. Regularisation images are always learned.
    """
    images: dict[tuple[str, FileRange], list[int]] = {}
    for index in variants:
        if not samples[index].prior:
            images.setdefault((samples[index].name, samples[index].image), []).append(index)
    digests = [sha256(name.encode()).digest() for name, _ in images]
    order = sorted(range(len(digests)), key=lambda number: digests[number])
    bound = int(fraction * 2**64)
    chosen = [number for number in order if int.from_bytes(digests[number][:8], "big") < bound]
    if fraction:
        chosen = (chosen or order[:1])[: len(digests) - 1]
    # The repeats and resolutions of each image, by their first variants.
    copies_of_image = list(images.values())
    held_out = [copies_of_image[number] for number in sorted(chosen)]
    learned = variants.keys() - {index for indices in held_out for index in indices}
    return sorted(learned), [indices[0] for indices in held_out]


def digest_data(order: object, contents: object) -> str:
    """Return a digest of the `order` in which samples are learned, and one of their `contents`. None: unknown."""
    return "-".join(digest_json(value) if value is not None else "" for value in (order, contents))


def same_epochs(first: str, second: str) -> bool:
    """Whether two digests are of the same epochs. Contents are compared only if both digests have them."""
    return all(
        one == other or not (one and other) for one, other in zip(first.split("-"), second.split("-"), strict=True)
    )


def advance(
    progress: TrainProgress, steps_per_epoch: Sequence[int], settings: TrainingSettings
) -> tuple[TrainProgress, bool]:
    """Return the progress at the next step, and whether there is none because the last phase has ended.

    `steps_per_epoch` has a number for each phase.
    """
    while True:
        phase = settings.phase[progress.phase]
        if progress.position >= steps_per_epoch[progress.phase]:
            progress = progress._replace(epoch=progress.epoch + 1, position=0)
        if phase.steps is not None:
            is_unfinished = progress.phase_step < phase.steps
        else:
            is_unfinished = progress.epoch < (phase.epochs or 0)
        if is_unfinished or progress.phase + 1 == len(settings.phase):
            return progress, not is_unfinished
        progress = TrainProgress(progress.step, progress.phase + 1)


def images_of_buckets(data: PhaseData) -> Counter[Bucket]:
    """Return the number of images of each bucket in an epoch."""
    return Counter(data.samples[index].bucket for index in data.learned)


def count_epoch_steps(phase: Phase, data: PhaseData) -> int:
    """Return the number of steps of an epoch. Every epoch has the same images, and so the same number."""
    batches = sum(math.ceil(count / phase.batch) for count in images_of_buckets(data).values())
    return math.ceil(batches / phase.accumulate)


def epoch_steps(phase: Phase, data: PhaseData, seed: int, epoch: int) -> list[StepBatches]:
    """Return the batches of each step of an epoch."""
    buckets = [data.samples[index].bucket for index in data.learned]
    batches = plan_epoch(buckets, phase.batch, seed, epoch)
    batches = [[data.learned[index] for index in batch] for batch in batches]
    # All variants of an image have its shape, so they can be chosen after the batches are made.
    batches = [[choose(data.samples, data.variants[index], seed, epoch) for index in batch] for batch in batches]
    return [batches[start : start + phase.accumulate] for start in range(0, len(batches), phase.accumulate)]


def all_steps_left(settings: TrainingSettings, steps_per_epoch: Sequence[int], progress: TrainProgress) -> int:
    """Return the number of steps from `progress` to the end of the run."""
    remaining = 0
    for number in range(progress.phase, len(settings.phase)):
        phase_progress = progress if number == progress.phase else TrainProgress()
        remaining += steps_left(settings.phase[number], phase_progress, steps_per_epoch[number])
    return remaining


def choose(samples: Sequence[Sample], indices: Sequence[int], seed: int, epoch: int) -> int:
    """Return the variant, one of `indices`, that the epoch learns."""
    if len(indices) == 1:
        return indices[0]
    bounds = np.cumsum([samples[index].share for index in indices])
    drawn = generator(CHOICE, (seed, epoch, indices[0])).random() * bounds[-1]
    return indices[int(np.searchsorted(bounds[:-1], drawn, side="right"))]


def plan_epoch(buckets: Sequence[Bucket], batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of an epoch in a random order, as indices of `buckets`. The images of a batch have one bucket.

    `buckets` has the bucket of each sample. The order depends on `seed` and `epoch` alone. The last batch of a bucket
    may be smaller.
    """
    # Raw random values are the same in every version of numpy. The spawn key of a sample has more numbers, so its
    # values differ from these.
    rng = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    order = np.argsort(rng.random_raw(len(buckets)), kind="stable")
    members: dict[Bucket, list[int]] = {}
    for index in order.tolist():
        members.setdefault(buckets[index], []).append(index)
    batches = [
        indices[start : start + batch] for indices in members.values() for start in range(0, len(indices), batch)
    ]
    turns = np.argsort(rng.random_raw(len(batches)), kind="stable")
    return [batches[turn] for turn in turns.tolist()]


def learning_rate(phase: Phase, progress: TrainProgress) -> float:
    """Return the rate of the step at `progress` in `phase`, from 0 to `phase.learning_rate`.

    It rises in even steps in the first `warmup` steps. Then "constant" stays. The others fall to 0 with
    `progress.done`, as in diffusers.optimization, except that diffusers' "polynomial" ends at 1e-7. Neither the batch
    nor the number of devices changes the rate.
    """
    if progress.phase_step < phase.warmup:
        return phase.learning_rate * (progress.phase_step + 1) / phase.warmup
    if phase.schedule == "constant":
        return phase.learning_rate
    if phase.schedule == "linear":
        return phase.learning_rate * (1 - progress.done)
    if phase.schedule == "polynomial":
        return phase.learning_rate * (1 - progress.done) ** phase.power
    schedule_done = progress.done
    if phase.schedule == "cosine_with_restarts" and schedule_done < 1:
        schedule_done = schedule_done * phase.cycles % 1
    return phase.learning_rate * 0.5 * (1 + math.cos(math.pi * schedule_done))


def after_step(phase: Phase, progress: TrainProgress, steps_per_epoch: int) -> TrainProgress:
    """Return `progress` in `phase` after one more step.

    The remaining part of the rate's schedule is divided evenly among the remaining steps. So the rate has no jump if a
    resumed run has more or fewer steps, because of another batch, more images or epochs.
    """
    schedule_done, steps_remaining = progress.done, steps_left(phase, progress, steps_per_epoch)
    # The last step does not end the schedule. A finished run that gets more steps continues at its last rate.
    if progress.phase_step >= phase.warmup and steps_remaining > 1:
        schedule_done = min(1.0, schedule_done + (1 - schedule_done) / steps_remaining)
    return progress._replace(
        step=progress.step + 1, phase_step=progress.phase_step + 1, position=progress.position + 1, done=schedule_done
    )


def steps_left(phase: Phase, progress: TrainProgress, steps_per_epoch: int) -> int:
    """Return the number of steps of `phase` after `progress`. 0 after its end."""
    finished, total = progress.phase_step, phase.steps
    if total is None:
        finished = progress.epoch * steps_per_epoch + progress.position
        total = (phase.epochs or 0) * steps_per_epoch
    return max(0, total - finished)


def warn_of_rate(phase: Phase, progress: TrainProgress, steps_per_epoch: int) -> None:
    """Log a warning if the learning rate of a phase has fallen before the phase was made longer."""
    finished = max(0, progress.phase_step - phase.warmup)
    finished_fraction = finished / (finished + steps_left(phase, progress, steps_per_epoch))
    if phase.schedule != "constant" and progress.done - finished_fraction > LONGER:
        logger.warning(
            "phase %d has more steps than it had, and continues from its learning rate of %.2g; for a higher one set "
            "schedule to constant, or add a [[phase]]",
            progress.phase + 1,
            learning_rate(phase, progress),
        )
