"""Tests of the batch queue and of the loop that drives it.

Most tests run whole batches on simulated workers (benchmarks/simulation.py). The others call the queue directly.
"""

import random
from dataclasses import replace

import pytest

from benchmarks.simulation import SimulatedPool
from sana_core.batch.loop import Outcome, run_batch
from sana_core.batch.plan import FailedImage, ImageSpec, Workload, batch_images, default_chunk_size, split_into_chunks
from sana_core.batch.queue import ChunkLostError, Queue


def run_simulation(pool, images=100, chunk=4, grace=60.0):
    """Run a batch on `pool` and return its queue, after checking that every image arrived exactly once."""
    queue = Queue(split_into_chunks(batch_images(1, images, 0), chunk))
    arrived = [image for image, _ in run_batch(queue, pool, grace)]
    assert sorted(image.number for image in arrived) == list(range(images))
    return queue


def random_mishaps(**probabilities):
    """Return a `mishap` for SimulatedPool, given the probability of each kind of failure."""

    def draw_mishap(random_source):
        value = random_source.random()
        for kind, probability in probabilities.items():
            if value < probability:
                return kind
            value -= probability
        return None

    return draw_mishap


# Planning: which images there are, and which of them are generated together


def test_image_i_of_a_prompt_uses_seed_plus_i():
    images = batch_images(2, 3, 2**64 - 2)
    assert [image.number for image in images] == list(range(6))
    assert [image.prompt for image in images] == [0, 0, 0, 1, 1, 1]
    # Seeds wrap around after 2^64 - 1.
    assert [image.seed for image in images] == [2**64 - 2, 2**64 - 1, 0] * 2


@pytest.mark.parametrize(
    "prompts, count, seed, message",
    [
        (1, 0, 0, "count: got 0"),
        (1, 1_000_000, 0, "count: got 1000000, expected a whole number from 1 to 100000"),
        (1, 1.5, 0, "count: got 1.5"),
        (1, 1, -1, "seed: got -1"),
        (1, 1, 2**64, "seed: got"),
        (0, 1, 0, "prompts: got none"),
    ],
)
def test_out_of_range_inputs_raise_an_error_that_names_the_input(prompts, count, seed, message):
    with pytest.raises(ValueError, match=message):
        batch_images(prompts, count, seed)


def test_finished_images_are_left_out_without_regrouping_the_others():
    images = batch_images(1, 10, 0)
    workload = Workload([""], images, 4, frozenset({1, 4, 5, 6, 7}))
    numbers = [[image.number for image in chunk] for chunk in workload.split(64, 64, 1)]
    # Without finished images the chunks would be 0-3, 4-7 and 8-9.
    assert numbers == [[0, 2, 3], [8, 9]]


def test_a_chunk_size_of_zero_is_rejected():
    with pytest.raises(ValueError, match="chunk: got 0"):
        split_into_chunks(batch_images(1, 10, 0), 0)


def test_default_chunk_size_shrinks_with_larger_images_and_with_more_workers():
    assert [default_chunk_size(side, side, 1000, 1) for side in (128, 1024, 2048, 4096)] == [32, 8, 2, 1]
    assert default_chunk_size(1024, 1024, 12, 4) == 1
    assert default_chunk_size(1024, 1024, 1, 64) == 1


# Whole batches on simulated workers


@pytest.mark.parametrize("workers, chunk, depth", [(1, 1, 1), (2, 4, 1), (3, 7, 2), (64, 4, 2)])
def test_every_image_arrives_exactly_once(workers, chunk, depth):
    queue = run_simulation(SimulatedPool([1.0] * workers, depth=depth, jitter=0.3), chunk=chunk)
    assert sum(queue.finished.values()) == 100


def test_a_slow_worker_generates_fewer_images():
    pool = SimulatedPool([3.0, 1.0], depth=1)
    queue = run_simulation(pool, images=32, chunk=1)
    assert queue.finished == {"worker 0": 24, "worker 1": 8}
    assert pool.clock == pytest.approx(8.0)


