"""The fleet of a batch on a cluster in virtual time: stalls of the driver, broken GPUs, GPUs that are too small."""

import math
import random
import re
from collections import Counter

import pytest
from fake_ray import A, B, C, D, FakeRay, generate, works

from sana_core.batch.plan import FailedImage
from sana_core.cluster.connection import ACTOR_TIMEOUT
from sana_core.cluster.session import ActorCache
from sana_core.errors import ClusterError

FOUR = {A: 2, B: 2}


def finish(cluster, images, **options):
    """Generate a batch, and return the result of each image by number. Each image must arrive once."""
    results = {}
    for image, result in generate(cluster, images, **options):
        assert image.number not in results
        results[image.number] = result
    assert sorted(results) == list(range(images))
    return results


def failing(places, end, method="generate", seconds=1.0):
    """Return a behaviour: calls of `method` end with `end` on these places, and all others succeed."""
    good = works()

    def behaviour(handle, called, arguments):
        return (seconds, end) if called == method and handle.place in places else good(handle, called, arguments)

    return behaviour


# Stalls


def test_no_actor_is_lost_when_the_consumer_stalls(monkeypatch):
    cluster = FakeRay(FOUR, works()).install(monkeypatch)
    for image, _ in generate(cluster, 60):
        if image.number % 20 == 10:
            cluster.advance(300)
    assert len(cluster.loaded) == 4


def test_no_actor_is_lost_when_the_driver_is_stopped(monkeypatch):
    """After a stop the answers are still in the sockets, so that the first looks find nothing."""
    cluster = FakeRay(FOUR, works(seconds=20)).install(monkeypatch)
    arrived = 0
    for moment in (40.0, 43.5, 200.0):

        def stop():
            cluster.now += 300
            cluster.deaf = 3

        cluster.events.append((moment, stop))
    for _ in generate(cluster, 40):
        arrived += 1
    assert arrived == 40 and not cluster.events and len(cluster.loaded) == 4


def test_no_actor_is_lost_by_a_driver_that_looks_every_forty_seconds(monkeypatch):
    cluster = FakeRay(FOUR, works(seconds=15)).install(monkeypatch)
    for _ in generate(cluster, 40):
        cluster.advance(40)
    assert len(cluster.loaded) == 4


def test_a_long_load_that_answers_no_ping_costs_no_actor_when_it_ends(monkeypatch):
    """A process may hold Python's lock while it loads. Its last ping is old when it is ready."""
    good = works()

    def behaviour(handle, method, arguments):
        if method == "load":
            handle.on_answer = None
            handle.answer.remote = lambda: handle.reference(max(handle.free, cluster.now) + 4, (0, 0, "alive"))
            return 200.0, ("", 32)
        return good(handle, method, arguments)

    cluster = FakeRay(FOUR, behaviour).install(monkeypatch)
    finish(cluster, 40)
    assert len(cluster.loaded) == 4


def test_a_slow_network_is_no_hang(monkeypatch):
    """A chunk takes a second, and its images arrive later than a worker may be silent."""
    cluster = FakeRay(FOUR, works()).install(monkeypatch)
    cluster.transit = 70.0
    finish(cluster, 40)
    assert len(cluster.loaded) == 4


def test_an_autoscaler_sees_from_the_start_what_is_missing(monkeypatch):
    cluster, requested = FakeRay({}, works()).install(monkeypatch), []

    def join():
        requested.append(len(cluster.started))
        cluster.machines[A] = 1
        cluster.place_actors()

    cluster.events.append((0.5, join))
    finish(cluster, 40)
    assert requested == [8]


def test_an_actor_that_stops_is_found_after_half_a_minute(monkeypatch):
    good = works()

    def behaviour(handle, method, arguments):
        return (0, "stops") if method == "generate" and handle.number == 1 else good(handle, method, arguments)

    cluster = FakeRay({A: 1}, behaviour).install(monkeypatch)
    finish(cluster, 6)
    assert ACTOR_TIMEOUT < cluster.now < 2.5 * ACTOR_TIMEOUT


def test_an_actor_that_stops_is_found_although_the_consumer_is_slow(monkeypatch):
    good, calls = works(), []

    def behaviour(handle, method, arguments):
        if method == "generate" and handle.place == (B, "0"):
            calls.append(handle)
            if len(calls) == 3:
                return 0, "stops"
        return good(handle, method, arguments)

    cluster = FakeRay({A: 1, B: 1}, behaviour).install(monkeypatch)
    for _ in generate(cluster, 200):
        cluster.advance(2)
    assert calls[2].dead


