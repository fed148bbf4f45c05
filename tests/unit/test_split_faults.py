"""Members of a split that fail, on pretended GPUs: every run ends, with the image of one device if a GPU survives."""

import copy
import gc
import random
import time
from threading import enumerate as enumerate_threads

import pytest
import torch
from pretend_card import ERRORS, HANG, pretend_cards
from tiny import random_prompt, tiny_transformer

from sana_core.model.forward import prepare, shard_velocity, velocity
from sana_core.runtime import device_team
from sana_core.runtime.device_team import DeviceThreads
from sana_core.split.generate import Split

ROWS, COLUMNS = 9, 16
CPU = torch.device("cpu")


class Cancelled(BaseException):
    pass


class Machine:
    """A transformer on each pretended GPU, and the step that they share."""

    def __init__(self, cards):
        self.cards = cards
        self.transformer, self.prompt = tiny_transformer(), random_prompt(2)
        self.x, self.time = torch.randn(2, 32, ROWS, COLUMNS), torch.full((2,), 500.0)
        constants = prepare(self.transformer, *self.prompt, ROWS, COLUMNS)
        self.expected = velocity(self.transformer, self.x, self.time, constants)
        self.load()
        gc.collect()
        self.weights = dict(cards.alive)
        self.split = Split(cards.devices)

    def load(self):
        """Put the weights and the prompt on all GPUs."""
        self.models, self.constants = [], []
        for device in self.cards.devices:
            self.models.append(copy.deepcopy(self.transformer).to(device))
            self.constants.append(prepare(self.models[-1], *(part.to(device) for part in self.prompt), ROWS, COLUMNS))

    def work(self, shard):
        def forward(*arguments):
            return velocity(self.models[shard.member], *arguments)

        return shard_velocity(forward, shard, self.time, self.constants[shard.member], None, None, [])

    def run(self, latents=CPU, parts=1, **options):
        return self.split.run(self.x.to(latents), self.work, parts, **options)

    def check(self, image):
        assert (image.cpu() - self.expected).abs().max() <= 1e-5 * self.expected.abs().max()

    def check_memory(self):
        """Only weights and constants are left, also on GPUs that were left out."""
        assert all(self.cards.alive[device] <= size for device, size in self.weights.items())


@pytest.fixture(params=[2, 4])
def machine(request):
    with pretend_cards(request.param) as cards, torch.no_grad():
        yield Machine(cards)
        cards.release()


def impatient(monkeypatch, seconds=1.0):
    limits = device_team.LIMITS._replace(first=seconds, grace=seconds, patience=0.0, ending=seconds)
    monkeypatch.setattr(device_team, "LIMITS", limits)


def calls_of_a_step(machine):
    before = dict(machine.cards.calls)
    machine.check(machine.run())
    return min(machine.cards.calls[device] - before.get(device, 0) for device in machine.cards.devices)


