"""The queue and its loop, driven by a discrete simulation: nothing lost, nothing twice, nobody idle."""

import random
from dataclasses import replace

import pytest

from benchmarks.simulation import SimulatedPool
from sana_core.batch.loop import run_batch
from sana_core.batch.plan import ImageSpec, Workload, batch_images, default_chunk_size, split_into_chunks
from sana_core.batch.queue import ChunkLostError, Queue


def run(pool, pictures=100, chunk=4, grace=60.0):
    """Draw `pictures` and return the queue; all must arrive, each once."""
    queue = Queue(split_into_chunks(batch_images(1, pictures, 0), chunk))
    arrived = [picture for picture, _ in run_batch(queue, pool, grace)]
    assert sorted(picture.number for picture in arrived) == list(range(pictures))
    return queue


def mishaps(**shares):
    """A mishap of each kind in that share of the chunks."""

    def draw(source):
        value = source.random()
        for kind, share in shares.items():
            if value < share:
                return kind
            value -= share
        return None

    return draw


def test_picture_i_of_a_prompt_has_seed_plus_i():
    pictures = batch_images(2, 3, 2**64 - 2)
    assert [picture.number for picture in pictures] == list(range(6))
    assert [picture.prompt for picture in pictures] == [0, 0, 0, 1, 1, 1]
    assert [picture.seed for picture in pictures] == [2**64 - 2, 2**64 - 1, 0] * 2


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
def test_numbers_out_of_range_are_named(prompts, count, seed, message):
    with pytest.raises(ValueError, match=message):
        batch_images(prompts, count, seed)


def test_a_cut_leaves_out_what_is_done_and_keeps_the_rest_together():
    pictures = batch_images(1, 10, 0)
    workload = Workload([""], pictures, 4, frozenset({1, 4, 5, 6, 7}))
    sizes = [[picture.number for picture in chunk] for chunk in workload.split(64, 64, 1)]
    assert sizes == [[0, 2, 3], [8, 9]]
    with pytest.raises(ValueError, match="chunk: got 0"):
        split_into_chunks(pictures, 0)


def test_the_chunk_shrinks_with_the_picture_and_with_the_share_of_each_worker():
    assert [default_chunk_size(side, side, 1000, 1) for side in (128, 1024, 2048, 4096)] == [32, 8, 2, 1]
    assert default_chunk_size(1024, 1024, 12, 4) == 1
    assert default_chunk_size(1024, 1024, 1, 64) == 1


@pytest.mark.parametrize("workers, chunk, depth", [(1, 1, 1), (2, 4, 1), (3, 7, 2), (64, 4, 2)])
def test_every_picture_arrives_once_whatever_the_workers(workers, chunk, depth):
    queue = run(SimulatedPool([1.0] * workers, depth=depth, jitter=0.3), chunk=chunk)
    assert sum(queue.finished.values()) == 100


def test_a_slow_card_gets_fewer():
    pool = SimulatedPool([3.0, 1.0], depth=1)
    queue = run(pool, pictures=32, chunk=1)
    assert queue.finished == {"worker 0": 24, "worker 1": 8}
    assert pool.clock == pytest.approx(8.0)


def test_the_end_does_not_wait_for_the_slowest():
    # alone, the slow worker would hold its last chunk for 40 seconds
    pool = SimulatedPool([1.0, 0.1], depth=1)
    run(pool, pictures=40, chunk=4)
    assert pool.clock < 45


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_while_workers_die_hang_and_run_out_of_memory(seed):
    speeds = [random.Random(seed).uniform(0.3, 3) for _ in range(6)]
    fate = mishaps(dies=0.05, hangs=0.05, memory=0.1)
    pool = SimulatedPool(speeds, seed, delay=0.1, jitter=0.4, restart=20, mishap=fate)
    run(pool, pictures=200, grace=10.0)
    assert len({kind for _, kind in pool.mishaps}) >= 2


def test_a_worker_that_hangs_alone_is_replaced():
    fates = iter([None, "hangs"])
    pool = SimulatedPool([1.0], depth=1, restart=5, mishap=lambda source: next(fates, None))
    run(pool, pictures=12, grace=10.0)
    assert pool.names == {"worker 0": "worker 0, 1"}


def test_a_worker_that_hangs_at_its_first_chunk_is_noticed_too():
    fates = iter(["hangs"])
    pool = SimulatedPool([1.0], depth=1, restart=5, mishap=lambda source: next(fates, None))
    run(pool, pictures=12, grace=10.0)


def test_memory_that_runs_out_halves_the_chunks_of_that_worker_alone():
    fates = iter(["memory", None])
    pool = SimulatedPool([1.0, 1.0], depth=1, mishap=lambda source: next(fates, None))
    queue = run(pool, pictures=64, chunk=8)
    assert queue.limits == {"worker 0": 4}


