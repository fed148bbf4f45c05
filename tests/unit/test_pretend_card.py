"""The harness of pretended GPUs: distinct devices, a current device per thread, and injected failures."""

import copy
import threading
from pathlib import Path

import pytest
import torch
from pretend_card import ERRORS, pretend_cards
from worker_threads import PROCESS

from sana_core.checkpoints import load_transformer

TINY = Path(__file__).parents[1] / "models" / "sana-tiny"
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def cards():
    with pretend_cards(2) as cards:
        yield cards


def in_thread(work):
    """The result of `work` in a new thread, or the error that it raised."""
    results = []

    def run():
        try:
            results.append(work())
        except RuntimeError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def test_the_current_device_belongs_to_the_thread(cards):
    torch.accelerator.current_accelerator()
    torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 1 and torch.ones(1, device="cuda").device == SECOND
    assert torch.ones(1).cuda().device == SECOND and torch.ones(1).to(0).device == FIRST
    assert in_thread(lambda: torch.ones(1, device="cuda").device) == FIRST
    with torch.cuda.device("cuda:0"):
        assert torch.ones(1).to("cuda").device == FIRST
    assert torch.cuda.current_device() == 1


def test_a_driver_error_stays_and_other_gpus_work(cards):
    x = torch.ones(3, device="cuda:1")
    cards.fail("cuda:1", "driver", at=2)
    x = x + 1
    for call in (
        lambda: x + 1,
        lambda: x * 1,
        lambda: x.cpu(),
        lambda: torch.empty(1, device="cuda:1"),
        lambda: torch.cuda.synchronize(1),
        lambda: torch.cuda.mem_get_info(1),
        lambda: torch.cuda.set_device(1),
        torch.cuda.empty_cache,
    ):
        with pytest.raises(getattr(torch, "AcceleratorError", RuntimeError), match="CUDA error: an illegal memory"):
            call()
    assert x[1:].shape == (2,) and cards.alive[SECOND] == 12
    assert torch.equal((torch.ones(3, device="cuda:0") + 1).cpu(), torch.full((3,), 2.0))


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind != "driver"])
def test_other_errors_fail_one_call(cards, kind):
    x = torch.ones(3, device="cuda:1")
    cards.fail("cuda:1", kind, at=2)
    error, text = ERRORS[kind]
    y = x + 1
    with pytest.raises(error) as caught:
        y.cpu()
    assert str(caught.value) == text.format(index=1)
    assert torch.equal(y.cpu(), torch.full((3,), 2.0))


def test_a_result_becomes_nan(cards):
    cards.fail("cuda:1", "nan", at=2)
    assert (torch.ones(3, device="cuda:1") + 1).cpu().isnan().all()
    assert (torch.ones(3, device="cuda:0") + 1).cpu().isfinite().all()


def test_a_hanging_call_waits_for_release_and_other_gpus_work(cards):
    cards.fail("cuda:1", "hang")
    results = []
    thread = threading.Thread(target=lambda: results.append(torch.ones(3, device="cuda:1").cpu()))
    thread.start()
    assert torch.ones(3, device="cuda:0").sum().item() == 3
    thread.join(0.2)
    assert thread.is_alive() and not results
    cards.release()
    thread.join(10)
    assert torch.equal(results[0], torch.ones(3))


def test_a_late_error_is_raised_by_a_later_call_of_any_thread(cards):
    x = torch.ones(3, device="cuda:1")
    calls = cards.calls[SECOND]
    cards.fail("cuda:1", "driver", at=1, late=3)
    # The thread that launches the failing kernel ends without an error. Its results are NaN.
    y = in_thread(lambda: (x + 1) * 2)
    assert y.device == SECOND and cards.calls[SECOND] == calls + 2
    assert (y.to("cuda:0")).cpu().isnan().all(), "a copy to another GPU does not wait for the kernel"
    error = in_thread(lambda: torch.empty(1, device="cuda:1"))
    assert isinstance(error, RuntimeError) and "illegal memory" in str(error)
    with pytest.raises(RuntimeError, match="illegal memory"):
        x * 1
    assert torch.ones(3, device="cuda:0").sum().item() == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.sum().item(),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: torch.cuda.synchronize(1),
        lambda x: torch.cuda.empty_cache(),
    ],
)
def test_a_call_that_waits_for_the_device_raises_its_late_error(cards, call):
    x = torch.ones(3, device="cuda:1")
    cards.fail("cuda:1", "driver", late=1000)
    x = x + 1
    torch.cuda.synchronize(0)
    with pytest.raises(RuntimeError, match="illegal memory"):
        call(x)


