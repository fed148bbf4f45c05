"""What a run learns from: its data sets, read and encoded, by one process or by several that share the work.

Repeats, sizes, crops, mirrors and captions of an image are its variants: each is a sample with entries of its own in
the cache, and an epoch learns one of each image's. So what an epoch draws depends on the seed and its number alone, and
costs no encoding.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ..batch.pipeline import load_encoder
from ..checkpoints import load_autoencoder
from ..checkpoints.fingerprint import digest_json, fingerprint
from ..decode import encode_images
from ..errors import InputError
from ..model.text import encode_prompts
from ..runtime.atomic_files import digest_of, remove
from ..runtime.cancellation import Poll
from ..runtime.text import Json
from .cache import (
    IMAGE_FAULTS,
    BrokenImages,
    Encoders,
    ModelIds,
    Store,
    Stream,
    build_cache,
    control_sample,
    files_of,
    read_image,
)
from .dataset import Faults, Sample, check_controls, is_unreadable, read_dataset, warn_of_skipped, without_traceback
from .images import Bucket, Crop, FileRange, choose_bucket, is_smaller
from .loss import CHOICE, generator
from .previews import Inputs, encode_validation
from .ranks import Ranks
from .schedule import Data, digest_data
from .settings import Phase, TrainingSettings

logger = logging.getLogger(__name__)
OnProgress = Callable[[str, int, int], None]
# of `fingerprint`, what embeddings and latents depend on
TEXT_DIGESTS = ("text_encoder_weights", "text_encoder_config", "tokenizer", "instruction")
IMAGE_DIGESTS = ("autoencoder_weights", "autoencoder_config")
# in the cache, the digests of models' files
MODELS = "models"


def prepare(
    settings: TrainingSettings,
    samples: Sequence[list[Sample]],
    device: torch.device,
    ranks: Ranks,
    digests: Json,
    progress: OnProgress,
    poll: Poll,
) -> tuple[list[Data], Inputs | None]:
    """Return the data of each phase, and what the validation's images are generated from, None where none are
    generated.

    `samples` are those of each phase. Latents and embeddings that the cache does not have yet are encoded, by each of
    `ranks` the share of its images; a run that streams encodes them later. `digests` are what `digest_models` returns;
    `progress` is told what is being prepared and how much of it is done. Raises as `build_cache` does, and
    TrainingError where another rank has failed.
    """
    ids, store = model_ids(settings, digests), cache_store(settings)
    broken: BrokenImages = {}

    def encode_part(encode: Encoders, part: slice, progress: OnProgress) -> list[Data]:
        phases = zip(samples, settings.phase, strict=True)
        return [
            prepare_phase(each[part], phase, settings, ids, encode, progress, poll, broken) for each, phase in phases
        ]

    def encode_share() -> None:
        with encoders(settings, device, poll) as encode:
            encode_part(encode, slice(ranks.rank, None, ranks.size), progress if ranks.first else no_progress)

    def encode_all(progress: OnProgress) -> tuple[list[Data], Inputs | None]:
        with encoders(settings, device, poll) as encode:
            return encode_part(encode, slice(None), progress), encode_validation(settings, store, ids, encode)

    def check_held_out(data: Sequence[Data]) -> None:
        # A streamed run can leave out an image in a step, but not in a validation.
        for phase in data:
            for index in phase.held_out[ranks.rank :: ranks.size]:
                broken.update(find_broken_files(phase.samples[index], phase.buckets[index], poll))

    try:
        while True:
            broken.clear()
            if ranks.size > 1 and not settings.stream:
                ranks.run_on_all(encode_share)
            # The first rank uses the entries of all ranks and encodes the rest. The others then use all entries.
            data, inputs = ranks.run_on_rank0(lambda: encode_all(progress)) or encode_all(no_progress)
            if settings.stream and settings.skip_broken:
                ranks.run_on_all(partial(check_held_out, data))
            broken_anywhere = {files: fault for faults in ranks.all_gather(broken) for files, fault in faults.items()}
            if not broken_anywhere:
                return data, inputs
            samples = leave_out(samples, broken_anywhere, settings.skip_broken)
    finally:
        if ranks.first and store.parts is not None:
            # of dead processes of this run, which is held; what cannot be removed is in nobody's way
            with suppress(OSError):
                remove(store.parts)


def find_broken_files(sample: Sample, bucket: Bucket, poll: Poll) -> BrokenImages:
    """Return the faults of the image, mask and control image of a sample by their files."""
    broken: BrokenImages = {}
    for part in [sample] if sample.control is None else [sample, control_sample(sample)]:
        poll()
        try:
            read_image(part, bucket)
        except IMAGE_FAULTS as fault:
            broken[files_of(part)] = without_traceback(fault)
    return broken


def leave_out(samples: Sequence[list[Sample]], broken: BrokenImages, skip_broken: bool) -> list[list[Sample]]:
    """Return the samples of each phase without the `broken` images, which the log lists.

    Raises an error that names all of them unless `skip_broken` is set and each of them cannot be read, and InputError
    for a phase of which nothing is left.
    """
    faults = list(broken.values())
    if not (skip_broken and all(map(is_unreadable, faults))):
        Faults(faults).check()
    warn_of_skipped(faults)
    readable = [
        [
            sample
            for sample in phase
            if files_of(sample) not in broken
            and (sample.control is None or files_of(control_sample(sample)) not in broken)
        ]
        for phase in samples
    ]
    for number, phase in enumerate(readable, 1):
        if not phase:
            raise InputError(f"dataset: phase {number} has no image that can be read, expected one; copy them again")
    return readable


def no_progress(what: str, done: int, total: int) -> None:
    """No-op default."""


def digest_models(settings: TrainingSettings, progress: OnProgress) -> Json:
    """Return what `fingerprint` does of the model, with the parts that have files of their own from there."""

    def digests_of(path: str) -> Json:
        kept = cache_store(settings).folder / MODELS
        report = partial(progress, "digest of the model")
        return fingerprint(path, report, kept, settings.reference)

    digests = digests_of(settings.model)
    for path, names in ((settings.text_encoder, TEXT_DIGESTS), (settings.autoencoder, IMAGE_DIGESTS)):
        if path:
            found = digests_of(path)
            digests |= {name: found[name] for name in names}
    return digests


def read_samples(settings: TrainingSettings, poll: Poll) -> list[list[Sample]]:
    """Return the samples of each phase, with control images where those are learned.

    Raises as `read_dataset` and `check_controls` do.
    """
    steered = settings.method.kind == "controlnet"
    found = []
    for phase in settings.phase:
        samples = read_phase(phase, poll, settings.skip_broken)
        if steered:
            check_controls(samples)
        small = [each for each in samples if is_smaller(each.size, choose_bucket(each.size, each.resolution))]
        if small:
            logger.warning(
                "dataset: %d of %d images are smaller than they are learned at and will be blurred, the first is %s "
                "of %d x %d",
                len(small),
                len(samples),
                small[0].name,
                *small[0].size,
            )
        found.append(vary(samples if steered else [each._replace(control=None) for each in samples], phase))
    return found


def prepare_phase(
    samples: Sequence[Sample],
    phase: Phase,
    settings: TrainingSettings,
    ids: ModelIds,
    encode: Encoders,
    progress: OnProgress,
    poll: Poll,
    broken: BrokenImages,
) -> Data:
    """Return the `samples` of `phase`, encoded, or to be as they are learned. Images that cannot be read are added to
    `broken`, as by `build_cache`."""
    buckets = [choose_bucket(each.size, each.resolution) for each in samples]
    cached = 0 if settings.stream else len(samples)
    cache = build_cache(
        samples[:cached],
        buckets[:cached],
        cache_store(settings),
        encode,
        ids,
        poll,
        lambda done, total: progress("latents and captions", done, total),
        broken,
    )
    variants = groups_of(samples)
    # of an image that is repeated, or learned at several sizes, all are held out and the first is looked at
    images: dict[tuple[str, FileRange], list[int]] = {}
    for index in variants:
        if not samples[index].prior:
            images.setdefault((samples[index].name, samples[index].image), []).append(index)
    known = list(images.values())
    chosen = [known[number] for number in hold_out([name for name, _ in images], settings.validation.share)]
    held_out = [indices[0] for indices in chosen]
    training = sorted(variants.keys() - {index for indices in chosen for index in indices})
    described = [(each.name, each.caption, each.size, each.image[1:]) for each in samples]
    order = [described, ids, training, phase.batch, phase.accumulate]
    if settings.stream:
        stream = Stream(samples, buckets, encode, cache.empty)
        # the bytes of the images are too many to look at all of them
        return Data(samples, stream, training, held_out, buckets, digest_data(order, None), variants)
    entries = [[path.name for path in paths] for paths in (cache.latents, cache.texts, cache.controls) if paths]
    return Data(samples, cache, training, held_out, buckets, digest_data(order, entries), variants)


@contextmanager
def encoders(settings: TrainingSettings, device: torch.device, poll: Poll) -> Iterator[Encoders]:
    """Give what encodes images and captions, of which one at a time is in memory.

    Both are loaded when they are first asked for, and not at all where the cache has everything. What a run streams
    through them stays possible behind the context, and both stay in memory.
    """
    loaded: Json = {}

    def model(kind: str, load: Callable[[str], Any]) -> Any:
        if kind not in loaded:
            if not settings.stream:
                loaded.clear()
            loaded[kind] = load(settings.source(kind))
        return loaded[kind]

    def pixels(pixels: torch.Tensor) -> torch.Tensor:
        # in float32: it runs once for each image, and what it loses is lost to every step
        own = model("autoencoder", lambda source: load_autoencoder(source, device, torch.float32))
        return encode_images(own, pixels, poll=poll) * own.config.scaling_factor

    def caption(caption: str, instruction: bool) -> tuple[torch.Tensor, torch.Tensor]:
        own = model("text_encoder", lambda source: load_encoder(source, device, settings.dtype, settings.reference))
        return encode_prompts(own, [caption], instruction)

    try:
        yield Encoders(pixels, caption)
    finally:
        if not settings.stream:
            loaded.clear()


def cache_store(settings: TrainingSettings) -> Store:
    """Return the run's cache. Others may share it, so what is not whole lies apart for each run's folder."""
    folder = Path(settings.cache) if settings.cache else Path(settings.out) / "cache"
    return Store(folder, folder / f".{digest_json(str(Path(settings.out).absolute()))}.parts")


def model_ids(settings: TrainingSettings, digests: Json) -> ModelIds:
    """Return what the cache's entries depend on besides the data."""
    text, image = ([digests[name] for name in names] for names in (TEXT_DIGESTS, IMAGE_DIGESTS))
    return ModelIds(digest_json(image), digest_json([*text, settings.dtype]))