def test_a_worker_without_memory_for_one_picture_is_given_up():
    pool = SimulatedPool([1.0], depth=1, mishap=lambda source: "memory")
    dropped = []

    def drop(worker, reason):
        dropped.append(worker)
        raise reason

    pool.drop = drop
    with pytest.raises(MemoryError):
        run(pool, pictures=8)
    assert dropped == ["worker 0"]


def test_an_error_of_a_worker_is_raised():
    class Faulty(SimulatedPool):
        def wait(self):
            return [replace(outcome, error=ValueError("bad")) for outcome in super().wait()]

    with pytest.raises(ValueError, match="bad"):
        run(Faulty([1.0]))


def test_a_copy_that_arrives_second_counts_for_nothing():
    chunk = (ImageSpec(0, 0, 0), ImageSpec(1, 0, 1))
    queue = Queue([chunk, (ImageSpec(2, 0, 2),)])
    assert queue.next_chunk("fast", 0.0) == chunk and queue.next_chunk("slow", 0.0) == (ImageSpec(2, 0, 2),)
    assert queue.finish("fast", chunk, 1.0) == list(chunk)
    assert queue.next_chunk("fast", 1.0) is None
    # half a second a picture is the usual pace; the slow one is 9.5 s late
    assert queue.next_chunk("fast", 10.0) == (ImageSpec(2, 0, 2),)
    assert len(queue.finish("fast", (ImageSpec(2, 0, 2),), 10.5)) == 1
    assert queue.finish("slow", (ImageSpec(2, 0, 2),), 11.0) == []
    assert not queue.missing


def test_sixty_four_workers_are_busy_to_the_end():
    speeds = [random.Random(1).choice([0.5, 1.0, 1.0, 2.0]) for _ in range(64)]
    fate = mishaps(dies=0.002, hangs=0.0005, memory=0.002)
    pool = SimulatedPool(speeds, 3, delay=0.05, jitter=0.1, restart=60, mishap=fate)
    run(pool, pictures=10_000)
    assert 10_000 / pool.capacity() >= 0.95


def late_queue():
    """A queue whose only open chunk lies with "slow", which is late; "fast" and "third" have nothing to do."""
    chunk = (ImageSpec(2, 0, 2), ImageSpec(3, 0, 3))
    queue = Queue([(ImageSpec(0, 0, 0),), (ImageSpec(1, 0, 1),), chunk])
    for worker in ("fast", "third"):
        queue.finish(worker, queue.next_chunk(worker, 0.0), 1.0)
    assert queue.next_chunk("slow", 1.0) == chunk
    return queue, chunk


def test_a_chunk_is_copied_once_and_no_more():
    queue, chunk = late_queue()
    assert queue.next_chunk("fast", 20.0) == chunk
    assert queue.next_chunk("third", 20.0) is None


def test_no_worker_gets_a_copy_that_it_has_no_memory_for():
    queue, chunk = late_queue()
    queue.limits["fast"] = 1
    assert queue.next_chunk("fast", 20.0) is None
    assert queue.next_chunk("third", 20.0) == chunk


def test_a_picture_that_was_drawn_forgives_earlier_lack_of_memory():
    queue = Queue([(picture,) for picture in batch_images(1, 8, 0)])
    useful = []
    for failures in (3, 3):
        for _ in range(failures):
            useful.append(queue.halve("gpu", queue.next_chunk("gpu", 0.0), 1.0))
        queue.finish("gpu", queue.next_chunk("gpu", 1.0), 2.0)
    assert all(useful)
    assert [queue.halve("gpu", queue.next_chunk("gpu", 2.0), 3.0) for _ in range(4)] == [True, True, True, False]


def test_a_limit_never_rises():
    pictures = batch_images(1, 10, 0)
    queue = Queue([tuple(pictures[:2]), tuple(pictures[2:])])
    small, large = queue.next_chunk("gpu", 0.0), queue.next_chunk("gpu", 0.0)
    queue.halve("gpu", small, 1.0)
    queue.halve("gpu", large, 2.0)
    assert queue.limits["gpu"] == 1


def test_what_was_taken_from_a_worker_says_nothing_of_its_pace():
    """A worker that was thought to hang and comes back after all: its pictures count, its time does not."""
    chunk = (ImageSpec(0, 0, 0), ImageSpec(1, 0, 1))
    queue = Queue([chunk])
    assert queue.next_chunk("gpu", 0.0) == chunk
    queue.requeue("gpu")
    assert queue.complete("gpu", chunk, 100.0) is None
    assert queue.finish("gpu", chunk, 100.0) == list(chunk)
    assert not queue.pace and not queue.missing
    # nobody draws them again
    assert queue.next_chunk("other", 100.0) is None


