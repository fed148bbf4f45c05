"""The loader reads the next step in threads, also if it is in another epoch or phase."""

import threading
from contextlib import closing
from types import SimpleNamespace

import torch

from sana_core.training import schedule
from sana_core.training.cache import join_batch
from sana_core.training.loader import Loader
from sana_core.training.loss import draw_training
from sana_core.training.ranks import ALONE
from sana_core.training.schedule import TrainProgress
from sana_core.training.settings import Phase, TrainingSettings

EMPTY = {"embeds": torch.zeros(5, 4), "mask": torch.ones(5, dtype=torch.uint8)}


class RecordingCache:
    """A cache of latents that contain the index of their image."""

    empty = EMPTY

    def __init__(self):
        self.loaded, self.threads = [], set()

    def load(self, indices):
        self.threads.add(threading.current_thread())
        self.loaded.append(list(indices))
        images = [{"latents": torch.full((32, 2, 2), float(index))} for index in indices]
        return join_batch([str(index) for index in indices], images, [EMPTY] * len(indices), [])


def test_the_next_step_is_read_in_a_thread_across_epochs_and_phases():
    """The reference is the list of batches of each epoch: two epochs of three steps, then four of another phase."""
    caches = [RecordingCache(), RecordingCache()]
    samples = [SimpleNamespace(bucket=(64, 64 + 32 * (index % 2)), weight=1.0 + index) for index in range(9)]
    variants = {index: [index] for index in range(9)}
    data = [SimpleNamespace(samples=samples, cache=one, learned=list(range(9)), variants=variants) for one in caches]
    phases = (Phase((), batch=2, accumulate=2, epochs=2), Phase((), batch=4, steps=4))
    settings = TrainingSettings("", "", phases, seed=3)
    expected = [batches for epoch in range(2) for batches in schedule.epoch_steps(phases[0], data[0], 3, epoch)]
    expected += [batches for epoch in range(2) for batches in schedule.epoch_steps(phases[1], data[1], 4, epoch)][:4]
    progress, has_ended, steps = TrainProgress(), False, []
    with closing(Loader(settings, ALONE, data, False)) as loader:
        while not has_ended:
            microbatches, images = loader.load(progress)
            following, has_ended = loader.after(progress)
            if not has_ended:
                loader.reading[following].result(10)
                assert caches[following.phase].loaded[-1] == expected[len(steps) + 1][-1]
            for microbatch in microbatches:
                keys = [(3, progress.phase, progress.epoch, index) for index in microbatch.indices]
                noise = draw_training((32, 2, 2), keys, 0.1).noise
                assert torch.equal(microbatch.draw.noise, noise) and not microbatch.is_filler
                assert microbatch.batch.latents[:, 0, 0, 0].tolist() == microbatch.indices
                assert microbatch.weights.tolist() == [1.0 + index for index in microbatch.indices]
            steps.append([microbatch.indices for microbatch in microbatches])
            assert images == sum(map(len, steps[-1]))
            progress = following
    assert steps == expected and progress.step == len(expected) == 10
    # Each step was read once, and none in the main thread.
    assert sum(len(cache.loaded) for cache in caches) == sum(map(len, expected))
    assert threading.main_thread() not in caches[0].threads | caches[1].threads
