"""The land of a scene, in the light of its hour."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from .brush import Brush, Colour, Point, between, times
from .world import Scene

HORIZON = 0.6
# what becomes of a colour in the light of the hour, and in so much mist
Lit = Callable[..., Colour]


class Light(NamedTuple):
    """What a time of day does: the sky from the top to the horizon, and what remains of a colour on land."""

    top: Colour
    bottom: Colour
    land: Colour
    subject: Colour


LIGHTS = {
    "dawn": Light((134, 166, 214), (255, 214, 178), (0.98, 0.9, 0.86), (1.0, 0.96, 0.94)),
    "noon": Light((64, 150, 236), (190, 228, 252), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)),
    "dusk": Light((84, 54, 118), (248, 128, 72), (0.78, 0.6, 0.6), (0.92, 0.84, 0.84)),
    "night": Light((10, 16, 46), (42, 58, 110), (0.34, 0.38, 0.56), (0.74, 0.76, 0.88)),
}


# from back to front: below the horizon, height, waves across the picture, colour, mist
RIDGES: dict[str, tuple[tuple[float, float, float, Colour, float], ...]] = {
    "hills": (
        (0.0, 0.06, 1.3, (110, 168, 110), 0.25),
        (0.1, 0.05, 0.9, (92, 160, 74), 0.0),
        (0.25, 0.04, 0.7, (70, 138, 58), 0.0),
    ),
    "desert": (
        (0.02, 0.05, 1.6, (226, 178, 112), 0.2),
        (0.12, 0.045, 1.1, (236, 192, 120), 0.0),
        (0.27, 0.03, 0.8, (214, 164, 92), 0.0),
    ),
    "snow": ((0.0, 0.06, 1.2, (214, 224, 238), 0.15), (0.12, 0.04, 0.8, (244, 248, 254), 0.0)),
}


def ridge(rng: random.Random, base: float, height: float, waves: float) -> list[Point]:
    """The outline of hills or dunes, down to the picture's lower corners."""
    a, b = rng.uniform(0, 2 * math.pi), rng.uniform(0, 2 * math.pi)
    xs = [i / 40 for i in range(41)]
    ys = [base - height * (0.6 * math.sin(waves * x * 2 * math.pi + a) + 0.4 * math.sin(5 * x + b)) for x in xs]
    return [(-0.1, 1.1), *zip(xs, ys, strict=True), (1.1, 1.1)]


def place(brush: Brush, scene: Scene, rng: random.Random) -> None:
    light = LIGHTS[scene.time]

    def lit(colour: Colour, mist: float = 0.0) -> Colour:
        return between(times(colour, light.land), light.bottom, mist)

    if scene.place == "sea":
        sea(brush, rng, lit)
    elif scene.place == "street":
        street(brush, rng, lit, scene.time == "night")
    else:
        for base, height, waves, colour, mist in RIDGES[scene.place]:
            brush.polygon(ridge(rng, HORIZON + base, height, waves), lit(colour, mist), False)
        if scene.place == "desert":
            for _ in range(2):
                cactus(brush, rng.uniform(0.05, 0.95), rng.uniform(0.7, 0.78), lit((66, 120, 74)))
        elif scene.place == "snow":
            for _ in range(3):
                fir(brush, rng.uniform(0.03, 0.97), rng.uniform(0.68, 0.75), lit((52, 88, 84)))


def sea(brush: Brush, rng: random.Random, lit: Lit) -> None:
    for i in range(1 if brush.inked else 8):
        water = lit(between((70, 150, 200), (20, 74, 140), i / 7), 0.12)
        brush.box(-0.1, HORIZON + i * 0.05, 1.1, 1.1, water, False)
    for _ in range(9):
        x, y = rng.random(), rng.uniform(HORIZON + 0.04, 0.97)
        w = rng.uniform(0.03, 0.06)
        crest = [(x - w, y), (x - w / 2, y - 0.008), (x, y), (x + w / 2, y - 0.008), (x + w, y)]
        brush.line(crest, lit((206, 230, 240)), 0.007)


def cactus(brush: Brush, x: float, y: float, colour: Colour) -> None:
    for dx, top, bottom in ((0, 0.1, 0.0), (-0.022, 0.065, 0.035), (0.022, 0.075, 0.045)):
        brush.box(x + dx - 0.007, y - top, x + dx + 0.007, y - bottom, colour, False)


def fir(brush: Brush, x: float, y: float, colour: Colour) -> None:
    for i in range(3):
        top, half = y - 0.13 + 0.035 * i, 0.022 + 0.01 * i
        brush.polygon([(x, top), (x - half, top + 0.06), (x + half, top + 0.06)], colour, False)


def street(brush: Brush, rng: random.Random, lit: Lit, night: bool) -> None:
    x = -0.05
    while x < 1.0:
        width, height = rng.uniform(0.13, 0.19), rng.uniform(0.17, 0.25)
        top = 0.68 - height
        wall = rng.choice(((176, 160, 146), (160, 150, 150), (188, 174, 152)))
        brush.box(x, top, x + width, 0.68, lit(wall), False)
        brush.polygon([(x, top), (x + width / 2, top - 0.06), (x + width, top)], lit((108, 92, 92)), False)
        pane = (250, 214, 120) if night else lit((214, 226, 234))
        for dx in (0.25, 0.65):
            for dy in (0.045, 0.12):
                left = x + dx * width - 0.015
                brush.box(left, top + dy, left + 0.036, top + dy + 0.04, pane, night)
        x += width
    brush.box(-0.1, 0.68, 1.1, 0.72, lit((186, 182, 176)), False)
    brush.box(-0.1, 0.72, 1.1, 1.1, lit((112, 112, 120)), False)
    offset = rng.uniform(0, 0.2)
    for i in range(-1, 6):
        brush.box(offset + 0.2 * i, 0.84, offset + 0.2 * i + 0.1, 0.855, lit((230, 228, 214)), False)