def test_the_pace_is_of_one_picture_and_follows_the_last_chunks():
    pictures = batch_images(1, 8, 0)
    queue = Queue([tuple(pictures[:4]), tuple(pictures[4:])])
    for start, end, pace in ((0.0, 8.0, 2.0), (10.0, 14.0, 1.5)):
        queue.finish("gpu", queue.next_chunk("gpu", start), end)
        assert queue.pace["gpu"] == pace
    assert queue.finished["gpu"] == 8


def test_the_clock_of_a_chunk_that_waits_starts_when_the_one_before_it_is_done():
    first, second = (ImageSpec(0, 0, 0),), (ImageSpec(1, 0, 1),)
    queue = Queue([first, second])
    assert [queue.next_chunk("gpu", 0.0), queue.next_chunk("gpu", 0.0)] == [first, second]
    assert queue.pending("gpu") == 2
    queue.finish("gpu", first, 3.0)
    assert queue.complete("gpu", second, 5.0) == 2.0
    assert queue.pending("gpu") == 0


def test_a_chunk_hangs_after_ten_times_the_slowest_pace_and_at_least_the_grace():
    chunk = (ImageSpec(0, 0, 0), ImageSpec(1, 0, 1))
    queue = Queue([chunk, (ImageSpec(2, 0, 2), ImageSpec(3, 0, 3))])
    queue.next_chunk("gpu", 0.0)
    # nothing is known: 30 times the grace
    assert queue.hanging(30 * 2.0, 2.0) == [] and queue.hanging(30 * 2.0 + 0.1, 2.0) == ["gpu"]
    queue.finish("gpu", chunk, 4.0)
    queue.next_chunk("gpu", 4.0)
    # 2 s a picture, two pictures: 40 s
    assert queue.hanging(44.0, 2.0) == [] and queue.hanging(44.1, 2.0) == ["gpu"]
    assert queue.hanging(44.1, 50.0) == []


def test_a_chunk_of_one_worker_that_dies_waits_for_the_next_in_its_old_place():
    chunks = [(picture,) for picture in batch_images(1, 4, 0)]
    queue = Queue(chunks)
    assert [queue.next_chunk("gpu", 0.0) for _ in range(2)] == chunks[:2]
    queue.requeue("gpu")
    assert [queue.next_chunk("other", 1.0) for _ in range(4)] == chunks


def test_halves_come_next_and_in_their_order():
    pictures = tuple(batch_images(1, 5, 0))
    queue = Queue([pictures, tuple(batch_images(2, 5, 0)[5:])])
    assert queue.halve("gpu", queue.next_chunk("gpu", 0.0), 1.0)
    assert queue.next_chunk("large", 1.0) == pictures[:2] and queue.next_chunk("large", 1.0) == pictures[2:]
    # the small one takes two at a time from now on
    assert len(queue.next_chunk("gpu", 1.0)) == 2


def test_a_chunk_takes_down_five_workers_and_no_sixth():
    chunk = tuple(batch_images(1, 2, 0))
    queue = Queue([chunk])
    for worker in range(4):
        assert queue.next_chunk(f"gpu {worker}", 0.0) == chunk
        queue.requeue(f"gpu {worker}")
    assert queue.next_chunk("gpu 4", 0.0) == chunk
    with pytest.raises(ChunkLostError, match="image 0 and 1 more were lost with it 5 times"):
        queue.requeue("gpu 4")


def test_a_copy_goes_where_it_comes_sooner_than_where_it_is():
    """At the end a chunk that will come in time stays where it is, and of two late ones the later is copied."""
    pictures = batch_images(1, 6, 0)
    queue = Queue([(picture,) for picture in pictures])
    for worker, seconds in (("fast", 1.0), ("slow", 4.0), ("slower", 6.0)):
        queue.finish(worker, queue.next_chunk(worker, 0.0), seconds)
    late, later = queue.next_chunk("slow", 10.0), queue.next_chunk("slower", 10.0)
    queue.finish("fast", queue.next_chunk("fast", 10.0), 11.0)
    # 3 and 5 seconds are left, and the fast one needs 1
    assert queue.next_chunk("fast", 11.0) == later
    queue.finish("fast", later, 12.0)
    assert queue.next_chunk("fast", 13.5) is None, "0.5 s are left of the other"
    assert queue.next_chunk("fast", 12.0) == late


def test_a_copy_takes_as_long_as_all_its_pictures():
    """Four pictures of 3 s come no sooner from another worker than in the 10 s that are left of them."""
    pictures = batch_images(1, 6, 0)
    queue = Queue([(pictures[0],), (pictures[1],), tuple(pictures[2:])])
    for worker in ("fast", "slow"):
        queue.finish(worker, queue.next_chunk(worker, 0.0), 3.0)
    assert queue.next_chunk("slow", 10.0) == tuple(pictures[2:])
    assert queue.next_chunk("fast", 12.0) is None
    assert queue.next_chunk("fast", 40.0) == tuple(pictures[2:])
