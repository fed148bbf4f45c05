"""The harness of pretended GPUs: distinct devices, a current device per thread, and injected failures."""

import copy
import threading
from pathlib import Path

import pytest
import torch
from pretend_card import ERRORS, computed_on, pretend_cards
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


def test_gpus_differ_in_memory_and_compute_capability():
    with pretend_cards(2, total=(1000, 2000), major=(8, 7)) as cards:
        assert torch.cuda.get_device_capability(1) == (7, 0)
        assert torch.cuda.get_device_properties("cuda:1").total_memory == 2000
        assert torch.cuda.is_bf16_supported()
        with torch.cuda.device(1):
            assert not torch.cuda.is_bf16_supported()
        x = torch.ones(300, device="cuda:1")
        assert torch.cuda.mem_get_info(1) == (800, 2000) and torch.cuda.mem_get_info(0) == (1000, 1000)
        with pytest.raises(torch.OutOfMemoryError, match="GPU 0"):
            x.to("cuda:0")
        cards.limit("cuda:1", 1300)
        with pytest.raises(torch.OutOfMemoryError, match="GPU 1"):
            x + 1
        cards.limit("cuda:1")
        assert (x[:100] + 1).device == SECOND
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:2")


def test_the_current_device_belongs_to_the_thread(cards):
    torch.accelerator.current_accelerator()
    torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 1 and torch.ones(1, device="cuda").device == SECOND
    assert torch.ones(1).cuda().device == SECOND and torch.ones(1).to(0).device == FIRST
    assert in_thread(lambda: torch.ones(1, device="cuda").device) == FIRST
    with torch.cuda.device("cuda:0"):
        assert torch.ones(1).to("cuda").device == FIRST
    assert torch.cuda.current_device() == 1


def test_calls_outside_of_the_current_device_are_counted(cards):
    def work():
        torch.ones(1, device="cuda:0")
        return torch.ones(1, device="cuda:1") + 1

    assert in_thread(work).device == SECOND
    assert [(device, count) for (_, device), count in cards.elsewhere.items()] == [(SECOND, 2)]


def test_views_and_attributes_are_no_calls(cards):
    x = torch.ones(2, 3, device="cuda:1")
    calls = cards.calls[SECOND]
    assert (
        x.view(6)[1:].unsqueeze(0).shape == (1, 5) and x.T.device == SECOND and x.size(0) == 2 and x.to("cuda:1") is x
    )
    assert cards.calls[SECOND] == calls
    x.to(torch.bfloat16)
    x.to("cuda:0")
    assert cards.calls == {SECOND: calls + 2, FIRST: 1}


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


def test_every_call_can_fail(cards):
    def work():
        return (torch.ones(3, device="cuda:1") * 2 + 1).sum().item()

    before = cards.calls[SECOND]
    assert work() == 9
    number = cards.calls[SECOND] - before
    assert number == 5
    for at in range(1, number + 1):
        cards.fail("cuda:1", "cublas", at)
        with pytest.raises(RuntimeError, match="CUBLAS_STATUS_EXECUTION_FAILED"):
            work()
    assert work() == 9


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


def test_tensors_know_which_gpus_computed_them(cards):
    x = torch.ones(2, device="cuda:0") + 1
    moved = x.to("cuda:1")
    assert computed_on(x) == computed_on(moved) == computed_on(moved.cpu()) == {FIRST}
    rows = torch.stack([moved.cpu(), (moved + 1).cpu()])
    assert computed_on(rows) == {FIRST, SECOND}
    out = torch.zeros(2)
    out[:1] = (moved + 1)[:1].cpu()
    assert computed_on(out) == {SECOND} and computed_on(torch.ones(2)) == frozenset()


def test_data_moves_a_tensor_to_another_device(cards):
    weight = torch.nn.Parameter(torch.ones(3))
    for device in ("cuda:1", "cuda:0", "cpu", "cuda:0"):
        weight.data = weight.data.to(device)
        assert weight.device == torch.device(device) and isinstance(weight, torch.nn.Parameter)
        assert cards.alive == {card: 12 * (str(card) == device) for card in cards.alive}
        assert torch.equal((weight + 1).cpu(), torch.full((3,), 2.0))
    weight.data = torch.zeros(2, device="cuda:0")
    assert weight.shape == (2,) and cards.alive[FIRST] == 8
    del weight
    assert not cards.alive[FIRST]


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


def test_only_errors_of_kernels_can_be_late(cards):
    with pytest.raises(ValueError, match="late: got 1 for 'memory'"):
        cards.fail("cuda:1", "memory", late=1)


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
