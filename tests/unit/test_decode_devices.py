"""One image on several pretended GPUs, of which one fails: the image is right as long as one GPU works."""

import gc
import logging
import threading
import time

import pytest
import torch
from decoders import noise, relative
from layouts import f32c32
from pretend_card import HANG, pretend_cards

from sana_core.decode import decode_latents, devices
from sana_core.decode.plan import Planner
from sana_core.decode.stages import decoder_stages
from sana_core.runtime import device_team
from sana_core.runtime.accelerator import free_bytes, is_driver_error
from sana_core.runtime.cancellation import no_poll

pytestmark = pytest.mark.usefixtures("one_thread")
SIDE = 8, 5
KINDS = ("driver", "memory", "cublas", "no engine", "cudnn memory")


@pytest.fixture(autouse=True)
def narrow_bands(monkeypatch):
    """Bands of two rows, and no warning that these GPUs have no Triton."""
    monkeypatch.setattr(devices, "FEW_POSITIONS", 1)
    monkeypatch.setattr(logging.getLogger("sana_core.kernels.trial"), "disabled", True)


def small():
    """A decoder of few layers: two stages with attention, one without."""
    sizes = {
        "block_types": ("ResBlock", "EfficientViTBlock", "EfficientViTBlock"),
        "block_out_channels": (8, 32, 64),
        "layers_per_block": (1, 1, 1),
        "qkv_multiscales": ((), (5,), (5,)),
    }
    return f32c32(1, **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()})


def workers_of(autoencoder, names):
    return devices.Workers(autoencoder.decoder, list(map(torch.device, names)), free_bytes, [], None, no_poll)


class Setup:
    """`count` GPUs, a decoder on the first one, and the image and the calls of a decode without failures."""

    def __init__(self, cards, count):
        self.cards, self.names = cards, [f"cuda:{index}" for index in range(count)]
        self.autoencoder = small().to("cuda:0")
        self.latents = noise(1, 32, *SIDE)
        self.weights = cards.alive[torch.device("cuda:0")]
        self.copy = sum(weight.nbytes for weight in self.autoencoder.decoder.parameters())
        self.floor = Planner(decoder_stages(self.autoencoder), *SIDE, torch.float32, True).floor().peak_bytes
        self.expected = decode_latents(self.autoencoder, self.latents, devices=["cuda:0"])
        self.decode()
        cards.calls.clear()
        workers_of(self.autoencoder, self.names[:2])
        # Calls on the first GPU until there is another copy of the weights.
        self.copying = cards.calls[torch.device("cuda:0")]
        cards.calls.clear()
        assert relative(self.decode(), self.expected) <= 1e-5
        self.calls = {name: cards.calls[torch.device(name)] for name in self.names}

    def decode(self, report=None, **options):
        return decode_latents(self.autoencoder, self.latents, devices=self.names, report=report, **options)

    def check(self, name, kind, at):
        """Decode while call `at` on GPU `name` fails."""
        cards, threads, report = self.cards, threading.active_count(), {}
        cards.calls.clear(), cards.failures.clear(), cards.broken.clear()
        cards.fail(name, kind, at)
        lost_weights = kind == "driver" and name == "cuda:0" and at <= self.copying
        alone = len(self.names) == 1 and kind in ("driver", "cublas")
        if lost_weights or alone:
            with pytest.raises(RuntimeError) as raised:
                self.decode(report)
            assert is_driver_error(raised.value)
            del raised
        else:
            image = self.decode(report)
            assert relative(image, self.expected) <= 1e-5, report["events"]
            assert image.device.type == "cpu"
            assert report["events"] or cards.failures
        assert threading.active_count() == threads
        gc.collect()
        for other in self.names:
            assert cards.alive[torch.device(other)] == (self.weights if other == "cuda:0" else 0), report["events"]


def failures(setup, step):
    """Every `step`-th call on each GPU, with another kind of failure each time."""
    kinds = 0
    for name in setup.names:
        for at in range(1, setup.calls[name] + 1, step):
            yield name, KINDS[kinds % len(KINDS)], at
            kinds += 1


@pytest.mark.parametrize("count, step", [(1, 23), (2, 41), (4, 149)])
def test_a_failure_at_any_call_costs_no_image(count, step):
    with pretend_cards(count) as cards:
        setup = Setup(cards, count)
        for failure in failures(setup, step):
            setup.check(*failure)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count, step", [(1, 1), (2, 1), (4, 5)])
def test_a_failure_at_every_call_costs_no_image(count, step, kind):
    with pretend_cards(count) as cards:
        setup = Setup(cards, count)
        for name, _, at in failures(setup, step):
            setup.check(name, kind, at)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_while_one_gpu_computes_few_positions(kind, monkeypatch):
    """The image has few positions, so its first blocks run on the first GPU alone."""
    with pretend_cards(2) as cards:
        monkeypatch.setattr(f"{__name__}.SIDE", (3, 2))
        setup = Setup(cards, 2)
        for at in range(1, setup.calls["cuda:0"], 25):
            setup.check("cuda:0", kind, at)


def impatient(monkeypatch, seconds=2.0):
    limits = device_team.LIMITS._replace(first=seconds, grace=seconds, patience=0.0, ending=seconds)
    monkeypatch.setattr(device_team, "LIMITS", limits)