def test_an_actor_that_hangs_since_the_last_run_is_replaced(monkeypatch):
    """Another actor has finished its last chunk as a copy. Pings are answered all the time."""
    good, cache = works(), ActorCache()

    def behaviour(handle, method, arguments):
        hangs = method == "generate" and arguments[0][0][0] >= 36 and handle.place == (A, "0")
        return (0, "hangs") if hangs else good(handle, method, arguments)

    cluster = FakeRay({A: 1, B: 1}, behaviour).install(monkeypatch)
    finish(cluster, 40, cache=cache)
    assert len(cache.workers) == 2 and any(handle.free == math.inf for handle in cluster.loaded)
    cluster.remove(B)
    finish(cluster, 10, cache=cache)


@pytest.mark.parametrize("moment", range(3, 15))
def test_a_machine_that_leaves_while_another_joins_costs_no_image(monkeypatch, moment):
    cluster = FakeRay(FOUR, works(loading=30)).install(monkeypatch)

    def change():
        cluster.remove(A)
        cluster.machines[C] = 1
        cluster.place_actors()

    cluster.events.append((moment, change))
    finish(cluster, 40)


def test_actors_share_the_cores_and_may_load_longer_than_the_wait_for_a_gpu(monkeypatch):
    cluster = FakeRay({A: 2}, works(loading=50)).install(monkeypatch)
    finish(cluster, 10, wait=20)
    assert cluster.threads == [4, 4]


# Broken GPUs


@pytest.mark.parametrize(
    "method, kind, tries", [("load", "driver", 5), ("generate", "driver", 5), ("load", "error", 1)]
)
def test_a_broken_gpu_does_not_cost_the_other_gpus_of_its_machine(monkeypatch, method, kind, tries):
    broken = (A, "0")
    cluster = FakeRay({A: 4}, failing([broken], (kind, "it broke"), method)).install(monkeypatch)
    results = finish(cluster, 400)
    assert set(Counter(place for _, place in results.values())) == {(A, gpu) for gpu in "123"}
    # Its actors are replaced some times, and not for as long as the batch lasts.
    assert sum(handle.place == broken for handle in cluster.loaded) == tries


def test_a_gpu_whose_work_always_fails_gets_few_chunks(monkeypatch):
    """It fails faster than the others generate."""
    broken, good, calls = (A, "0"), works(), []

    def behaviour(handle, method, arguments):
        if method == "generate" and handle.place == broken:
            calls.append(arguments)
            return 0.5, ("error", "it broke")
        return good(handle, method, arguments)

    cluster = FakeRay({A: 4}, behaviour).install(monkeypatch)
    results = finish(cluster, 400)
    assert {place for _, place in results.values()} == {(A, gpu) for gpu in "123"} and len(calls) <= 4


def test_a_driver_error_costs_only_its_actor(monkeypatch):
    good, failed = works(), []

    def behaviour(handle, method, arguments):
        if method == "generate" and handle.number == 1 and not failed:
            failed.append(handle)
            return 1.0, ("driver", "CUDA error: an illegal memory access was encountered")
        return good(handle, method, arguments)

    cluster = FakeRay({A: 1}, behaviour).install(monkeypatch)
    finish(cluster, 20)
    assert failed[0].dead and len(cluster.loaded) == 2


def test_an_unknown_error_of_one_gpu_costs_no_machine(monkeypatch):
    """The chunk succeeds elsewhere, and so does its actor's next one."""
    good, failed = works(), []

    def behaviour(handle, method, arguments):
        if method == "generate" and handle.place == (B, "0") and len(failed) < 1:
            failed.append(handle)
            return 1.0, ("error", "unexpected EOF")
        return good(handle, method, arguments)

    cluster = FakeRay({A: 1, B: 1}, behaviour).install(monkeypatch)
    results = finish(cluster, 60)
    assert len(failed) == 1 and (B, "0") in {place for _, place in results.values()}


def test_an_image_that_fails_on_two_machines_fails_alone(monkeypatch):
    good = works()

    def behaviour(handle, method, arguments):
        broken = method == "generate" and arguments[0][0][0] == 7
        return (1.0, ("error", "shape mismatch")) if broken else good(handle, method, arguments)

    cluster = FakeRay({A: 1, B: 1}, behaviour).install(monkeypatch)
    results = finish(cluster, 20)
    assert [number for number, result in results.items() if isinstance(result, FailedImage)] == [7]
    assert "shape mismatch" in results[7].reason and len(cluster.loaded) == 2


def test_an_error_of_the_work_ends_the_run_of_a_single_gpu(monkeypatch):
    cluster = FakeRay({A: 1}, failing([(A, "0")], ("error", "shape mismatch"))).install(monkeypatch)
    with pytest.raises(ClusterError, match=r"^host \(aaaaaa, actor 1\): shape mismatch$"):
        finish(cluster, 20)