def hang_on_second(cards, process=""):
    """Let a thread of `process` hang on the second GPU. Returns the thread."""

    def work():
        PROCESS.set(process)
        torch.ones(3, device="cuda:1")

    cards.fail("cuda:1", "hang")
    thread = threading.Thread(target=work)
    thread.start()
    while not cards.hung:
        thread.join(0.01)
    return thread


def finishes(work):
    """Whether `work` ends within 0.2 s in a new thread."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.2)
    return not thread.is_alive()


def test_a_hanging_gpu_blocks_empty_cache_of_every_thread(cards):
    hanging = hang_on_second(cards)
    blocked = threading.Thread(target=torch.cuda.empty_cache)
    blocked.start()
    assert finishes(lambda: torch.ones(3, device="cuda:0").sum().item()), "calls on the other GPU go on"
    assert finishes(lambda: torch.cuda.synchronize(0)) and not finishes(lambda: torch.cuda.synchronize(1))
    blocked.join(0.2)
    assert blocked.is_alive() and hanging.is_alive()
    cards.release()
    blocked.join(10)
    hanging.join(10)
    assert not blocked.is_alive() and not hanging.is_alive()


def test_a_hanging_gpu_of_another_process_does_not_block_empty_cache(cards):
    def in_other_process():
        PROCESS.set("cuda:0")
        torch.cuda.empty_cache()

    hang_on_second(cards, "cuda:1")
    assert finishes(torch.cuda.empty_cache) and finishes(in_other_process)
    cards.broken.add(SECOND)
    assert finishes(in_other_process), "it does not use the second GPU"


def test_weights_in_ram_are_counted_until_their_memory_is_freed(cards):
    layer = torch.nn.Linear(10, 20, bias=False)
    assert cards.weights_in_ram == cards.peak_in_ram == 800
    torch.zeros(1000)
    layer.to("cuda:0")
    assert cards.weights_in_ram == 0 and cards.alive[FIRST] == 800
    layer.to("cpu")
    view = layer.weight.detach()[:1]
    copied = copy.deepcopy(layer)
    assert cards.weights_in_ram == cards.peak_in_ram == 1600
    layer.weight.data = layer.weight.data.to("cuda:1")
    assert cards.weights_in_ram == 1600, "the view still has the memory"
    del view
    assert cards.weights_in_ram == 800
    layer.weight.data = torch.ones(20, 10)
    assert cards.weights_in_ram == 1600 and cards.peak_in_ram == 1600
    del layer, copied
    assert cards.weights_in_ram == 0
    torch.nn.Linear(10, 20, device="meta")
    assert cards.peak_in_ram == 1600


def test_a_model_that_is_loaded_on_two_gpus_is_never_whole_in_ram(cards):
    size = sum(weight.nbytes for weight in load_transformer(TINY).parameters())
    cards.peak_in_ram = cards.weights_in_ram
    assert cards.weights_in_ram == 0
    models = [load_transformer(TINY, device) for device in ("cuda:0", "cuda:1")]
    assert cards.peak_in_ram < size / 10 and cards.weights_in_ram == 0
    assert cards.alive[FIRST] >= size and cards.alive[SECOND] >= size
    del models
    both = [load_transformer(TINY) for _ in range(2)]
    assert len(both) == 2 and cards.peak_in_ram == cards.weights_in_ram == 2 * size