@pytest.mark.parametrize("name", ["cuda:0", "cuda:1"])
def test_a_gpu_that_hangs_is_left_out(name, monkeypatch):
    with pretend_cards(2) as cards:
        setup = Setup(cards, 2)
        impatient(monkeypatch)
        # In a global stage, and in the local stage.
        for at in (setup.copying + (setup.calls[name] - setup.copying) // 3, setup.calls[name] - 15):
            cards.released.clear(), cards.hung.clear()
            cards.fail(name, HANG, at)
            (event,) = events_of(setup)
            # The call may be a copy to the other GPU, which waits for both.
            assert event.endswith(" failed (TimeoutError), its rows went to the others")
            assert not cards.failures
            cards.release()


def test_a_gpu_that_hangs_while_it_gets_the_weights_is_left_out(monkeypatch):
    with pretend_cards(3) as cards:
        setup = Setup(cards, 3)
        impatient(monkeypatch)
        cards.fail("cuda:2", HANG, 5)
        assert events_of(setup) == ["cuda:2 was left out (TimeoutError)"]
        cards.release()


def test_cancel_ends_a_decode_while_a_gpu_hangs(monkeypatch):
    class Cancelled(BaseException):
        pass

    with pretend_cards(2) as cards:
        setup = Setup(cards, 2)
        impatient(monkeypatch)
        cards.fail("cuda:1", HANG, setup.calls["cuda:1"] // 2)
        begun = time.monotonic()

        def poll():
            if threading.current_thread() is threading.main_thread() and time.monotonic() > begun + 1:
                raise Cancelled

        with pytest.raises(Cancelled):
            setup.decode(poll=poll)
        assert time.monotonic() < begun + 20


def events_of(setup, **options):
    report = {}
    image = setup.decode(report, **options)
    assert relative(image, setup.expected) <= 1e-5
    return report["events"]


def test_the_others_use_their_memory_when_one_gpu_is_full():
    """The full GPU needs no copy of the decoder to be left out, and the others keep their large strips."""
    with pretend_cards(3) as cards:
        setup = Setup(cards, 3)
        report = {}
        setup.decode(report)
        plan = report["plan"]
        cards.limit("cuda:1", setup.copy // 2)
        setup.decode(report)
        assert report["events"] == ["cuda:1 was left out (no room for a copy of the decoder)"]
        assert report["plan"] == plan
        cards.limit("cuda:1", setup.copy + setup.floor // 2)
        setup.decode(report)
        (event,) = report["events"]
        assert event.startswith("cuda:1 was left out (0 MiB are free, ") and event.endswith(" MiB are needed)")
        assert report["plan"] == plan
        gc.collect()
        assert cards.alive[torch.device("cuda:1")] == 0


def test_a_full_first_gpu_leaves_the_image_to_the_others():
    with pretend_cards(2) as cards:
        setup = Setup(cards, 2)
        cards.limit("cuda:0", setup.weights + setup.floor // 2)
        (event,) = events_of(setup)
        assert event.startswith("cuda:0 was left out (0 MiB are free, ")


def test_a_gpu_whose_memory_runs_out_is_left_out_and_the_others_keep_their_strips(monkeypatch):
    monkeypatch.setattr(f"{__name__}.SIDE", (24, 24))
    with pretend_cards(3) as cards:
        setup = Setup(cards, 3)
        report = {}
        setup.decode(report, max_bytes=2**40)
        plan = report["plan"]
        cards.limit("cuda:1", setup.copy + 2 * setup.floor)
        image = setup.decode(report, max_bytes=2**40)
        assert relative(image, setup.expected) <= 1e-5
        assert report["events"] == ["cuda:1 failed (OutOfMemoryError), its rows went to the others"]
        assert report["plan"] == plan


def test_the_last_gpu_takes_smaller_strips_when_memory_runs_out_on_all(monkeypatch):
    monkeypatch.setattr(f"{__name__}.SIDE", (24, 24))
    with pretend_cards(2) as cards:
        setup = Setup(cards, 2)
        cards.limit("cuda:0", setup.weights + 2 * setup.floor)
        cards.limit("cuda:1", setup.copy + 2 * setup.floor)
        report = {}
        image = setup.decode(report, max_bytes=2**40)
        assert relative(image, setup.expected) <= 1e-5
        left_out, *smaller, last = report["events"]
        assert left_out.endswith(" failed (OutOfMemoryError), its rows went to the others")
        assert last == f"out of memory, continued with {report['plan']}" and len(smaller) < 5


def test_when_all_gpus_are_full_the_error_is_about_memory():
    with pretend_cards(2) as cards:
        setup = Setup(cards, 2)
        cards.limit("cuda:0", setup.weights + 2**12)
        cards.limit("cuda:1", setup.copy + 2**12)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            setup.decode()


def test_a_copy_of_the_decoder_takes_no_memory_on_the_first_gpu():
    with pretend_cards(3) as cards:
        setup = Setup(cards, 3)
        torch.cuda.reset_peak_memory_stats("cuda:0")
        workers = workers_of(setup.autoencoder, setup.names)
        assert cards.peak[torch.device("cuda:0")] == setup.weights
        assert cards.alive[torch.device("cuda:1")] == cards.alive[torch.device("cuda:2")] == setup.copy
        for worker in workers.living[1:]:
            for weight, original in zip(
                worker.decoder.parameters(), setup.autoencoder.decoder.parameters(), strict=True
            ):
                assert weight.device == worker.device and torch.equal(weight.cpu(), original.cpu())


def test_work_on_a_gpu_runs_while_it_is_the_current_one():
    """Triton launches its kernels on the current device."""
    with pretend_cards(3) as cards:
        setup = Setup(cards, 3)
        cards.elsewhere.clear()
        setup.decode()
        # Copies between two devices count for both of them.
        computed = {thread for thread, device in cards.elsewhere if thread == "MainThread" and device.index}
        assert not computed