@pytest.mark.parametrize("method", ["load", "generate"])
def test_a_machine_without_a_file_is_left_out_at_once(monkeypatch, caplog, method):
    places = [(B, "0"), (B, "1")]
    cluster = FakeRay(FOUR, failing(places, ("refused", "sana: no such file"), method)).install(monkeypatch)
    results = finish(cluster, 60)
    assert {place[0] for _, place in results.values()} == {A}
    assert re.search(r"host \(bbbbbb, actor \d\) cannot work: sana: no such file", caplog.text)
    assert sum(handle.place in places for handle in cluster.loaded) == 2


# GPUs that are too small


@pytest.mark.parametrize("machines", [{A: 1}, {A: 2}, FOUR])
@pytest.mark.parametrize("images", [1, 2, 8, 40])
def test_gpus_too_small_for_one_image_end_the_run(monkeypatch, machines, images):
    places = [(machine, str(gpu)) for machine, gpus in machines.items() for gpu in range(gpus)]
    cluster = FakeRay(machines, failing(places, ("memory", "CUDA out of memory"))).install(monkeypatch)
    expected = (
        r"^host \(\w{6}, actor \d\): memory runs out for a single image of 4096 x 2048 pixels \(CUDA out of memory\); "
        "choose smaller images, dtype bfloat16, fewer processes on each GPU, or GPUs with more memory$"
    )
    with pytest.raises(ClusterError, match=expected):
        finish(cluster, images)
    assert len(cluster.loaded) == len(places)


def test_gpus_too_small_for_the_model_end_the_run(monkeypatch):
    places = [(machine, gpu) for machine in FOUR for gpu in "01"]
    cluster = FakeRay(FOUR, failing(places, ("memory", "CUDA out of memory"), "load")).install(monkeypatch)
    with pytest.raises(ClusterError, match=r"memory runs out while the model loads \(CUDA out of memory\); choose"):
        finish(cluster, 8)
    assert len(cluster.loaded) == 4


def test_a_replacement_that_cannot_load_ends_the_run(monkeypatch):
    """Another program has taken the memory of the only GPU after its actor had died."""
    good, calls = works(), Counter()

    def behaviour(handle, method, arguments):
        calls[method] += 1
        if method == "load" and calls["load"] > 1:
            return 1.0, ("memory", "CUDA out of memory")
        return (1.0, "dies") if calls["generate"] == 5 else good(handle, method, arguments)

    cluster = FakeRay({A: 1}, behaviour).install(monkeypatch)
    with pytest.raises(ClusterError, match=r"^host \(aaaaaa, actor 2\): memory runs out while the model loads"):
        finish(cluster, 20)


def test_a_larger_gpu_generates_all_images_even_if_its_own_actor_dies(monkeypatch):
    """Ray would start the replacement on the small GPU, which is free."""
    small, good, calls = (A, "0"), works(), Counter()

    def behaviour(handle, method, arguments):
        if method == "generate" and handle.place == small:
            return 1.0, ("memory", "CUDA out of memory")
        calls[method] += 1
        return (1.0, "dies") if method == "generate" and calls[method] % 20 == 0 else good(handle, method, arguments)

    cluster = FakeRay({A: 2}, behaviour).install(monkeypatch)
    results = finish(cluster, 100)
    assert {place for _, place in results.values()} == {(A, "1")}


# All at once


@pytest.mark.parametrize("seed", range(40))
def test_every_image_arrives_once_whatever_fails(monkeypatch, seed):
    """Failures of each kind at each call, stalls, and machines that leave and join. One GPU never fails."""
    chance = random.Random(seed)
    good = works(seconds=chance.choice([0.2, 3.0, 40.0]))
    ends = ["dies", "stops", "hangs", ("driver", "CUDA error"), ("memory", "out of memory")]
    share, broken = chance.choice([0.02, 0.1, 0.2]), (B, "0")

    def behaviour(handle, method, arguments):
        if handle.place == broken:
            return 1.0, chance.choice([*ends, ("error", "unknown")])
        if handle.place != (A, "0") and chance.random() < share:
            return chance.random(), chance.choice([end for end in ends if method == "generate" or end != "hangs"])
        return good(handle, method, arguments)

    cluster = FakeRay({A: 2, B: 1, C: 2}, behaviour).install(monkeypatch)
    cluster.events.append((chance.uniform(0, 60), lambda: cluster.remove(C)))
    arrived = []
    for image, _ in generate(cluster, 60, chunk=2, grace=10.0):
        arrived.append(image.number)
        if chance.random() < 0.05:
            cluster.advance(chance.uniform(0, 100))
        if len(arrived) == 30:
            cluster.machines[D] = 1
            cluster.place_actors()
    assert sorted(arrived) == list(range(60))
