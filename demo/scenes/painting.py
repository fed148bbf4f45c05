"""Drawing the scenes: a flat picture at twice the size, made smaller, then taken through its style."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageDraw

from .brush import PAPER, WASHED, Brush, Colour, between, times
from .places import HORIZON, LIGHTS, place
from .subjects import SUBJECTS
from .world import ALL_COLOURS, PIXELS, Scene, Subject

SUPERSAMPLE = 2
SIDE_AT = {"left": 0.22, "middle": 0.5, "right": 0.78}
# height of a subject, and where it stands; fractions of the picture's height
NEAR_FAR = {"near": (0.4, 0.92), "far": (0.25, 0.73)}


def sky(scene: Scene, width: int, side: int) -> Image.Image:
    light = LIGHTS[scene.time]
    share = np.clip(np.linspace(0, 1 / HORIZON, side), 0, 1)[:, None]
    column = np.array(light.top) * (1 - share) + np.array(light.bottom) * share
    if scene.weather == "rainy":
        column = 0.55 * column + 0.45 * column.mean(1, keepdims=True) * 0.9
    if scene.style == "line drawing":  # a thin wash on the paper
        column += WASHED * (np.array(PAPER) - column)
    rows = np.round(column).astype(np.uint8)[:, None]
    return Image.fromarray(np.broadcast_to(rows, (side, width, 3)).copy())


def heavens(brush: Brush, scene: Scene, rng: random.Random) -> None:
    """Sun, or moon and stars, and the clouds."""
    x = rng.uniform(0.12, 0.88)
    if scene.time == "night":
        if scene.weather != "rainy":
            for _ in range(14):
                r = rng.uniform(0.004, 0.008)
                brush.ellipse(rng.random(), rng.uniform(0.02, 0.45), r, r, (255, 250, 220))
        brush.ellipse(x, rng.uniform(0.1, 0.2), 0.06, 0.06, (250, 244, 214))
    else:
        height = {"dawn": (0.44, 0.52), "noon": (0.1, 0.18), "dusk": (0.46, 0.55)}[scene.time]
        colour = {"dawn": (255, 240, 196), "noon": (255, 226, 92), "dusk": (255, 96, 56)}[scene.time]
        brush.ellipse(x, rng.uniform(*height), 0.075, 0.075, colour)
    if scene.weather == "clear":
        return
    light = LIGHTS[scene.time]
    white = (235, 238, 242) if scene.weather == "cloudy" else (150, 156, 168)
    cloud = between(times(white, light.land), light.bottom, 0.15)
    for index in range(3):
        x, y, s = (index + rng.uniform(0.2, 0.8)) / 3, rng.uniform(0.08, 0.3), rng.uniform(0.045, 0.065)
        puffs = brush.at(x, y, s)
        for dx, dy, r in ((-1.3, -0.25, 0.8), (1.3, -0.25, 0.8), (0, 0, 1.15)):
            puffs.ellipse(dx, dy, 1.25 * r, 0.8 * r, cloud)


def subject(brush: Brush, scene: Scene, what: Subject, rng: random.Random) -> None:
    light = LIGHTS[scene.time].subject
    size, ground = NEAR_FAR[what.distance]
    x, y = SIDE_AT[what.side] + rng.uniform(-0.035, 0.035), ground + rng.uniform(-0.015, 0.015)
    size *= rng.uniform(0.93, 1.07)
    if what.kind == "mountain":
        y, size = 0.68, 1.3 * size
    elif what.kind == "balloon":
        y -= 0.15
    elif what.kind != "boat" and scene.place == "sea":
        brush.ellipse(x, y + 0.005, 0.55 * size, 0.12 * size, times((222, 196, 140), light))  # an island

    def lit(colour: Colour) -> Colour:
        return times(colour, light)

    lamp = (255, 232, 140) if scene.time in ("night", "dusk") else lit((222, 236, 244))
    SUBJECTS[what.kind](brush.at(x, y, size), lit(ALL_COLOURS[what.colour]), lit, lamp)


def rain(brush: Brush, rng: random.Random) -> None:
    drop = (150, 156, 168) if brush.inked else (182, 192, 206)
    for _ in range(40):
        x, y = rng.uniform(0, 1.1), rng.uniform(0, 1)
        brush.line([(x, y), (x - 0.02, y + 0.06)], drop, 0.005, outlined=False)


def smooth_noise(rng: np.random.Generator, size: tuple[int, int], cells: int) -> np.ndarray:
    """Noise in [-1, 1] that changes over about 1 / `cells` of the height, [height, width] for `size`."""
    width, height = size
    coarse = Image.fromarray(rng.uniform(-1, 1, (cells, round(cells * width / height))).astype(np.float32))
    return np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))


def watercolour(picture: np.ndarray, seed: int) -> np.ndarray:
    """Return `picture` with wavering soft edges, in thin paint that is darker in pools, on paper that shows through."""
    rng, (height, width) = np.random.default_rng(seed), picture.shape[:2]
    rows, columns = (
        np.clip(axis + 0.009 * height * smooth_noise(rng, (width, height), 18), 0, last - 1).round().astype(int)
        for axis, last in zip(np.mgrid[:height, :width], (height, width), strict=True)
    )
    wavering = Image.fromarray(picture[rows, columns])
    soft = wavering.reduce(2).resize((width, height), Image.Resampling.BICUBIC)
    pools = 1 + 0.13 * smooth_noise(rng, (width, height), 8)[..., None]
    return np.clip(np.asarray(soft) * 0.84 * pools + 0.16 * np.array(PAPER), 0, 255).astype(np.uint8)


def paint(scene: Scene, width: int = PIXELS, height: int = PIXELS) -> np.ndarray:
    """Return the picture of `scene`, uint8 [height, width, 3]."""
    rng = random.Random(scene.seed)
    side = height * SUPERSAMPLE
    image = sky(scene, width * SUPERSAMPLE, side)
    brush = Brush(ImageDraw.Draw(image), side, scene.style == "line drawing", wide=width / height)
    heavens(brush, scene, rng)
    behind = [s for s in scene.subjects if s.kind == "mountain"]
    for what in behind:
        subject(brush, scene, what, rng)
    place(brush, scene, rng)
    # what is far is painted first
    for what in sorted((s for s in scene.subjects if s.kind != "mountain"), key=lambda s: s.distance):
        subject(brush, scene, what, rng)
    if scene.weather == "rainy":
        rain(brush, rng)
    picture = np.asarray(image.resize((width, height), Image.Resampling.BOX))
    return watercolour(picture, scene.seed) if scene.style == "watercolour" else picture