def test_the_batch_does_not_wait_for_the_last_chunk_of_a_slow_worker():
    # The slow worker takes 40 s per chunk and starts its second one at 40 s. Without copies the batch would take 80 s.
    pool = SimulatedPool([1.0, 0.1], depth=1)
    run_simulation(pool, images=48, chunk=4)
    assert pool.clock < 45


@pytest.mark.parametrize("seed", range(20))
def test_no_image_is_lost_when_workers_die_hang_and_run_out_of_memory(seed):
    speeds = [random.Random(seed).uniform(0.3, 3) for _ in range(6)]
    mishap = random_mishaps(dies=0.05, hangs=0.05, memory=0.1)
    pool = SimulatedPool(speeds, seed, delay=0.1, jitter=0.4, restart=20, mishap=mishap)
    run_simulation(pool, images=200, grace=10.0)
    assert len({kind for _, kind in pool.mishaps}) >= 2


def test_a_hanging_worker_is_replaced_when_there_is_no_other_worker():
    mishaps = iter([None, "hangs"])
    pool = SimulatedPool([1.0], depth=1, restart=5, mishap=lambda _: next(mishaps, None))
    run_simulation(pool, images=12, grace=10.0)
    assert pool.names == {"worker 0": "worker 0, 1"}


def test_a_worker_that_hangs_with_its_first_chunk_is_replaced():
    mishaps = iter(["hangs"])
    pool = SimulatedPool([1.0], depth=1, restart=5, mishap=lambda _: next(mishaps, None))
    run_simulation(pool, images=12, grace=10.0)


def test_out_of_memory_halves_the_chunks_of_that_worker_only():
    mishaps = iter(["memory", None])
    pool = SimulatedPool([1.0, 1.0], depth=1, mishap=lambda _: next(mishaps, None))
    queue = run_simulation(pool, images=64, chunk=8)
    assert queue.limits == {"worker 0": 4}


def test_a_worker_that_cannot_generate_a_single_image_is_dropped():
    pool = SimulatedPool([1.0], depth=1, mishap=lambda _: "memory")
    dropped = []

    def drop(worker, reason):
        dropped.append(worker)
        raise reason

    pool.drop = drop
    with pytest.raises(MemoryError):
        run_simulation(pool, images=8)
    assert dropped == ["worker 0"]


def test_an_error_other_than_out_of_memory_ends_the_batch():
    class FaultyPool(SimulatedPool):
        def wait(self):
            return [replace(outcome, error=ValueError("bad")) for outcome in super().wait()]

    with pytest.raises(ValueError, match="bad"):
        run_simulation(FaultyPool([1.0]))


def test_64_workers_with_failures_reach_95_percent_of_their_capacity():
    speeds = [random.Random(1).choice([0.5, 1.0, 1.0, 2.0]) for _ in range(64)]
    mishap = random_mishaps(dies=0.002, hangs=0.0005, memory=0.002)
    pool = SimulatedPool(speeds, 3, delay=0.05, jitter=0.1, restart=60, mishap=mishap)
    run_simulation(pool, images=10_000)
    assert 10_000 / pool.capacity() >= 0.95


# Copies of chunks at the end of a batch


def queue_with_a_late_chunk():
    """Return a queue and its only unfinished chunk. Worker "slow" has the chunk, "fast" and "third" are idle."""
    chunk = (ImageSpec(2, 0, 2), ImageSpec(3, 0, 3))
    queue = Queue([(ImageSpec(0, 0, 0),), (ImageSpec(1, 0, 1),), chunk])
    for worker in ("fast", "third"):
        queue.finish(worker, queue.next_chunk(worker, 0.0), 1.0)
    assert queue.next_chunk("slow", 1.0) == chunk
    return queue, chunk


def test_the_copy_that_finishes_second_yields_no_images():
    first_chunk, last_chunk = (ImageSpec(0, 0, 0), ImageSpec(1, 0, 1)), (ImageSpec(2, 0, 2),)
    queue = Queue([first_chunk, last_chunk])
    assert queue.next_chunk("fast", 0.0) == first_chunk and queue.next_chunk("slow", 0.0) == last_chunk
    assert queue.finish("fast", first_chunk, 1.0) == list(first_chunk)
    # The expected time of a chunk of one image is 0.5 s. At 1.0 the slow worker is 0.5 s overdue and therefore expected
    # to take another 0.5 s, which is not longer than a copy would take.
    assert queue.next_chunk("fast", 1.0) is None
    # At 10.0 the slow worker is 9.5 s overdue, so a copy is faster.
    assert queue.next_chunk("fast", 10.0) == last_chunk
    assert queue.finish("fast", last_chunk, 10.5) == list(last_chunk)
    assert queue.finish("slow", last_chunk, 11.0) == []
    assert not queue.missing


