"""Draws sky and land of a scene, in the light of its hour."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np

from .brush import Brush, Canvas, Colour, between, circle, curve, times, washed
from .hours import HOURS, Hour
from .world import Scene

HORIZON = 0.6
# Returns a colour in the light of the hour and in haze. The amount of haze is the second argument.
Lit = Callable[..., Colour]


def sky(canvas: Canvas, scene: Scene) -> None:
    """Fill the canvas from the zenith to the horizon, and below with the horizon's colour."""
    hour = HOURS[scene.time]
    stops = np.array([hour.top, hour.middle, hour.bottom], float)
    if scene.weather == "rainy":
        stops = 0.45 * stops + 0.55 * stops.mean(1, keepdims=True) * np.array((0.86, 0.9, 0.96))
    if canvas.inked:
        # A thin wash on the paper.
        stops = np.array([washed(stop) for stop in stops])
    rows = np.linspace(0, 1 / HORIZON, canvas.height).clip(0, 1)
    column = np.stack([np.interp(rows, (0, 0.55, 1), stops[:, channel]) for channel in range(3)], 1)
    canvas.pixels[..., :3] = np.round(column).astype(np.uint8)[:, None]


def heavens(brush: Brush, scene: Scene, rng: random.Random) -> float:
    """Draw the sun, or moon and stars. Returns the x from which the light comes."""
    hour, wide = HOURS[scene.time], brush.canvas.wide
    x = wide * rng.choice((rng.uniform(0.14, 0.36), rng.uniform(0.64, 0.86)))
    low, high = {"dawn": (0.4, 0.46), "noon": (0.14, 0.2), "dusk": (0.46, 0.52), "night": (0.14, 0.22)}[scene.time]
    y, radius = rng.uniform(low, high), 0.085 * min(wide, 1)
    if scene.weather == "rainy":
        return x
    if scene.time == "night":
        for index in range(7):
            at = ((index + rng.uniform(0.2, 0.8)) * wide / 7, rng.uniform(0.04, 0.42))
            if math.dist(at, (x, y)) > 2.5 * radius:
                star(brush, *at, rng.uniform(0.013, 0.019))
    for share, alpha in ((2.9, 0.16), (1.9, 0.22)):
        brush.shade(circle(x, y, share * radius, share * radius), hour.glow, alpha)
    brush.fill(circle(x, y, radius, radius), hour.orb)
    if scene.time == "night":
        for dx, dy, r in ((-0.3, -0.2, 0.24), (0.32, 0.3, 0.3)):
            brush.shade(circle(x + dx * radius, y + dy * radius, r * radius, r * radius), (214, 206, 176), 0.7)
    return x


def star(brush: Brush, x: float, y: float, radius: float) -> None:
    points = [(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)]
    inner = [(x + d * radius * 0.34, y + e * radius * 0.34) for d, e in ((1, -1), (1, 1), (-1, 1), (-1, -1))]
    brush.fill([p for pair in zip(points, inner, strict=True) for p in pair], (255, 246, 206), outlined=False)


def clouds(brush: Brush, scene: Scene, rng: random.Random) -> None:
    if scene.weather == "clear":
        return
    hour, wide, rainy = HOURS[scene.time], brush.canvas.wide, scene.weather == "rainy"
    white = (146, 154, 170) if rainy else (255, 255, 255)
    cloud = between(times(white, hour.land), hour.bottom, 0.3)
    count = max(2, round((4 if rainy else 3) * wide))
    for index in range(count):
        x = (index + rng.uniform(0.15, 0.85)) / count * wide
        one_cloud(brush, x, rng.uniform(0.1, 0.3), rng.uniform(0.1, 0.14) * min(wide, 1) * (1.3 if rainy else 1), cloud)


def one_cloud(brush: Brush, x: float, y: float, size: float, colour: Colour) -> None:
    """Draw three puffs on a flat foot, and the shade below them."""
    b = brush.at(x, y, size)
    outline = np.concatenate([
        circle(0.95, 0.28, 0.36, 0.28, -90, 70),
        circle(0.32, 0.55, 0.5, 0.45, 20, 140),
        circle(-0.5, 0.42, 0.46, 0.38, 75, 190),
        circle(-1.05, 0.22, 0.32, 0.22, 110, 270),
    ])  # fmt: skip
    b.fill(outline, colour, coloured=False)
    b.shade(
        curve([(-1.3, 0.12), (-0.6, 0.2), (0.4, 0.16), (1.25, 0.2), (1.0, 0.02), (-1.1, 0.02)]), (70, 84, 130), 0.12
    )


def ridge(rng: random.Random, wide: float, base: float, height: float, waves: float) -> np.ndarray:
    """Return the outline of hills or dunes, down to the image's lower corners."""
    a, b, c = (rng.uniform(0, 2 * math.pi) for _ in range(3))
    x = np.linspace(-0.05, wide + 0.05, 48)
    turns = 2 * math.pi * waves * x
    y = base - height * (0.6 * np.sin(turns + a) + 0.3 * np.sin(1.9 * turns + b) + 0.1 * np.sin(3.3 * turns + c))
    return np.stack([np.concatenate([[x[0]], x, [x[-1]]]), np.concatenate([[1.1], y, [1.1]])], 1)


