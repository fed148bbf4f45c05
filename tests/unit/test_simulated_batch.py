"""Whole batches of simulated workers (benchmarks/simulation.py) under the engine's loop: losses, copies, efficiency."""

import random

import pytest

from benchmarks.simulation import SimulatedWorker, Time, run_of
from sana_core.batch.plan import batch_images, split_into_chunks
from sana_core.errors import ClusterError
from sana_core.runtime.limits import LIMITS


def simulate(speeds, images=100, chunk=4, grace=60.0, **options):
    """Run a batch on workers of these speeds. Each image must arrive once. Returns time, workers and run."""
    time = Time()
    workers = [
        SimulatedWorker(f"worker {index}", time, speed, seed=index, **options) for index, speed in enumerate(speeds)
    ]
    chunks = split_into_chunks(batch_images(1, images, 0), chunk)
    run = run_of(chunks, time, workers, LIMITS._replace(grace=grace, first=10 * grace))
    assert sorted(image.number for image, _ in run.images()) == list(range(images))
    return time, workers, run


def random_mishaps(**probabilities):
    """Return a `mishap` for SimulatedWorker, given the probability of each kind of failure."""

    def mishap(source):
        value = source.random()
        for kind, probability in probabilities.items():
            if value < probability:
                return kind
            value -= probability
        return None

    return mishap


@pytest.mark.parametrize("workers, chunk, depth", [(1, 1, 1), (2, 4, 1), (3, 7, 2), (64, 4, 2)])
def test_every_image_arrives_exactly_once(workers, chunk, depth):
    _, _, run = simulate([1.0] * workers, chunk=chunk, depth=depth, jitter=0.3)
    assert sum(run.finished.values()) == 100


def test_a_slow_worker_generates_fewer_images():
    time, _, run = simulate([3.0, 1.0], images=32, chunk=1, depth=1)
    assert run.finished["worker 0"] == 24 and run.finished["worker 1"] == 8
    assert time.now == pytest.approx(8.0)


def test_the_batch_does_not_wait_for_the_last_chunk_of_a_slow_worker():
    # The slow worker takes 40 s per chunk and starts its second one at 40 s. Without copies the batch would take 80 s.
    time, _, _ = simulate([1.0, 0.1], images=48, chunk=4, depth=1)
    assert time.now < 45


@pytest.mark.parametrize("seed", range(20))
def test_no_image_is_lost_when_workers_die_hang_and_run_out_of_memory(seed):
    chance = random.Random(seed)
    speeds = [chance.uniform(0.3, 3) for _ in range(6)]
    mishap = random_mishaps(dies=0.05, hangs=0.05, memory=0.1)
    _, workers, _ = simulate(
        speeds, images=200, grace=10.0, delay=0.1, jitter=0.4, restart=20, mishap=lambda _: mishap(chance)
    )
    assert len({kind for worker in workers for kind in worker.mishaps}) >= 2


@pytest.mark.parametrize("mishaps", [["hangs"], [None, "hangs"], ["dies"]])
def test_a_lost_worker_is_restarted_when_there_is_no_other_worker(mishaps):
    remaining = iter(mishaps)
    _, (worker,), _ = simulate([1.0], images=12, grace=10.0, restart=5, mishap=lambda _: next(remaining, None))
    assert worker.birth == 2


def test_out_of_memory_halves_the_chunks_of_that_worker_only():
    mishaps = iter(["memory", None])
    _, _, run = simulate([1.0, 1.0], images=64, chunk=8, depth=1, mishap=lambda _: next(mishaps, None))
    assert sorted(str(seat.limit) for seat in run.seats.values()) == ["4", "None"]


def test_a_worker_without_memory_for_a_single_image_is_left_out():
    with pytest.raises(Exception, match="out of memory"):
        simulate([1.0], images=8, mishap=lambda _: "memory")


def test_a_worker_that_always_dies_is_left_out():
    with pytest.raises(ClusterError, match="worker 0: it died"):
        simulate([1.0], images=8, mishap=lambda _: "dies")


def test_a_consumer_that_stalls_loses_no_worker():
    # Each chunk takes 2 s. The consumer stalls for 100 s after some of the images.
    time = Time()
    workers = [SimulatedWorker(f"worker {index}", time, 0.5) for index in range(4)]
    chunks = split_into_chunks(batch_images(1, 60, 0), 1)
    for image, _ in run_of(chunks, time, workers, LIMITS._replace(grace=10.0)).images():
        if image.number % 10 == 9:
            time.advance(time.now + 100.0)
    assert all(worker.birth == 1 for worker in workers)


def test_64_workers_with_failures_reach_95_percent_of_their_capacity():
    speeds = [random.Random(index).choice([0.5, 1.0, 1.0, 2.0]) for index in range(64)]
    mishap = random_mishaps(dies=0.002, hangs=0.0005, memory=0.002)
    _, workers, _ = simulate(speeds, images=10_000, delay=0.05, jitter=0.1, restart=60, mishap=mishap)
    assert 10_000 / sum(worker.capacity() for worker in workers) >= 0.95