def test_a_chunk_is_copied_at_most_once():
    queue, chunk = queue_with_a_late_chunk()
    assert queue.next_chunk("fast", 20.0) == chunk
    assert queue.next_chunk("third", 20.0) is None


def test_a_worker_gets_no_copy_that_exceeds_its_memory_limit():
    queue, chunk = queue_with_a_late_chunk()
    queue.limits["fast"] = 1
    assert queue.next_chunk("fast", 20.0) is None
    assert queue.next_chunk("third", 20.0) == chunk


def test_the_latest_chunk_is_copied_and_only_if_the_copy_is_faster():
    images = batch_images(1, 6, 0)
    queue = Queue([(image,) for image in images])
    for worker, seconds in (("fast", 1.0), ("slow", 4.0), ("slower", 6.0)):
        queue.finish(worker, queue.next_chunk(worker, 0.0), seconds)
    slow_chunk, slower_chunk = queue.next_chunk("slow", 10.0), queue.next_chunk("slower", 10.0)
    queue.finish("fast", queue.next_chunk("fast", 10.0), 11.0)
    # At 11.0 the two chunks have 3 s and 5 s left, and the fast worker needs 1 s.
    assert queue.next_chunk("fast", 11.0) == slower_chunk
    queue.finish("fast", slower_chunk, 12.0)
    # At 13.5 the slow worker needs another 0.5 s, which is less than a copy takes.
    assert queue.next_chunk("fast", 13.5) is None
    assert queue.next_chunk("fast", 12.0) == slow_chunk


def test_the_time_of_a_copy_counts_all_images_of_the_chunk():
    images = batch_images(1, 6, 0)
    queue = Queue([(images[0],), (images[1],), tuple(images[2:])])
    for worker in ("fast", "slow"):
        queue.finish(worker, queue.next_chunk(worker, 0.0), 3.0)
    # Four images at 3 s each: at 12.0 the slow worker needs another 10 s, a copy would take 12 s.
    assert queue.next_chunk("slow", 10.0) == tuple(images[2:])
    assert queue.next_chunk("fast", 12.0) is None
    assert queue.next_chunk("fast", 40.0) == tuple(images[2:])


# Workers that run out of memory


def test_a_finished_image_resets_the_out_of_memory_count():
    queue = Queue([(image,) for image in batch_images(1, 8, 0)])
    still_used = []
    for _ in range(2):
        for _ in range(3):
            still_used.append(queue.halve("gpu", queue.next_chunk("gpu", 0.0), 1.0))
        queue.finish("gpu", queue.next_chunk("gpu", 1.0), 2.0)
    assert all(still_used)
    assert [queue.halve("gpu", queue.next_chunk("gpu", 2.0), 3.0) for _ in range(4)] == [True, True, True, False]


def test_a_memory_limit_never_rises():
    images = batch_images(1, 10, 0)
    queue = Queue([tuple(images[:2]), tuple(images[2:])])
    small_chunk, large_chunk = queue.next_chunk("gpu", 0.0), queue.next_chunk("gpu", 0.0)
    queue.halve("gpu", small_chunk, 1.0)
    queue.halve("gpu", large_chunk, 2.0)
    assert queue.limits["gpu"] == 1


def test_both_halves_move_to_the_front_of_the_queue_in_order():
    images = tuple(batch_images(1, 5, 0))
    queue = Queue([images, tuple(batch_images(2, 5, 0)[5:])])
    assert queue.halve("gpu", queue.next_chunk("gpu", 0.0), 1.0)
    assert queue.next_chunk("large gpu", 1.0) == images[:2] and queue.next_chunk("large gpu", 1.0) == images[2:]
    # The worker that ran out of memory now gets at most two images at a time.
    assert len(queue.next_chunk("gpu", 1.0)) == 2


