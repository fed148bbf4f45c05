"""How busy several GPUs are, and how fast, in a simulation with the real loop."""

import logging
from dataclasses import replace

import pytest

from benchmarks.simulated_gpus import H100, Costs, simulate


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def of_image(seconds):
    """The costs of chunks of 8 images, each of which takes so many seconds of the GPU."""
    return Costs(8 * seconds / 20)


@pytest.mark.parametrize("seconds, images", [(0.1, 12_000), (0.3, 4000), (1.0, 2000), (5.0, 2000)])
@pytest.mark.parametrize("room", [True, False])
def test_four_gpus_work_95_percent_of_the_time(seconds, images, room):
    _, busy = simulate(4, of_image(seconds), images, room=room)
    assert busy >= 0.95


def test_four_gpus_with_a_prompt_for_each_fast_image_wait_for_the_one_that_encodes():
    _, busy = simulate(4, of_image(0.1), 12_000, count=1)
    assert busy >= 0.85


def test_a_second_chunk_in_the_inbox_keeps_a_gpu_busy_while_its_image_is_sent():
    costs = Costs(0.005, load_models=0.0, load_encoder=0.0)
    assert simulate(4, costs, 800, chunk=1)[1] >= 1.3 * simulate(4, costs, 800, chunk=1, depth=1)[1]


@pytest.mark.parametrize("name", ["0.6B, 512 px, 1 at once", "1.6B, 1024 px, 1 at once"])
def test_processes_scale_where_threads_share_the_lock(name):
    chunk, costs = H100[name]
    costs = replace(costs, load_models=0.0, load_encoder=0.0)
    one, _ = simulate(1, costs, 40, 40, chunk)
    for gpus in (2, 4, 8):
        threads, _ = simulate(gpus, costs, 40 * gpus, 40 * gpus, chunk, processes=False)
        processes, _ = simulate(gpus, costs, 40 * gpus, 40 * gpus, chunk)
        assert 0.5 <= threads / one <= 0.7
        assert processes / one >= 0.95 * gpus
