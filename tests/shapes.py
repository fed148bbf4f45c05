"""Scenes of the tests' checkpoint sana-tiny: flat shapes on flat backgrounds, and their captions."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 50),
    "purple": (150, 60, 190),
    "orange": (245, 140, 30),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "cross")
PIXELS = 128
HELD_OUT = 64
SUPERSAMPLE = 2


class Scene(NamedTuple):
    """One picture. `radius`, `x` and `y` are fractions of the side; (0, 0) is the top left corner."""

    colour: str
    shape: str
    background: str
    radius: float
    x: float
    y: float


def combinations() -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return (train, held_out), all combinations of colour, shape and background with two different colours.

    The shuffle is seeded, so the split never changes.
    """
    every = [c for c in itertools.product(COLOURS, SHAPES, COLOURS) if c[0] != c[2]]
    random.Random(20).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def random_scene(rng: random.Random, combination: tuple[str, str, str]) -> Scene:
    """Return a scene with a random size and position. The whole shape is inside the image."""
    radius = rng.uniform(0.15, 0.34)
    low, high = radius + 0.03, 0.97 - radius
    return Scene(*combination, radius, rng.uniform(low, high), rng.uniform(low, high))


def draw_shape(draw: ImageDraw.ImageDraw, shape: str, box: tuple[float, float, float, float], fill) -> None:
    """Draw `shape` so that it just touches the sides of `box` (left, top, right, bottom)."""
    left, top, right, bottom = box
    if shape == "circle":
        draw.ellipse(box, fill=fill)
    elif shape == "square":
        draw.rectangle(box, fill=fill)
    elif shape == "triangle":
        draw.polygon([((left + right) / 2, top), (left, bottom), (right, bottom)], fill=fill)
    elif shape == "cross":
        w, h = (right - left) / 3, (bottom - top) / 3
        draw.rectangle((left + w, top, right - w, bottom), fill=fill)
        draw.rectangle((left, top + h, right, bottom - h), fill=fill)
    else:
        raise ValueError(f"shape: got {shape!r}, expected one of {', '.join(SHAPES)}")


def draw_scene(scene: Scene, pixels: int = PIXELS) -> np.ndarray:
    """Return the picture of `scene`, uint8 [pixels, pixels, 3], edges smoothed."""
    side = pixels * SUPERSAMPLE
    image = Image.new("RGB", (side, side), COLOURS[scene.background])
    r, x, y = (v * side for v in (scene.radius, scene.x, scene.y))
    draw_shape(ImageDraw.Draw(image), scene.shape, (x - r, y - r, x + r, y + r), COLOURS[scene.colour])
    return np.asarray(image.resize((pixels, pixels), Image.Resampling.BOX))


def article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def size_word(scene: Scene) -> str:
    return "small" if scene.radius < 0.2 else "large" if scene.radius > 0.29 else ""


def position_word(scene: Scene) -> str:
    vertical = "top" if scene.y < 0.42 else "bottom" if scene.y > 0.58 else ""
    horizontal = "left" if scene.x < 0.42 else "right" if scene.x > 0.58 else ""
    return f"{vertical} {horizontal}".strip() or "middle"


def prompt(colour: str, shape: str, background: str) -> str:
    """Return the plain caption. Test prompts have the same form."""
    return f"{article(f'{colour} {shape}')} on {article(background)} background"


def random_caption(rng: random.Random, scene: Scene) -> str:
    """Return a caption with colour, shape and background, sometimes with size or position or in another order."""
    size = size_word(scene) if rng.random() < 0.3 else ""
    subject = f"{size} {scene.colour} {scene.shape}".strip()
    background = article(f"{scene.background} background")
    if rng.random() < 0.25:
        where = position_word(scene)
        return f"{article(subject)} {'in' if where == 'middle' else 'at'} the {where} of {background}"
    return rng.choices(
        [
            f"{article(subject)} on {background}",
            f"{background} with {article(subject)}",
            f"{subject}, {scene.background} background",
        ],
        [4, 1, 1],
    )[0]