# Pace, hanging workers and lost workers


def test_pace_is_seconds_per_image_averaged_over_recent_chunks():
    images = batch_images(1, 8, 0)
    queue = Queue([tuple(images[:4]), tuple(images[4:])])
    for start, end, pace in ((0.0, 8.0, 2.0), (10.0, 14.0, 1.5)):
        queue.finish("gpu", queue.next_chunk("gpu", start), end)
        assert queue.pace["gpu"] == pace
    assert queue.finished["gpu"] == 8


def test_the_clock_of_a_second_chunk_starts_when_the_first_one_finishes():
    first_chunk, second_chunk = (ImageSpec(0, 0, 0),), (ImageSpec(1, 0, 1),)
    queue = Queue([first_chunk, second_chunk])
    assert [queue.next_chunk("gpu", 0.0), queue.next_chunk("gpu", 0.0)] == [first_chunk, second_chunk]
    assert queue.pending("gpu") == 2
    queue.finish("gpu", first_chunk, 3.0)
    assert queue.complete("gpu", second_chunk, 5.0) == 2.0
    assert queue.pending("gpu") == 0


def test_a_worker_hangs_after_ten_times_the_expected_time_and_at_least_the_grace_period():
    chunk = (ImageSpec(0, 0, 0), ImageSpec(1, 0, 1))
    queue = Queue([chunk, (ImageSpec(2, 0, 2), ImageSpec(3, 0, 3))])
    queue.next_chunk("gpu", 0.0)
    # No pace is known yet, so the limit is 30 times the grace period.
    assert queue.hanging(30 * 2.0, 2.0) == [] and queue.hanging(30 * 2.0 + 0.1, 2.0) == ["gpu"]
    queue.finish("gpu", chunk, 4.0)
    queue.next_chunk("gpu", 4.0)
    # Two images at 2 s each: the limit is 40 s, or the grace period if that is longer.
    assert queue.hanging(44.0, 2.0) == [] and queue.hanging(44.1, 2.0) == ["gpu"]
    assert queue.hanging(44.1, 50.0) == []


def test_the_clock_starts_when_the_worker_reports_that_it_begins():
    chunk = (ImageSpec(0, 0, 0),)
    queue = Queue([chunk])
    queue.starts_are_reported = True
    assert queue.next_chunk("gpu", 0.0) == chunk
    # The worker loads its models for an hour.
    assert queue.hanging(3600.0, 1.0) == []
    queue.start("gpu", chunk, 3600.0)
    assert queue.hanging(3630.0, 1.0) == [] and queue.hanging(3630.1, 1.0) == ["gpu"]
    queue.finish("gpu", chunk, 3640.0)
    assert queue.pace["gpu"] == 40.0


def test_a_report_about_a_requeued_chunk_starts_no_clock():
    first_chunk, second_chunk = (ImageSpec(0, 0, 0),), (ImageSpec(1, 0, 1),)
    queue = Queue([first_chunk, second_chunk])
    queue.starts_are_reported = True
    assert queue.next_chunk("gpu", 0.0) == first_chunk
    queue.requeue("gpu")
    queue.start("gpu", first_chunk, 1.0)
    assert queue.next_chunk("other", 2.0) == first_chunk and queue.next_chunk("gpu", 2.0) == second_chunk
    queue.start("gpu", first_chunk, 3.0)
    assert queue.hanging(1e9, 1.0) == []


def test_a_worker_that_still_loads_gets_its_chunk_copied():
    chunks = [(image,) for image in batch_images(1, 2, 0)]
    queue = Queue(chunks)
    queue.starts_are_reported = True
    assert [queue.next_chunk(worker, 0.0) for worker in ("fast", "loading")] == chunks
    queue.start("fast", chunks[0], 0.0)
    queue.finish("fast", chunks[0], 1.0)
    assert queue.next_chunk("fast", 1.5) is None
    assert queue.next_chunk("fast", 9.0) == chunks[1]


