"""The learning rate follows the finished share of the work, also after changes to a resumed run."""

import itertools
import logging
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from checkpoints import CHECKPOINTS, trained_on_both
from diffusers import optimization
from pictures import write_pictures
from trained import Stopped, lines_of, stopping_after

from sana_core.training.schedule import TrainProgress, after_step, learning_rate, plan_epoch, steps_left
from sana_core.training.settings import Method, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.trainer import train

PEAK, START = 1e-3, TrainProgress()
# diffusers' of the same names
THEIRS = {
    "constant": optimization.get_constant_schedule_with_warmup,
    "linear": partial(optimization.get_linear_schedule_with_warmup, num_training_steps=20),
    "cosine": partial(optimization.get_cosine_schedule_with_warmup, num_training_steps=20),
    "cosine_with_restarts": partial(
        optimization.get_cosine_with_hard_restarts_schedule_with_warmup, num_training_steps=20, num_cycles=3
    ),
    "polynomial": partial(
        optimization.get_polynomial_decay_schedule_with_warmup, num_training_steps=20, power=2.0, lr_end=0.0
    ),
}


def steps_of(phase, pictures):
    batches = len(plan_epoch([(128, 128)] * pictures, phase.batch, 0, 0))
    return -(-batches // phase.accumulate)


def rates_of(phase, pictures, place=START, stop=10**9):
    """The rates of a phase from `place` to its end or to the step `stop`, and where that is."""
    count, rates = steps_of(phase, pictures), []
    while place.phase_step < stop:
        if place.position >= count:
            place = place._replace(epoch=place.epoch + 1, position=0)
        if not steps_left(phase, place, count):
            break
        rates.append(learning_rate(phase, place))
        place = after_step(phase, place, count)
    return rates, place


@pytest.mark.parametrize("schedule", THEIRS)
def test_of_a_run_that_nobody_changes(schedule):
    options = {"cosine_with_restarts": {"cycles": 3}, "polynomial": {"power": 2.0}}.get(schedule, {})
    phase = Phase(("x",), steps=20, learning_rate=PEAK, schedule=schedule, warmup=4, **options)
    rates, place = rates_of(phase, 7)
    assert len(rates) == place.phase_step == 20
    assert rates[:4] == pytest.approx([PEAK * share for share in (0.25, 0.5, 0.75, 1)])
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    (factor,) = THEIRS[schedule](optimizer, num_warmup_steps=4).lr_lambdas
    assert rates[4:] == pytest.approx([PEAK * factor(step) for step in range(4, 20)], abs=1e-12)


@pytest.mark.parametrize("seed", range(300))
def test_it_stays_in_its_range_and_never_jumps(seed):
    """Runs that are interrupted repeatedly, and resumed with other batches, images, epochs or steps."""
    numbers = random.Random(seed)
    place, rates, bounds = START, [], []
    schedule, warmup = numbers.choice(["linear", "cosine", "polynomial"]), numbers.choice([0, 0, 3, 20])
    for _ in range(numbers.randint(2, 6)):
        pictures, batch, accumulate = (numbers.randint(1, most) for most in (60, 8, 4))
        length = (
            {"epochs": place.epoch + numbers.randint(0, 12)}
            if numbers.random() < 0.6
            else {"steps": max(1, place.phase_step + numbers.randint(-5, 60))}
        )
        phase = Phase(("x",), 128, batch, accumulate, None, None, PEAK, schedule, warmup)
        phase = replace(phase, **length)
        count = steps_of(phase, pictures)
        # an epoch that is under way begins again
        place = place._replace(position=0)
        left = steps_left(phase, place, count)
        end = place.phase_step + numbers.randint(0, left) if numbers.random() < 0.8 else 10**9
        result, place = rates_of(phase, pictures, place, end)
        rates += result
        # Each remaining step takes its share. A cosine is steepest at pi / 2 times that.
        bounds += [1.6 * PEAK / max(1, left - warmup)] * len(result)
        assert 0 <= place.done <= 1
    assert all(0 <= rate <= PEAK for rate in rates)
    for index, (before, after) in enumerate(itertools.pairwise(rates)):
        rising = index + 1 < warmup
        assert after >= before if rising else after <= before * (1 + 1e-9)
        if not rising:
            assert before - after <= max(bounds[index : index + 2]) * (1 + 1e-9)


@trained_on_both
def test_a_run_that_gets_other_batches_and_pictures_goes_on_from_its_rate(checkpoint, tmp_path, caplog, name):
    data = tmp_path / "pictures"
    write_pictures(data, 6, seed=2)
    phase = Phase((str(data),), 128, batch=1, epochs=2, learning_rate=PEAK, schedule="cosine")
    run_settings = TrainingSettings(str(CHECKPOINTS[name]), str(tmp_path / "out"), (phase,), dtype="float32")
    run_settings = check_settings(replace(run_settings, method=Method(rank=2), validation=Validation()))

    report, poll = stopping_after(9)
    with pytest.raises(Stopped):
        train(run_settings, report, poll=poll)
    # 9 of 12 steps are done; in batches of 3 the second epoch, which begins again, has 2
    train(replace(run_settings, phase=(replace(phase, batch=3),)))
    assert "batches of phase 1 have changed, so its epoch begins again" in caplog.text
    assert "more steps" not in caplog.text
    write_pictures(data, 9, seed=3)
    with caplog.at_level(logging.WARNING):
        train(replace(run_settings, phase=(replace(phase, batch=3, epochs=4),)))
    assert "phase 1 has more steps than it had, and continues from its learning rate of" in caplog.text
    rates = [line["learning_rate"] for line in lines_of(run_settings.out)]
    assert len(rates) == 9 + 2 + 2 * 5
    assert all(0 < after <= before <= PEAK for before, after in itertools.pairwise(rates))
