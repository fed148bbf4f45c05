"""Errors that a GPU reports late: until then its results are garbage. Each image is right, or there is an error.

Each run has new faults at random calls. The garbage consists of finite numbers, so no check for NaN can find it.
"""

import copy
import random

import pytest
import torch
from decoders import noise, relative
from pretend_card import pretend_cards
from test_decode_devices import small
from test_split_faults import Machine

from sana_core.decode import decode_latents, devices
from sana_core.runtime.accelerator import is_driver_error
from sana_core.split.generate import Split

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 4


class Sampling:
    """A few steps of a sampler on the device of the latents, whose model is split."""

    def __init__(self, cards):
        self.cards, self.machine = cards, Machine(cards)
        self.load = self.machine.load
        self.expected, self.calls = self.sample("cpu")
        assert relative(self.sample("cuda:0")[0], self.expected) < 1e-5

    def sample(self, latents, parts=1):
        before, x = dict(self.cards.calls), self.machine.x.to(latents)
        split = Split(self.cards.devices)
        for _ in range(STEPS):
            x = x - 0.1 * split.run(x, self.machine.work, parts)
        image = x.cpu()
        return image, [self.cards.calls[device] - before.get(device, 0) for device in self.cards.devices]

    def run(self, chance):
        return self.sample(chance.choice(["cpu", "cuda:0"]), chance.choice([1, 2]))[0]


class Decoding:
    """A decode on all GPUs, with copies of the decoder on all but the first."""

    def __init__(self, cards):
        self.cards, self.original, self.latents = cards, small(), noise(1, 32, 8, 5)
        self.load()
        self.expected, before = self.run(None), dict(cards.calls)
        self.run(None)
        self.calls = [cards.calls[device] - before[device] for device in cards.devices]

    def load(self):
        self.autoencoder = copy.deepcopy(self.original).to("cuda:0")

    def run(self, chance):
        return decode_latents(self.autoencoder, self.latents, devices=self.cards.devices)


@pytest.fixture(autouse=True)
def narrow_bands(monkeypatch):
    monkeypatch.setattr(devices, "FEW_POSITIONS", 1)


def run_with_faults(cards, work, chance):
    """Run `work` while one or two GPUs fail late. Returns whether the image came. Raises AssertionError for garbage."""
    for state in (cards.broken, cards.failures, cards.delays, cards.unreported, cards.started):
        state.clear()
    # Nothing on a GPU survives a fault.
    work.load()
    cards.garbage = chance.uniform(-1, 1)
    for device in chance.sample(cards.devices, chance.choice([1, 1, 1, 2])):
        calls = work.calls[device.index]
        cards.fail(device, "driver", chance.randint(1, calls), late=chance.randint(1, max(2, calls // 3)))
    failure = None
    try:
        image = work.run(chance)
    except RuntimeError as error:
        failure = error
    assert len(cards.started) == sum(cards.started.values()) <= len(cards.devices), "one thread for each GPU"
    if failure is None:
        assert relative(image, work.expected) < 1e-4, "garbage"
    else:
        assert is_driver_error(failure), failure
    return failure is None


@pytest.mark.parametrize("runs", [8, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", [Sampling, Decoding])
def test_after_late_faults_there_is_a_right_image_or_an_error(kind, count, runs):
    with pretend_cards(count) as cards, torch.no_grad():
        work, images = kind(cards), 0
        for seed in range(runs):
            chance = random.Random(seed)
            try:
                images += run_with_faults(cards, work, chance)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
        # Most faults are of GPUs that the others can do without.
        assert images > runs // 3
