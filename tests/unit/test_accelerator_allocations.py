"""An accelerator whose memory runs out, at one allocation after another or for good: without one, on fake tensors."""

import pytest
import torch
from allocations import numbers
from fake_accelerator import FIRST, Counter, fake_accelerators

from benchmarks import accelerator_counts as counts
from sana_core.decode.encode import encode_one
from sana_core.decode.oom import OomRetry
from sana_core.decode.stages import decoder_stages, encoder_stages
from sana_core.runtime.cancellation import no_poll
from sana_core.sampling.guidance import denoiser

pytest.importorskip("triton")
# Older versions need a driver for fake tensors on cuda.
pytest.importorskip("torch", "2.9")


class Card(Counter):
    """A card that has `room` bytes beyond weights and inputs, and none once, at the allocation number `wanted`."""

    def __init__(self, room=2**62, wanted=0):
        super().__init__({torch.int64: counts.TOKENS, torch.bool: False})
        self.room, self.wanted, self.allocations = room, wanted, 0

    def track(self, seen, counted=True):
        for tensor in seen:
            storage = tensor.untyped_storage()
            if counted and tensor.device.type != "cpu" and storage._cdata not in self.known:
                self.allocations += 1
                if self.allocations == self.wanted or self.alive[tensor.device] + storage.nbytes() > self.room:
                    raise torch.OutOfMemoryError("CUDA out of memory")
            super().track([tensor], counted)


def decode(pixels, card):
    """Decode a picture of SANA's real autoencoder on `card`; return how often the plan changed."""
    model = counts.autoencoder()
    stages = decoder_stages(model)
    planner, plan = counts.plan_for(stages, pixels, smallest=False)
    with fake_accelerators(), torch.no_grad():
        latents = torch.empty(1, 32, pixels // 32, pixels // 32, dtype=counts.DTYPE, device=FIRST)
    report, row = {"events": []}, 0
    with fake_accelerators(card), torch.no_grad():
        retry = OomRetry(planner, plan, report)
        boundary = retry.global_stage(model.decoder, stages, latents, no_poll)
        for top, part in retry.local_stage(model.decoder, stages, boundary, no_poll):
            assert top == row
            row += part.shape[2]
            del part
    assert row == pixels
    return len(report["events"])


def encode(pixels, card):
    model = counts.autoencoder()
    stages = encoder_stages(model)
    planner, plan = counts.plan_for(stages, pixels, smallest=False)
    with fake_accelerators(), torch.no_grad():
        like = torch.empty(1, dtype=counts.DTYPE, device=FIRST)
    image = torch.zeros(1, 3, pixels, pixels)
    with fake_accelerators(card), torch.no_grad():
        encode_one(model.encoder, stages, planner, plan, image, like, no_poll)


@pytest.mark.slow
@pytest.mark.parametrize("work", [decode, encode])
def test_one_allocation_that_fails_costs_no_picture_and_leaves_nothing(work):
    plain = Card()
    work(512, plain)
    assert plain.allocations > 250
    survived, tried = 0, numbers(plain.allocations, 6)
    for number in tried:
        card = Card(wanted=number)
        try:
            work(512, card)
            survived += 1
        except torch.OutOfMemoryError:
            pass
        assert card.alive[FIRST] == 0, number
    # An allocation before the first block cannot be retried.
    assert survived / len(tried) > 0.8, (survived, len(tried))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.4])
def test_a_decode_that_was_planned_for_more_memory_than_there_is_makes_do(share):
    planner, plan = counts.plan_for(decoder_stages(counts.autoencoder()), 1024, smallest=False)
    card = Card(room=max(share * plan.peak_bytes, 1.1 * planner.floor().peak_bytes))
    assert decode(1024, card) > 0
    assert card.peak[FIRST] <= card.room and card.alive[FIRST] == 0


def test_a_decode_below_the_smallest_plan_says_so_and_leaves_nothing():
    planner, _ = counts.plan_for(decoder_stages(counts.autoencoder()), 1024, smallest=False)
    card = Card(room=0.5 * planner.floor().peak_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        decode(1024, card)
    assert card.alive[FIRST] == 0


def test_a_step_without_memory_says_so_leaves_nothing_and_goes_well_the_next_time():
    with fake_accelerators(), torch.no_grad():
        model = counts.transformer("1.6B", 1024)
        prompt = torch.empty(1, counts.TOKENS, 2304, dtype=counts.DTYPE, device=FIRST), torch.ones(1, counts.TOKENS)
        x = torch.empty(1, 32, 32, 32, device=FIRST)
    plain = Card()
    with fake_accelerators(plain), torch.no_grad():
        denoiser(model, prompt, prompt, 4.5)(x, 0.5)
    assert plain.allocations > 200 and plain.alive[FIRST] == 0
    for number in numbers(plain.allocations, 6):
        card = Card(wanted=number)
        with fake_accelerators(card), torch.no_grad():
            with pytest.raises(torch.OutOfMemoryError):
                denoiser(model, prompt, prompt, 4.5)(x, 0.5)
            assert card.alive[FIRST] == 0, number
            assert denoiser(model, prompt, prompt, 4.5)(x, 0.5).shape == x.shape