@pytest.mark.parametrize("kind", ERRORS)
def test_any_error_of_a_gpu_leaves_the_image_to_the_others(machine, kind):
    machine.cards.fail(machine.cards.devices[-1], kind, at=calls_of_a_step(machine) // 2)
    machine.check(machine.run())
    # An error that is not the driver's may come in a copy between two GPUs, in the thread of the other one.
    assert len(machine.split.living) == len(machine.cards.devices) - 1
    assert kind != "driver" or machine.split.living == list(range(len(machine.cards.devices) - 1))
    machine.check_memory()


def test_only_the_broken_gpu_is_left_out_where_others_copy_from_it(machine, caplog):
    """A copy from a broken GPU raises that GPU's error in the thread of a healthy one."""
    count = calls_of_a_step(machine)
    for at in range(1, count, count // 4):
        machine.split = Split(machine.cards.devices)
        machine.cards.broken.clear()
        machine.cards.fail("cuda:1", "driver", at=at)
        machine.check(machine.run())
        assert machine.split.living == [member for member in range(len(machine.cards.devices)) if member != 1]


def test_a_failure_of_the_latents_gpu_ends_the_run_at_once(machine):
    machine.cards.fail("cuda:0", "driver", at=20)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        machine.run("cuda:0")
    assert 1 in machine.split.living


def test_all_gpus_may_fail_but_the_last(machine):
    for device in machine.cards.devices[1:]:
        machine.cards.fail(device, "cudnn memory", at=10)
    machine.check(machine.run())
    assert machine.split.living[0] == 0
    machine.split = Split(machine.cards.devices[:1])
    machine.cards.fail("cuda:0", "memory", at=10)
    with pytest.raises(torch.OutOfMemoryError):
        machine.run()


def test_a_gpu_that_hangs_is_left_out(machine, monkeypatch):
    impatient(monkeypatch)
    machine.cards.fail("cuda:1", HANG, at=30)
    machine.check(machine.run())
    assert 1 not in machine.split.living


@pytest.mark.parametrize("later", [False, True])
def test_memory_that_runs_out_beside_a_gpu_that_hangs_waits_for_nobody(machine, monkeypatch, later):
    """To empty a cache waits for all GPUs."""
    impatient(monkeypatch)
    last = machine.cards.devices[-1]
    machine.cards.fail("cuda:1", HANG, at=30)
    if later:
        machine.check(machine.run())
    machine.cards.fail(last if last.index > 1 else "cuda:0", "memory", at=20)
    if later and last.index == 1:
        with pytest.raises(torch.OutOfMemoryError):
            machine.run()
    else:
        machine.check(machine.run())
        assert 1 not in machine.split.living


def test_a_gpu_that_hangs_since_an_earlier_image_is_not_waited_for(machine, monkeypatch):
    impatient(monkeypatch)
    threads = DeviceThreads()
    machine.cards.started.clear()
    machine.split = Split(machine.cards.devices, threads=threads)
    machine.cards.fail("cuda:1", HANG, at=30)
    machine.check(machine.run())
    machine.split = Split(machine.cards.devices, threads=threads)
    assert 1 not in machine.split.living
    machine.check(machine.run())
    machine.cards.release()
    machine.cards.hung.clear()
    for _ in range(100):
        machine.split = Split(machine.cards.devices, threads=threads)
        time.sleep(0.02)
        if 1 in machine.split.living:
            break
    machine.check(machine.run())
    assert 1 in machine.split.living
    assert machine.cards.started == {f"sana image {device} #1": 1 for device in machine.cards.devices}


@pytest.mark.parametrize("parts", [1, 2])
def test_cancel_ends_a_step_while_a_gpu_hangs(machine, monkeypatch, parts):
    impatient(monkeypatch)
    machine.cards.fail("cuda:1", HANG, at=5)
    begun = time.monotonic()

    def poll():
        if time.monotonic() > begun + 0.3:
            raise Cancelled

    with pytest.raises(Cancelled):
        machine.run(parts=parts, poll=poll)
    assert time.monotonic() < begun + 10
    machine.cards.release()
    del machine.split
    for thread in enumerate_threads():
        if thread.name.startswith("sana image cuda"):
            thread.join(10)
            assert not thread.is_alive()


def test_a_gpu_that_cannot_be_made_current_keeps_nobody_waiting(machine):
    machine.cards.broken.add(torch.device("cuda", 1))
    machine.check(machine.run())
    assert 1 not in machine.split.living


@pytest.mark.parametrize("seed", range(8))
def test_random_failures_of_random_gpus(machine, seed):
    chance = random.Random(seed)
    count = calls_of_a_step(machine)
    devices = machine.cards.devices
    failing = chance.sample(devices, chance.randint(1, len(devices)))
    for device in failing:
        machine.cards.fail(device, chance.choice(list(ERRORS)), at=chance.randint(1, 2 * count))
    parts = chance.choice([1, 2])
    for _ in range(2):
        try:
            machine.check(machine.run(parts=parts))
        except RuntimeError:
            assert len(failing) == len(devices)
            break
    machine.check_memory()
