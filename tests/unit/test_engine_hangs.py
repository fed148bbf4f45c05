"""A GPU that hangs or fails must not stop the other workers of a batch, nor spoil images, nor swallow a cancel."""

import time
from contextlib import closing

import pytest
import torch
from pretend_card import HANG, pretend_cards
from stub_runs import CPU, Work, scaled, stub_workers

from sana_core.batch.pipeline import SamplingSettings, prepare
from sana_core.batch.plan import Workload, batch_images
from sana_core.engine import local
from sana_core.engine.local import generate_local

# 9 s while a worker loads, 3 s in its first chunk. Workers load one after another, until one is silent for 0.3 s.
LIMITS = scaled(0.005)
PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
FIRST, SECOND = "cuda:0", "cuda:1"


# --- real processes with the stub body ---


@pytest.fixture
def stub():
    """New processes for each test. A stopped one of an earlier test would be started again during this one."""
    with stub_workers() as workers:
        yield workers


def timed(work, workers):
    """Return the seconds of a run, and the number of images by worker."""
    began, running = time.monotonic(), work.run(workers, LIMITS)
    assert not work.check(list(running.images()))
    return time.monotonic() - began, dict(running.finished)


@pytest.mark.parametrize("kind", ["hang", "stop", "deaf"])
def test_a_worker_that_hangs_while_it_loads_does_not_stop_the_other(stub, kind):
    """deaf: it hangs and keeps Python's lock, as a call of a driver may."""
    with stub.processes.borrow([CPU] * 2) as workers:
        timed(Work({"revision": "warm"}), workers)
        births = [worker.birth for worker in workers]
        order = stub.order("load", kind)
        seconds, finished = timed(Work({"revision": kind}), workers)
        assert not order.exists() and len(finished) == 1, finished
        assert seconds < LIMITS.loading and [worker.birth for worker in workers] == births, "nobody waits for its end"
        # The next run replaces it as soon as it does not answer, and does not wait for it either.
        work = Work({"revision": kind, "step": 0.02}, count=60, chunk=1)
        seconds, finished = timed(work, workers)
        assert sum(worker.birth for worker in workers) == sum(births) + 1 and len(finished) == 2, finished


@pytest.mark.parametrize("kind", ["stop", "deaf"])
def test_a_worker_that_hangs_while_it_generates_does_not_delay_the_other(stub, kind):
    """The other one copies the chunks of the hanging one. The limits would end the hang only after 3 s."""
    with stub.processes.borrow([CPU] * 2) as workers:
        timed(Work({"revision": f"{kind} warm"}, count=8, chunk=1), workers)
        births = [worker.birth for worker in workers]
        order = stub.order("step", kind)
        seconds, finished = timed(Work({"revision": f"{kind} warm"}, count=8, chunk=1), workers)
        assert not order.exists() and [worker.birth for worker in workers] == births
        assert seconds < LIMITS.first


class Interrupt(BaseException):
    """ComfyUI's exception is a BaseException, too."""


class Flag:
    """ComfyUI's flag for Interrupt: the first look at it clears it."""

    def __init__(self):
        self.is_set, self.pressed_at = False, None

    def press(self):
        self.is_set, self.pressed_at = True, time.monotonic()

    def look(self):
        if self.is_set:
            self.is_set = False
            raise Interrupt


@pytest.mark.parametrize("images", [3, 6, 9, 14])
def test_an_interrupt_is_not_lost_while_a_worker_hangs_or_is_started_again(stub, images):
    """No process looks at the flag, so that none can clear it in the place of the loop."""
    flag, arrived = Flag(), 0
    work, limits = Work({"step": 0.03}, count=300, chunk=1), LIMITS._replace(first=0.3, grace=0.3)
    with stub.processes.borrow([CPU] * 2) as workers:
        # Both load.
        timed(Work({}, count=30, chunk=1), workers)
        order = stub.order("step", "stop")
        with pytest.raises(Interrupt), closing(work.run(workers, limits).images(flag.look)) as generated:
            for _ in generated:
                arrived += 1
                if arrived == images:
                    flag.press()
                assert arrived < images + 30, "30 more images after Interrupt"
        assert time.monotonic() - flag.pressed_at < 1 and not order.exists()


# --- pretended GPUs: threads in place of processes, the real body ---


def generate(checkpoint, devices, seconds=3.0, **images):
    """Return the images of a batch by number. A device may be silent for so many seconds."""
    settings = SamplingSettings(64, 64, steps=2)
    workload = Workload(PROMPTS, batch_images(2, images.get("count", 3), 7), 1)
    limits = scaled(1.0)._replace(starting=seconds, loading=seconds, first=seconds, grace=seconds)
    request = prepare(workload, checkpoint, settings, devices)
    return {image.number: pixels for image, pixels in generate_local(request, limits=limits)}


@pytest.fixture(scope="module")
def healthy(checkpoint):
    """The images of two GPUs that work, and the number of calls on the second one."""
    with pretend_cards(2) as cards:
        return generate(checkpoint, [FIRST, SECOND]), cards.calls[torch.device(SECOND)]


def check(images, expected):
    assert images.keys() == expected.keys()
    for number, pixels in images.items():
        # Chunks of other sizes, as after an error or in a copy, round differently.
        torch.testing.assert_close(pixels, expected[number], atol=1e-4, rtol=0, msg=f"image {number} is wrong")


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_a_gpu_that_hangs_does_not_block_the_empty_cache_of_another_process(checkpoint, healthy, monkeypatch, share):
    """The other GPU empties its cache when its memory runs out. In one process, that would wait for the hanging GPU."""
    # A process is not waited for.
    monkeypatch.setattr(local, "LIMITS", LIMITS._replace(ending=0.1))
    expected, calls = healthy
    with pretend_cards(2) as cards:
        cards.fail(SECOND, HANG, int(share * calls))
        cards.fail(FIRST, "memory", calls)
        check(generate(checkpoint, [FIRST, SECOND]), expected)
        assert cards.hung and not cards.failures


# The call of the failing kernel, as a share of the calls of a GPU, and how many calls later it is reported.
@pytest.mark.parametrize("share, late", [(0.01, 1), (0.1, 40), (0.3, 5), (0.5, 1000), (0.6, 1), (0.8, 1000)])
@pytest.mark.parametrize("device", [FIRST, pytest.param(SECOND, marks=pytest.mark.slow)])
def test_an_error_that_a_gpu_reports_late_spoils_no_image(checkpoint, healthy, device, share, late):
    """The results after the failing kernel are NaN. The GPU may have been the one that encoded the prompts."""
    expected, calls = healthy
    with pretend_cards(2) as cards:
        cards.fail(device, "driver", int(share * calls), late)
        check(generate(checkpoint, [FIRST, SECOND]), expected)
        # The other GPU may have generated all images before.
        assert cards.broken == {torch.device(device)} or cards.failures or cards.unreported
