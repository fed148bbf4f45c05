"""How busy four GPUs are, in a simulation with the real loop, queue and plan of the text encoder."""

import pytest

from benchmarks.simulated_gpus import Costs, busy_share
from sana_core.batch import encoding


@pytest.mark.parametrize("seconds, images", [(0.1, 12_000), (0.3, 4000), (1.0, 2000), (5.0, 2000)])
@pytest.mark.parametrize("count", [1, 4])
def test_four_gpus_work_95_percent_of_the_time(seconds, images, count):
    assert busy_share(4, Costs(seconds), images, count) >= 0.95


@pytest.mark.parametrize("count, expected", [(1, 0.9), (4, 0.95)])
def test_gpus_without_room_for_the_encoder_beside_the_models_wait_little(count, expected):
    """One image per prompt in 0.1 s needs more than one GPU that encodes, and the others wait for the encoder."""
    assert busy_share(4, Costs(0.1), 12_000, count, room=False) >= expected


def test_two_writers_on_one_core_suffice_for_images_of_a_second():
    assert busy_share(4, Costs(1.0), 2000, writers=2, cores=1) >= 0.95


def test_a_slow_disk_slows_the_batch_down_and_bounds_memory():
    share = busy_share(4, Costs(0.1, png=0.4), 2000, writers=4)
    # 4 writers finish 10 images per second, 4 GPUs would generate 40.
    assert 0.2 <= share <= 0.35


def test_encoding_ahead_and_writer_threads_are_what_keeps_them_busy(monkeypatch):
    # As before: PNG files in the thread that hands out chunks, and one chunk per GPU.
    assert busy_share(4, Costs(0.1, png=0.19), 4000, writers=0, depth=1) < 0.2
    monkeypatch.setattr(encoding.EncodingPlan, "may_encode_ahead", lambda plan: False)
    assert busy_share(4, Costs(0.1), 12_000, 1) < 0.85