def place(brush: Brush, scene: Scene, rng: random.Random, sun: float) -> None:
    hour = HOURS[scene.time]

    def lit(colour: Colour, haze: float = 0.0) -> Colour:
        return between(times(colour, hour.land), between(hour.bottom, hour.middle, 0.3), haze)

    draw = {"sea": sea, "hills": hills, "desert": desert, "snow": snow, "street": street}[scene.place]
    draw(brush, rng, lit, hour, sun, scene)


def sea(brush: Brush, rng: random.Random, lit: Lit, hour: Hour, sun: float, scene: Scene) -> None:
    wide = brush.canvas.wide
    far, near = lit((92, 172, 204), 0.2), lit((14, 78, 140))
    brush.box(-0.1, HORIZON, wide + 0.1, 1.1, far, coloured=False)
    for index, y in enumerate((0.66, 0.75, 0.87)):
        water = between(far, near, (index + 1) / 3)
        brush.fill(ridge(rng, wide, y, 0.008, 1.6 - 0.3 * index), water, coloured=False, outlined=False)
    if scene.weather != "rainy":
        for index, y in enumerate((0.63, 0.685, 0.755, 0.84)):
            w, x = 0.1 - 0.012 * index, sun + rng.uniform(-0.015, 0.015)
            lens(brush, x, y, w * rng.uniform(0.8, 1.0), 0.011, hour.glow, 0.55)
    crest = between(near, (236, 246, 250), 0.4)
    for _ in range(5):
        x, y = rng.uniform(0, wide), rng.uniform(0.8, 0.97)
        lens(brush, x, y, rng.uniform(0.05, 0.08), 0.009, crest, 0.7)


def lens(brush: Brush, x: float, y: float, across: float, thick: float, colour: Colour, alpha: float) -> None:
    brush.shade(curve([(x - across, y), (x, y - thick), (x + across, y), (x, y + thick)]), colour, alpha)


def hills(brush: Brush, rng: random.Random, lit: Lit, hour: Hour, sun: float, scene: Scene) -> None:
    wide = brush.canvas.wide
    layers = (
        (0.58, 0.05, 1.0, (126, 172, 140), 0.45),
        (0.655, 0.045, 0.9, (112, 172, 92), 0.15),
        (0.75, 0.03, 0.7, (86, 152, 66), 0.0),
        (0.95, 0.025, 0.6, (58, 124, 56), 0.0),
    )
    for number, (base, height, waves, colour, haze) in enumerate(layers):
        brush.fill(ridge(rng, wide, base, height, waves), lit(colour, haze), coloured=False)
        if number == 2:
            # A path towards the viewer.
            x, turn = wide * rng.uniform(0.2, 0.8), rng.choice((-1, 1))
            left = [(x, 0.775), (x + 0.05 * turn, 0.815), (x - 0.04 * turn, 0.87), (x - 0.1, 1.02)]
            right = [
                (x + 0.16, 1.02),
                (x + 0.03 + 0.02 * turn, 0.87),
                (x + 0.035 + 0.055 * turn, 0.815),
                (x + 0.02, 0.775),
            ]
            path = np.concatenate([curve(left, closed=False), curve(right, closed=False)])
            brush.fill(path, lit((226, 204, 150)), coloured=False, outlined=False)


def desert(brush: Brush, rng: random.Random, lit: Lit, hour: Hour, sun: float, scene: Scene) -> None:
    wide = brush.canvas.wide
    if all(group.kind != "mountain" for group in scene.groups):
        mesa(brush, rng.uniform(0.1, 0.9) * wide, lit((206, 140, 106), 0.4))
    layers = (
        (0.625, 0.035, 1.1, (230, 182, 122), 0.15),
        (0.715, 0.04, 0.8, (240, 196, 126), 0.0),
        (0.93, 0.03, 0.6, (222, 168, 98), 0.0),
    )
    for number, (base, height, waves, colour, haze) in enumerate(layers):
        dune = ridge(rng, wide, base, height, waves)
        brush.fill(dune, lit(colour, haze), coloured=False)
        if number < 2:
            # The shaded side of the dune.
            crest = dune[1 + np.argmin(dune[1:-1, 1])]
            away = 1 if crest[0] > sun else -1
            side = [
                tuple(crest), (crest[0] + 0.02 * away, crest[1] + 0.03), (crest[0] - 0.02 * away, crest[1] + 0.075),
                (crest[0] + 0.09 * away, crest[1] + 0.13), (crest[0] + 0.3 * away, crest[1] + 0.15),
                (crest[0] + 0.26 * away, crest[1] + 0.09), (crest[0] + 0.1 * away, crest[1] + 0.02),
            ]  # fmt: skip
            brush.shade(curve(side), hour.shadow, 0.16)
    for _ in range(2):
        x = wide * rng.choice((rng.uniform(0.04, 0.12), rng.uniform(0.88, 0.96)))
        cactus(brush.at(x, rng.uniform(0.74, 0.8), 0.13), lit((70, 128, 84)))


