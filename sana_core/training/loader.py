"""The data of a run: prepared once, and then loaded for each step while the device computes the step before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import NamedTuple

import torch

from ..errors import SanaError
from ..runtime.atomic_files import remove
from ..runtime.cancellation import Poll
from ..runtime.libraries import without_collection
from . import schedule, states
from .cache import (
    SIZES,
    Batch,
    BrokenImages,
    FileMemo,
    Pixels,
    Store,
    Stream,
    digest_models,
    find_broken,
    is_size,
    leave_out,
    load_encoders,
    store_of,
)
from .dataset import Faults, Sample, is_unreadable, warn_of_skipped
from .images import upright_size
from .loss import Draw, draw_training, drop_captions
from .previews import Inputs, encode_validation
from .ranks import Ranks, check_same
from .schedule import PhaseData, StepBatches, TrainProgress
from .settings import TrainingSettings
from .sharding import microbatches

# Called with the name of a stage of the preparation, the number of finished items, and their total number.
OnProgress = Callable[[str, int, int], None]
# Threads that read and decode. The job of a step waits for the jobs of its images, so one thread is not enough.
THREADS = 4


def prepare_data(
    settings: TrainingSettings, ranks: Ranks, device: torch.device, poll: Poll, progress: OnProgress
) -> tuple[list[PhaseData], Inputs | None, str]:
    """List the images of all phases, and encode the images and captions that the cache does not have yet.

    Each rank encodes a part of them. A run that streams encodes its images later, in each step. Returns the images of
    each phase, the inputs of the validation's images, and the digest of the models.
    """
    store = store_of(settings)
    samples = ranks.run_on_all(partial(samples_of_phases, settings, store, poll))
    model, ids = digest_models(settings, store.folder, partial(progress, "digest of the model"))
    broken, rank_part = BrokenImages(), slice(ranks.rank, None, ranks.size)

    def encode(samples: Sequence[Sequence[Sample]], part: slice) -> tuple[list[PhaseData], Inputs | None]:
        with load_encoders(settings, device, poll) as encoders:
            options = settings, store, encoders, ids, poll, partial(progress, "encoding images and captions"), broken
            data = [
                schedule.prepare_phase(samples_of_phase[part], phase, *options)
                for samples_of_phase, phase in zip(samples, settings.phase, strict=True)
            ]
            return data, encode_validation(settings, store, ids, encoders) if part == slice(None) else None

    def check_held_out(data: Sequence[PhaseData]) -> None:
        # A step can skip an unreadable image. A validation cannot, so read its images now.
        for phase in data:
            if isinstance(phase.cache, Stream):
                phase.cache.check(phase.held_out[rank_part], broken, poll)

    try:
        # Without an image, batches and held-out images are others. So prepare again until none is left out.
        while True:
            broken.clear()
            if ranks.size > 1 and not settings.stream:
                ranks.run_on_all(partial(encode, samples, rank_part))
            # Rank 0 encodes the entries that are still missing. The others then read all entries from the cache.
            encode_all = partial(encode, samples, slice(None))
            prepared = ranks.run_on_rank0(encode_all)
            data, inputs = ranks.run_on_all(lambda: prepared or encode_all())  # noqa: B023
            if settings.stream and settings.skip_broken:
                ranks.run_on_all(partial(check_held_out, data))
            # Machines may have the images under different paths, so the ranks exchange pairs (phase, index).
            gathered = ranks.all_gather(find_broken(samples, broken))
            broken_anywhere = {position: fault for faults in gathered for position, fault in faults.items()}
            if not broken_anywhere:
                break
            samples = leave_out(samples, broken_anywhere, settings.skip_broken)
    finally:
        if ranks.first:
            # Remove the unfinished entries of this run's killed processes. A failure does no harm.
            with suppress(OSError):
                remove(store.parts)
    check_same(ranks, {states.MODEL: model, "images": [phase.digest for phase in data]}, "data")
    return data, inputs, model


def samples_of_phases(settings: TrainingSettings, store: Store, poll: Poll) -> list[list[Sample]]:
    """Return the samples of each phase. Headers of unchanged images are not read again."""
    sizes = FileMemo(store, SIZES, upright_size, is_size)
    try:
        with without_collection():
            return schedule.read_samples(settings, poll, lambda place, name: tuple(sizes.of(place, name)))
    finally:
        sizes.save()


class Microbatch(NamedTuple):
    # Indices of the samples.
    indices: list[int]
    # An idle rank computes it only to take part in the collectives. Its loss is multiplied by 0.
    is_filler: bool
    # Dropped captions are replaced by the empty prompt.
    batch: Batch
    draw: Draw
    # Factors of the losses [B].
    weights: torch.Tensor


# The files of one rank's part of a step: the number of images in the step over all ranks, and its microbatches. A
# streamed run has no microbatches yet but indices, is_filler, and the image or the fault of each index.
StepFiles = tuple[int, list[Microbatch], list[tuple[list[int], bool, list[Pixels | SanaError]]]]


class Loader:
    """Loads the microbatches of a step, and begins to load the next step, also in the next epoch or phase."""

    def __init__(
        self, settings: TrainingSettings, ranks: Ranks, data: Sequence[PhaseData], has_shared_mask: bool
    ) -> None:
        self.settings, self.ranks, self.data = settings, ranks, data
        # Whether a dropped caption keeps its mask. See `drop_captions`.
        self.has_shared_mask = has_shared_mask
        self.pool = ThreadPoolExecutor(THREADS, "sana training data")
        # The jobs that read the files of this step and the next one.
        self.reading: dict[TrainProgress, Future[StepFiles]] = {}
        # The jobs for the batches of this epoch and the next one, by numbers of phase and epoch.
        self.epochs: dict[tuple[int, int], Future[list[StepBatches]]] = {}
        # The number of consecutive steps, up to now, of which no image could be read.
        self.steps_without_images = 0

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        # The encoders of streamed data may refer to the owner of this object.
        self.data, self.epochs, self.reading = (), {}, {}

    @cached_property
    def steps_per_epoch(self) -> list[int]:
        return list(map(schedule.count_epoch_steps, self.settings.phase, self.data))

    def advance(self, progress: TrainProgress) -> tuple[TrainProgress, bool]:
        """Return `progress` at the next step, and whether there is none because the last phase has ended."""
        return schedule.advance(progress, self.steps_per_epoch, self.settings)

    def after(self, progress: TrainProgress) -> tuple[TrainProgress, bool]:
        """Return the progress after the step at `progress`, and whether the last phase has ended with it."""
        phase, count = self.settings.phase[progress.phase], self.steps_per_epoch[progress.phase]
        return self.advance(schedule.after_step(phase, progress, count))

    def load(self, progress: TrainProgress) -> tuple[list[Microbatch], int]:
        """Return this rank's microbatches of the step at `progress`, and the number of images over all ranks.

        An error raises on all ranks. With `skip_broken`, a streamed run leaves out the images that cannot be read.
        Without it, or if a whole epoch has no image, the error names every broken image of the step.
        """
        files = self.ranks.run_on_all(self.begin(progress).result)
        following, has_ended = self.after(progress)
        if not has_ended:
            self.begin(following)
        # The step before `progress` is over.
        for old in list(self.reading)[:-2]:
            del self.reading[old]
        return self.finish(progress, files)

    def begin(self, progress: TrainProgress) -> Future[StepFiles]:
        """Return the job that reads the files of the step at `progress`. It may have begun before."""
        if progress in self.reading:
            return self.reading[progress]
        phase, steps = self.settings.phase[progress.phase], self.steps_per_epoch[progress.phase] - progress.position
        if phase.steps is not None:
            steps = min(steps, phase.steps - progress.phase_step)
        end = progress._replace(position=progress.position + steps, phase_step=progress.phase_step + steps)
        following, has_ended = self.advance(end)
        epoch = self.plan_epoch(progress)
        if not has_ended:
            # With several crops or captions of 100,000 images this takes seconds, so it begins an epoch before.
            self.plan_epoch(following)
        job = self.pool.submit(lambda: self.read(progress, epoch.result()[progress.position]))
        return self.reading.setdefault(progress, job)

    def plan_epoch(self, progress: TrainProgress) -> Future[list[StepBatches]]:
        """Return the job that lists the batches of the epoch of `progress`. It may have begun before."""
        number, epoch = key = progress.phase, progress.epoch
        if key not in self.epochs:
            options = self.settings.phase[number], self.data[number], self.settings.seed + number, epoch
            self.epochs[key] = self.pool.submit(schedule.epoch_steps, *options)
        # The oldest is over.
        for old in list(self.epochs)[:-2]:
            del self.epochs[old]
        return self.epochs[key]

    def read(self, progress: TrainProgress, step_batches: StepBatches) -> StepFiles:
        """Read this rank's part of a step. `step_batches` has the batches of all ranks, as indices of samples."""
        total, cache = sum(map(len, step_batches)), self.data[progress.phase].cache
        shares = microbatches(step_batches, self.ranks.rank, self.ranks.size)
        if not isinstance(cache, Stream):
            return total, [self.draw(progress, *share, cache.load(share[0])) for share in shares], []
        images = [self.pool.map(cache.read, indices) for indices, _ in shares]
        return total, [], [(*share, list(decoded)) for share, decoded in zip(shares, images, strict=True)]

    def finish(self, progress: TrainProgress, files: StepFiles) -> tuple[list[Microbatch], int]:
        """Return the microbatches of `files` and the number of images in the step. A streamed run encodes them here."""
        (total, loaded, decoded), stream, ranks = files, self.data[progress.phase].cache, self.ranks
        if not isinstance(stream, Stream):
            return loaded, total
        rank_faults = {
            index: image
            for indices, is_filler, images in decoded
            for index, image in zip(indices, images, strict=True)
            # Another rank learns the image of a filler, and reports its fault.
            if isinstance(image, SanaError) and not is_filler
        }
        all_faults = {index: fault for faults in ranks.all_gather(rank_faults) for index, fault in faults.items()}
        total -= len(all_faults)

        def encode() -> list[Microbatch]:
            faults = [all_faults[index] for index in sorted(all_faults)]
            is_epoch_empty = not total and self.steps_without_images + 1 >= self.steps_per_epoch[progress.phase]
            if not (self.settings.skip_broken and not is_epoch_empty and all(map(is_unreadable, faults))):
                Faults(faults).check()
            if faults and ranks.first:
                warn_of_skipped(faults)
            encoded = []
            for indices, is_filler, images in decoded:
                readable = [item for item in zip(indices, images, strict=True) if not isinstance(item[1], SanaError)]
                if readable:
                    batch = stream.encode_batch(*zip(*readable, strict=True))
                    encoded.append(self.draw(progress, [index for index, _ in readable], is_filler, batch))
                else:
                    # This rank has no image, and computes with zeros.
                    encoded.append(self.draw(progress, indices[:1], True, stream.blank(indices[0])))
            return encoded

        return ranks.run_on_all(encode), total

    def draw(self, progress: TrainProgress, indices: list[int], is_filler: bool, batch: Batch) -> Microbatch:
        """Return a microbatch with its random values.

        Noise and time of an image depend on the run's seed, phase, epoch and the image. So they do not depend on the
        rank or the batch that the image is in.
        """
        settings, data = self.settings, self.data[progress.phase]
        keys = [(settings.seed, progress.phase, progress.epoch, index) for index in indices]
        draw = draw_training(batch.latents.shape[1:], keys, settings.caption_dropout)
        embeds, mask = drop_captions(batch.embeds, batch.mask, draw.dropped, data.cache.empty, self.has_shared_mask)
        weights = torch.tensor([data.samples[index].weight for index in indices])
        return Microbatch(indices, is_filler, batch._replace(embeds=embeds, mask=mask), draw, weights)
