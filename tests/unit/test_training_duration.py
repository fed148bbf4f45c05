"""The operations of a step that are predicted are those that torch counts in the trainer's own."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import train_memory
from benchmarks.train_memory import CONTROLNET, FULL, count_step, make_settings
from sana_core.model.known_models import Architecture
from sana_core.training import plan, states
from sana_core.training.plan import released_base, step_operations
from sana_core.training.settings import Method
from sana_core.training.states import Eta

MODEL = Architecture(2240, 8)


def convolution_backward(gradient, inner, weight, bias, stride, padding, dilation, transposed, _, groups, mask, **_out):
    """Operations as torch counts them, but with the gradient of a depthwise weight counted as depthwise."""
    return 2 * gradient[0] * math.prod(gradient[2:]) * math.prod(weight) * sum(mask[:2])


OWN = {torch.ops.aten.convolution_backward: convolution_backward}


@pytest.mark.parametrize(
    "own",
    [
        pytest.param({"method": Method(rank=16)}, marks=pytest.mark.slow),
        {"method": Method(rank=16, targets="both"), "checkpoint": False, "batch": 2},
        pytest.param({"method": FULL, "accumulate": 2}, marks=pytest.mark.slow),
        pytest.param({"method": FULL, "checkpoint": False}, marks=pytest.mark.slow),
        pytest.param({"method": CONTROLNET}, marks=pytest.mark.slow),
    ],
)
def test_operations_are_those_that_torch_counts(own, monkeypatch):
    settings, take_step = make_settings(**own), train_memory.take_step
    counter = FlopCounterMode(display=False, custom_mapping=OWN)

    def counted(*values):
        with counter:
            return take_step(*values)

    monkeypatch.setattr(train_memory, "take_step", counted)
    # The counted bucket is square.
    monkeypatch.setattr(plan, "largest_shape", lambda side: (side // 32, side // 32))
    count_step(MODEL, settings, steps=1)
    base = released_base("1.6B")._replace(model=MODEL)
    assert step_operations(settings, base, settings.phase[0]) == pytest.approx(counter.get_total_flops(), rel=0.08)


def test_the_time_left_does_not_count_what_was_before_the_first_step(monkeypatch):
    eta, line = Eta(), {"loss": 0.7, "learning_rate": 1e-4, "images": 4, "seconds": 2.0, "steps": 11}
    # The preparation and the first validation take 1000 s, a later one 8 s.
    for step, now, remaining in ((1, 1002.0, "0:00:20"), (2, 1012.0, "0:00:54")):
        monkeypatch.setattr(states.time, "monotonic", lambda now=now: now)
        assert eta.describe({**line, "step": step}).endswith(f"2.00 images a second, {remaining} left")