def test_time_in_which_nobody_looked_does_not_count():
    chunk = (ImageSpec(0, 0, 0),)
    queue = Queue([chunk])
    queue.next_chunk("gpu", 0.0)
    queue.postpone(100.0)
    assert queue.hanging(130.0, 1.0) == [] and queue.hanging(130.1, 1.0) == ["gpu"]


def test_the_time_that_a_worker_measures_is_its_pace():
    chunk = tuple(batch_images(1, 4, 0))
    queue = Queue([chunk])
    queue.next_chunk("gpu", 0.0)
    # The result waited for a minute until somebody looked.
    queue.finish("gpu", chunk, 62.0, 2.0)
    assert queue.pace["gpu"] == 0.5


def test_a_consumer_that_stalls_loses_no_worker():
    # Each chunk takes 2 s. The consumer stalls for 100 s after some of the images.
    pool = SimulatedPool([0.5] * 4, depth=2)
    dropped = []
    pool.drop = lambda worker, reason: dropped.append(worker)
    queue = Queue(split_into_chunks(batch_images(1, 60, 0), 1))
    for image, _ in run_batch(queue, pool, 1.0):
        if image.number % 10 == 9:
            pool.clock += 100.0
    assert not dropped


def test_images_that_fail_for_a_reason_of_their_own_are_delivered_and_not_counted_as_finished():
    class FaultyPool(SimulatedPool):
        def wait(self):
            events = super().wait()
            return [
                replace(event, results=[FailedImage("NaN") if image.seed == 3 else image for image in event.chunk])
                for event in events
            ]

    queue = Queue(split_into_chunks(batch_images(1, 8, 0), 2))
    results = dict(run_batch(queue, FaultyPool([1.0, 1.0])))
    assert [image.seed for image, result in results.items() if result == FailedImage("NaN")] == [3]
    assert len(results) == 8 and sum(queue.finished.values()) == 7


def test_images_of_a_requeued_chunk_count_if_they_arrive_late_but_not_its_time():
    chunk = (ImageSpec(0, 0, 0), ImageSpec(1, 0, 1))
    queue = Queue([chunk])
    assert queue.next_chunk("gpu", 0.0) == chunk
    queue.requeue("gpu")
    assert queue.complete("gpu", chunk, 100.0) is None
    assert queue.finish("gpu", chunk, 100.0) == list(chunk)
    assert not queue.pace and not queue.missing
    # The chunk is still queued, but none of its images is generated again.
    assert queue.next_chunk("other", 100.0) is None


def test_chunks_of_a_lost_worker_return_to_their_place_in_the_queue():
    chunks = [(image,) for image in batch_images(1, 4, 0)]
    queue = Queue(chunks)
    assert [queue.next_chunk("gpu", 0.0) for _ in range(2)] == chunks[:2]
    queue.requeue("gpu")
    assert [queue.next_chunk("other", 1.0) for _ in range(4)] == chunks


def test_losing_a_chunk_for_the_fifth_time_ends_the_batch():
    chunk = tuple(batch_images(1, 2, 0))
    queue = Queue([chunk])
    for worker in range(4):
        assert queue.next_chunk(f"gpu {worker}", 0.0) == chunk
        queue.requeue(f"gpu {worker}")
    assert queue.next_chunk("gpu 4", 0.0) == chunk
    with pytest.raises(ChunkLostError, match="image 0 and 1 more were lost with it 5 times"):
        queue.requeue("gpu 4")


def test_the_clock_of_a_chunk_stands_while_nobody_looks():
    class Pool:
        depth, reports_starts, clock, looks = 1, False, 0.0, 0

        def workers(self):
            return ["a"]

        def submit(self, worker, chunk):
            self.chunk = chunk

        def now(self):
            return self.clock

        def drop(self, worker, reason):
            raise AssertionError(reason)

        def wait(self):
            self.looks += 1
            # The second look takes 100 s, as when the process is stopped.
            self.clock += 100.0 if self.looks == 2 else 1.0
            return [Outcome("a", self.chunk, ["image"])] if self.looks in (1, 4) else []

    assert len(list(run_batch(Queue(split_into_chunks(batch_images(1, 2, 0), 1)), Pool(), 1.0))) == 2
