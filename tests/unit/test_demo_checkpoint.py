"""The tests' checkpoint sana-tiny follows prompts that it was not trained on."""

import numpy as np
import pytest
from shape_judge import draw, score
from shapes import combinations, prompt

HELD_OUT = combinations()[1][:32]
PROMPTS = [prompt(*combination) for combination in HELD_OUT]


@pytest.fixture(scope="module")
def guided(checkpoint):
    return draw(checkpoint, PROMPTS, 4.5)


def test_it_has_at_most_8_megabytes(checkpoint):
    assert sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()) <= 8_000_000


def test_it_draws_what_held_out_prompts_ask_for(guided):
    assert score(guided, HELD_OUT)["all"] >= 0.9


@pytest.mark.slow
def test_an_empty_prompt_stays_near_chance(checkpoint):
    assert score(draw(checkpoint, [""], 1.0, count=64), HELD_OUT)["all"] <= 0.05


def test_guidance_matters(checkpoint, guided):
    plain = draw(checkpoint, PROMPTS[:16], 1.0)
    assert np.abs(plain.astype(int) - guided[:16].astype(int)).mean() > 2