def hold_out(names: Sequence[str], share: float) -> list[int]:
    """Return the indices of the `share` of images that are held out: by a digest of their names, so that an image
    that is added moves no other from one side to the other. At least one is on each side if there are two; one alone
    is learned."""
    order = sorted(range(len(names)), key=lambda index: sha256(names[index].encode()).digest())
    bound = int(share * 2**64)
    chosen = [index for index in order if int.from_bytes(sha256(names[index].encode()).digest()[:8], "big") < bound]
    if share:
        chosen = (chosen or order[:1])[: len(names) - 1]
    return sorted(chosen)


def read_phase(phase: Phase, poll: Poll, skip_broken: bool = False) -> list[Sample]:
    """Return the samples of `phase`, each image of its data sets as often as that is repeated, then as many of its
    regularisation images, once more for each of its resolutions. Raises as `read_dataset` does."""
    samples: list[Sample] = []
    for path, repeats, weight in itertools.zip_longest(phase.data, phase.repeats, phase.weights):
        weighted = [
            sample._replace(weight=1.0 if weight is None else weight)
            for sample in read_dataset(Path(path), poll, skip_broken)
        ]
        samples += weighted * (repeats or 1)
    prior = [each for path in phase.regularisation for each in read_dataset(Path(path), poll, skip_broken)]
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
        corners = generator(CHOICE, (seed_of(sample.name),)).random((phase.crops, 2)).round(4).tolist()
        places = [Crop(*each) for each in corners]
    return places + ([each._replace(mirrored=True) for each in places] if phase.flip else [])


def captions_of(sample: Sample, phase: Phase) -> list[tuple[str, float]]:
    """Return the captions with their shares, of each `tag_orders` orders of what its commas divide; the first
    `keep_tags` stay where they are (kohya's shuffle_caption and keep_tokens)."""
    found = []
    for caption, share in sample.captions or [(sample.caption, 1.0)]:
        tags, orders = caption.split(", "), {caption: None}
        first, rng = phase.keep_tags, generator(CHOICE, (seed_of(caption),))
        for _ in range(phase.tag_orders - 1):
            turns = rng.permutation(len(tags[first:]))
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
