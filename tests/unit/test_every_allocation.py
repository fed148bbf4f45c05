"""Memory that runs out at any allocation of a decode or a batch: the images are right, or an error reports it."""

import pytest
import torch
from allocations import RunsOut, large_tensors, numbers
from decoders import noise, relative

from sana_core import decode_latents, encode_images
from sana_core.batch.pipeline import SamplingSettings, prepare
from sana_core.batch.plan import Workload, batch_images
from sana_core.decode.plan import Planner
from sana_core.decode.stages import decoder_stages, encoder_stages
from sana_core.engine.body import Body
from sana_core.engine.local import generate_local

pytestmark = pytest.mark.usefixtures("one_thread")


def attempt(work, wanted):
    """What `work` returns where its allocation of that number fails, or None where it raises."""
    try:
        with RunsOut(wanted) as memory:
            result = work()
    except torch.OutOfMemoryError:
        return None
    assert memory.count >= wanted
    return result


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["decode", "encode"])
def test_memory_that_runs_out_at_any_allocation_in_strips(bundled, direction):
    if direction == "decode":
        inputs, stages, run = noise(1, 32, 9, 7), decoder_stages(bundled), decode_latents
    else:
        inputs, stages, run = noise(1, 3, 288, 224), encoder_stages(bundled), encode_images
    # This budget allows strips that can still be halved.
    budget = Planner(stages, 9, 7, torch.float32, False).floor().peak_bytes * 4
    with RunsOut() as memory:
        expected = run(bundled, inputs, max_bytes=budget)
    before, survived, tried = large_tensors(), 0, numbers(memory.count, 12)
    for number in tried:
        got = attempt(lambda: run(bundled, inputs, max_bytes=budget), number)
        if got is not None:
            assert relative(got, expected) <= 1e-5, number
            survived += 1
        del got
        assert large_tensors() <= before, number
    assert memory.count > 300
    # An allocation before the first block cannot be retried.
    assert survived / len(tried) > 0.85, (survived, len(tried))


@pytest.mark.slow
def test_memory_that_runs_out_at_any_allocation_of_a_chunk_costs_no_picture(checkpoint, monkeypatch):
    real, expected_value = Body.generate, 0

    def draw(*arguments):
        nonlocal expected_value
        number, expected_value = expected_value, 0
        with RunsOut(number) as memory:
            real(*arguments)
        counts.append(memory.count)

    def run():
        settings = SamplingSettings(128, 128, steps=1)
        workload = Workload(["a red circle"], batch_images(1, 2, 0), chunk=2)
        drawn = generate_local(prepare(workload, checkpoint, settings, ["cpu"]))
        return {picture.number: pixels for picture, pixels in drawn}

    counts = []
    monkeypatch.setattr(Body, "generate", draw)
    expected = run()
    before, tried = large_tensors(), numbers(counts[0], 6)
    for expected_value in tried:  # noqa: B007
        got = run()
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[number], expected[number]) for number in got)
        del got
        assert large_tensors() <= before
    # After a failed sampling, two images are generated one by one. A decode recovers by itself.
    assert 1 + 2 * len(tried) > len(counts) > 1 + len(tried)
