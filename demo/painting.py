"""Paints the scenes: sky, land and subjects, and then the effects of watercolour."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageFilter

from .brush import PAPER, Brush, Canvas, Colour, Hand, circle, curve, times
from .hours import HOURS
from .land import clouds, heavens, lens, place, rain, sky
from .layout import Placed, lay_out
from .subjects import SUBJECTS, Lit
from .world import ALL_COLOURS, SIZES, Scene

# {style: (largest deviation of the hand, length over which it varies)}, in fractions of the height.
HANDS = {"line drawing": (0.0035, 0.16), "watercolour": (0.0075, 0.13)}

# Density of the paint in a watercolour, relative to a flat drawing.
THIN = 0.8
# For each level of 255, the logarithm of the reflected light.
ABSORBED = np.log(np.maximum(np.arange(256), 8) / 255).astype(np.float32)


def draw_subject(brush: Brush, scene: Scene, subject: Placed, across: int) -> None:
    """Draw a subject with its shadow or reflection. `across`: 1 if the light comes from the left, else -1."""
    hour = HOURS[scene.time]

    def lit(colour: Colour) -> Colour:
        return times(colour, hour.subject)

    x, y, size = subject.x, subject.y, subject.height
    if subject.kind == "boat":
        lens(brush, x, y + 0.005, 0.5 * size, 0.07 * size, lit(ALL_COLOURS[subject.colour]), 0.45)
    elif subject.kind not in ("balloon", "mountain"):
        half = {"house": 0.56, "lighthouse": 0.26, "tree": 0.36, "car": 0.95, "windmill": 0.36}[subject.kind] * size
        if scene.place == "sea":
            island(brush, x, y, half + 0.05, lit)
        # Away from the light, and below the subject.
        shadow = circle(x + 0.35 * half * across, y - 0.004, 1.08 * half, 0.03 + 0.02 * half)
        brush.shade(shadow, hour.shadow, 0.3)
    SUBJECTS[subject.kind](brush.at(x, y, size, across), lit(ALL_COLOURS[subject.colour]), lit, hour.lamp)


def island(brush: Brush, x: float, y: float, half: float, lit: Lit) -> None:
    outline = [(-1.25, 0.03), (-0.9, -0.015), (0.0, -0.03), (0.95, -0.015), (1.25, 0.03), (0.6, 0.055), (-0.6, 0.055)]
    lens(brush, x, y + 0.03, 1.45 * half, 0.05, (236, 246, 250), 0.4)
    brush.fill(curve([(x + dx * half, y + dy) for dx, dy in outline]), lit((232, 208, 154)), coloured=False)
    green = [(-1.0, 0.01), (-0.6, -0.025), (0.0, -0.035), (0.7, -0.025), (1.05, 0.01), (0.0, 0.03)]
    grass = curve([(x + dx * half, y + dy) for dx, dy in green])
    brush.fill(grass, lit((120, 166, 90)), coloured=False, outlined=False)


def smooth_noise(rng: np.random.Generator, width: int, height: int, cell: float) -> np.ndarray:
    """Return noise [height, width] in about [-1, 1], which varies over a length of `cell` pixels."""
    shape = (round(height / cell) + 2, round(width / cell) + 2)
    coarse = Image.fromarray(rng.uniform(-1, 1, shape).astype(np.float32))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def wash(drawn: np.ndarray, seed: int) -> np.ndarray:
    """Turn a drawing into a watercolour with dark rims, pools of pigment and a bare margin."""
    rng, (height, width) = np.random.default_rng(seed), drawn.shape[:2]
    unit = min(width, height)
    grey = Image.fromarray(drawn).convert("L")
    soft = grey.filter(ImageFilter.GaussianBlur(unit / 80))
    # Areas that are darker than their neighbourhood get a rim.
    rim = np.clip(np.asarray(soft, np.float32) - np.asarray(grey, np.float32), 0, 60) / 255
    pools = 0.6 * smooth_noise(rng, width, height, unit / 5) + 0.4 * smooth_noise(rng, width, height, unit / 14)
    # Density of the paint. Pigment gathers at rims and in pools.
    density = THIN * (1 + 1.5 * rim + 0.3 * pools)
    rows, columns = (np.minimum(np.arange(side), np.arange(side)[::-1]) for side in (height, width))
    # Distance from the edge of the painted area. The edge is irregular.
    inside = np.minimum(rows[:, None], columns) / unit - 0.045 - 0.014 * smooth_noise(rng, width, height, unit / 9)
    density *= np.clip(inside * unit / 3, 0, 1) * (1 + 0.35 * np.exp(np.minimum(-inside / 0.008, 0)))
    shown = np.exp(ABSORBED[drawn] * density[..., None].astype(np.float32)) * np.array(PAPER, np.float32)
    return np.round(shown).astype(np.uint8)


def paint(scene: Scene, width: int = SIZES[0][0], height: int = SIZES[0][1]) -> np.ndarray:
    """Paint `scene`, uint8 [height, width, 3]."""
    return paint_placed(scene, width, height)[0]


def paint_placed(scene: Scene, width: int, height: int) -> tuple[np.ndarray, list[Placed]]:
    """Paint `scene`. Returns the image, and the subjects with their positions."""
    rng = random.Random(scene.seed)
    hand = Hand(np.random.default_rng(scene.seed), *HANDS[scene.style]) if scene.style in HANDS else None
    canvas = Canvas(width, height, scene.style == "line drawing", hand)
    brush = Brush(canvas)
    sky(canvas, scene)
    sun = heavens(brush, scene, rng)
    clouds(brush, scene, rng)
    things = lay_out(scene, canvas.wide, rng)
    # Subjects are drawn for light from the left, and mirrored for light from the right.
    across = 1 if sun < canvas.wide / 2 else -1
    for subject in things:
        if subject.kind == "mountain":
            draw_subject(brush, scene, subject, across)
    place(brush, scene, rng, sun)
    for subject in things:
        if subject.kind != "mountain":
            draw_subject(brush, scene, subject, across)
    if scene.weather == "rainy":
        rain(brush, rng)
    drawn = canvas.pixels[..., :3].copy()
    if scene.style == "watercolour":
        drawn = wash(drawn, scene.seed)
    return drawn, things