def mesa(brush: Brush, x: float, colour: Colour) -> None:
    outline = [(-0.2, 0.65), (-0.15, 0.54), (-0.12, 0.515), (0.06, 0.515), (0.08, 0.55), (0.16, 0.56), (0.22, 0.65)]
    brush.fill([(x + dx, y) for dx, y in outline], colour, coloured=False)


def cactus(brush: Brush, colour: Colour) -> None:
    trunk = np.concatenate([circle(0, 0.9, 0.12, 0.12, 0, 180), [(-0.12, 0), (0.12, 0)]])
    arms = [(0.0, 0.3), (0.34, 0.34), (0.36, 0.62)], [(0.0, 0.42), (-0.32, 0.46), (-0.33, 0.74)]
    shown = washed(colour) if brush.canvas.inked else colour
    for arm in arms:
        brush.stroke(curve(arm, closed=False), shown, 0.17)
    brush.fill(trunk, colour, coloured=False)
    for arm in arms:
        brush.stroke(curve(arm, closed=False), shown, 0.11, outlined=False)


def snow(brush: Brush, rng: random.Random, lit: Lit, hour: Hour, sun: float, scene: Scene) -> None:
    wide = brush.canvas.wide
    brush.fill(ridge(rng, wide, 0.575, 0.05, 0.9), lit((196, 214, 234), 0.3), coloured=False)
    forest(brush, rng, lit((84, 122, 128), 0.15))
    for number, (base, height, colour) in enumerate(((0.68, 0.025, (228, 236, 246)), (0.86, 0.035, (250, 252, 255)))):
        bank = ridge(rng, wide, base, height, 0.7)
        brush.fill(bank, lit(colour), coloured=False)
        hollow = bank[1:-1] + (0.0, 0.05 + 0.03 * number)
        brush.shade(np.concatenate([hollow, hollow[::-1] + (0.0, 0.03)]), (120, 156, 214), 0.2)


def forest(brush: Brush, rng: random.Random, colour: Colour) -> None:
    """Draw the tops of distant firs, close together."""
    points, x, wide = [(-0.1, 0.75)], -0.06, brush.canvas.wide
    while x < wide + 0.1:
        step = rng.uniform(0.06, 0.1)
        points += [(x, 0.635), (x + step / 2, 0.625 - step * rng.uniform(0.6, 1.1))]
        x += step
    brush.fill([*points, (wide + 0.1, 0.75)], colour, coloured=False)


def street(brush: Brush, rng: random.Random, lit: Lit, hour: Hour, sun: float, scene: Scene) -> None:
    wide, x = brush.canvas.wide, rng.uniform(-0.14, -0.04)
    walls = [(196, 164, 140), (172, 160, 156), (206, 190, 160), (164, 150, 140), (188, 172, 168)]
    number = rng.randrange(len(walls))
    evening = scene.time in ("dusk", "night")
    while x < wide:
        width, top = rng.uniform(0.2, 0.27), rng.uniform(0.33, 0.44)
        wall = lit(walls[number % len(walls)], 0.22)
        brush.box(x, top, x + width, 0.72, wall, coloured=False)
        brush.box(x, top - 0.03, x + width, top, between(wall, hour.shadow, 0.3), coloured=False)
        for row in range(3):
            for column in range(2):
                left, y = x + width * (0.2 + 0.4 * column), top + 0.05 + 0.1 * row
                pane = between(wall, hour.lamp if evening else lit((150, 176, 196)), 0.75)
                if scene.time == "night" and rng.random() < 0.4:
                    # A dark window.
                    pane = between(wall, hour.shadow, 0.25)
                brush.box(left, y, left + 0.2 * width, y + 0.055, pane, coloured=evening, outlined=False)
        x, number = x + width, number + 1
    brush.box(-0.1, 0.7, wide + 0.1, 0.76, lit((204, 198, 190)), coloured=False)
    brush.box(-0.1, 0.76, wide + 0.1, 1.1, lit((118, 118, 130)), coloured=False)
    offset = rng.uniform(-0.3, 0.0)
    for index in range(5):
        left = offset + 0.36 * index
        brush.box(left, 0.965, left + 0.2, 0.99, lit((238, 234, 220)), coloured=False, outlined=False)


def rain(brush: Brush, rng: random.Random) -> None:
    wide = brush.canvas.wide
    columns, rows = max(3, round(5 * wide)), 5
    for row in range(rows):
        for column in range(columns):
            x = (column + rng.uniform(0.1, 0.9)) / columns * wide
            y = (row + rng.uniform(0.1, 0.9)) / rows
            brush.stroke([(x, y - 0.03), (x - 0.02, y + 0.03)], (206, 218, 236), 0.011, 0.7, outlined=False)
