"""What a scene may show, and which combinations are never trained on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import NamedTuple

TIMES = ("dawn", "noon", "dusk", "night")
PLACES = ("sea", "hills", "desert", "snow", "street")
KINDS = ("house", "lighthouse", "boat", "tree", "balloon", "car", "mountain")
COLOURS = {
    "red": (214, 48, 42),
    "orange": (240, 140, 32),
    "yellow": (246, 214, 60),
    "green": (44, 150, 70),
    "blue": (48, 96, 214),
    "purple": (134, 66, 172),
    "pink": (244, 150, 190),
    "white": (248, 246, 240),
}
# what the model is never shown, for a LoRA to learn; the wide judge knows it
NEW_KIND, NEW_COLOUR = "windmill", "turquoise"
ALL_KINDS, ALL_COLOURS = (*KINDS, NEW_KIND), {**COLOURS, NEW_COLOUR: (64, 206, 196)}
SIDES = ("left", "middle", "right")
DISTANCES = ("near", "far")
WEATHERS = ("clear", "cloudy", "rainy")
STYLES = ("flat", "watercolour", "line drawing")
PIXELS = 256
# of the combinations of time, place, style, subject and colour, one in this many is never shown to the model
HELD_OUT_ONE_IN = 10


class Subject(NamedTuple):
    """Something that stands, floats or flies in a scene."""

    kind: str
    colour: str
    side: str
    distance: str


class Scene(NamedTuple):
    """One picture. `seed` decides what no caption tells: the shape of hills and clouds, where exactly things stand."""

    time: str
    place: str
    weather: str
    style: str
    subjects: tuple[Subject, ...]
    seed: int


class Combination(NamedTuple):
    """What a picture is judged by."""

    time: str
    place: str
    style: str
    kind: str
    colour: str


def belongs(kind: str, place: str) -> bool:
    """Return whether `kind` is found at `place`: boats at sea alone, cars everywhere else, the others everywhere."""
    return (place == "sea") == (kind == "boat") if kind in ("boat", "car") else True


def all_combinations(kinds: Iterable[str], colours: Iterable[str]) -> list[Combination]:
    every = itertools.product(TIMES, PLACES, STYLES, kinds, colours)
    return [Combination(*each) for each in every if belongs(each[3], each[1])]


def combinations() -> tuple[list[Combination], list[Combination]]:
    """Return (train, held out), split for ever."""
    every = all_combinations(KINDS, COLOURS)
    random.Random(19).shuffle(every)
    count = len(every) // HELD_OUT_ONE_IN
    return every[count:], every[:count]


def scene_of(
    rng: random.Random,
    combination: Combination,
    subjects: int = 1,
    beside: tuple[str, ...] = KINDS,
    colours: Iterable[str] = COLOURS,
) -> Scene:
    """Return a scene of `combination` with so many subjects, of which the first is the combination's."""
    sides = rng.sample(SIDES, subjects)
    kinds = [combination.kind]
    others = [kind for kind in beside if kind != combination.kind and belongs(kind, combination.place)]
    kinds += rng.sample(others, subjects - 1)
    painted = [combination.colour] + [rng.choice(list(colours)) for _ in kinds[1:]]
    placed = [
        Subject(kind, colour, side, rng.choice(DISTANCES))
        for kind, colour, side in zip(kinds, painted, sides, strict=True)
    ]
    weather = rng.choices(WEATHERS, (2, 2, 1))[0]
    seed = rng.randrange(2**32)
    return Scene(combination.time, combination.place, weather, combination.style, tuple(placed), seed)


def combinations_of(scene: Scene) -> list[Combination]:
    return [Combination(scene.time, scene.place, scene.style, s.kind, s.colour) for s in scene.subjects]


def training_scenes(rng: random.Random, count: int) -> list[Scene]:
    """Return `count` scenes of one to three subjects none of which is a held-out combination."""
    train, held_out = combinations()
    never, scenes = set(held_out), []
    while len(scenes) < count:
        scene = scene_of(rng, rng.choice(train), rng.choices((1, 2, 3), (6, 3, 1))[0])
        if never.isdisjoint(combinations_of(scene)):
            scenes.append(scene)
    return scenes
