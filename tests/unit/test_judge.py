"""The rule that judges pictures is itself judged on drawings, whose content is known."""

import random

import numpy as np
import pytest
from shape_judge import judge
from shapes import COLOURS, SHAPES, Scene, combinations, draw_scene, random_caption, random_scene


def test_held_out_combinations_are_64_and_apart_from_training():
    train, held_out = combinations()
    assert len(held_out) == len(set(held_out)) == 64
    assert len(train) == 160 and not set(train) & set(held_out)
    assert {c for c, _, _ in train} == {b for _, _, b in train} == set(COLOURS)
    assert {s for _, s, _ in train} == set(SHAPES)


def test_judge_reads_every_drawing():
    rng = random.Random(7)
    for combination in sum(combinations(), []):
        assert judge(draw_scene(random_scene(rng, combination))) == combination


def test_judge_reads_blurred_and_noisy_drawings():
    rng, noise = random.Random(8), np.random.default_rng(8)
    for combination in combinations()[1]:
        picture = draw_scene(random_scene(rng, combination), 64).repeat(2, 0).repeat(2, 1).astype(float)
        picture = (picture + noise.normal(0, 8, picture.shape)).clip(0, 255).astype(np.uint8)
        assert judge(picture) == combination


def test_judge_sees_no_shape_in_noise_or_in_nothing():
    noise = np.random.default_rng(9).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    assert judge(noise).shape is None
    plain = np.full((128, 128, 3), COLOURS["red"], np.uint8)
    assert judge(plain) == (None, None, "red")


def test_captions_name_colour_shape_and_background():
    rng = random.Random(10)
    for _ in range(200):
        scene = random_scene(rng, rng.choice(combinations()[0]))
        caption = random_caption(rng, scene)
        assert all(word in caption for word in scene[:3])


def test_an_unknown_shape_is_named():
    with pytest.raises(ValueError, match="shape: got 'heart', expected one of circle"):
        draw_scene(Scene("red", "heart", "blue", 0.3, 0.5, 0.5))
