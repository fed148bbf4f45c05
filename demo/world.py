"""What a scene may show, and which combinations are never trained on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

TIMES = ("dawn", "noon", "dusk", "night")
PLACES = ("sea", "hills", "desert", "snow", "street")
KINDS = ("house", "lighthouse", "boat", "tree", "balloon", "car", "mountain")
COLOURS = {
    "red": (212, 50, 44),
    "orange": (240, 136, 30),
    "yellow": (248, 208, 52),
    "green": (42, 146, 74),
    "blue": (44, 94, 208),
    "purple": (128, 64, 170),
    "pink": (244, 146, 188),
    "white": (250, 248, 242),
}
# what the model is never shown, for a LoRA to learn; the wide judge knows it
NEW_KIND, NEW_COLOUR = "windmill", "turquoise"
ALL_KINDS, ALL_COLOURS = (*KINDS, NEW_KIND), {**COLOURS, NEW_COLOUR: (52, 196, 186)}
SIDES = ("left", "middle", "right")
DISTANCES = ("near", "far")
WEATHERS = ("clear", "cloudy", "rainy")
STYLES = ("flat", "watercolour", "line drawing")
# width, height; the first is the model's own size
SIZES = ((512, 512), (640, 384), (384, 640))
# of the combinations of time, place, style, subject and colour, one in this many is never shown to the model
HELD_OUT_ONE_IN = 10
# how many subjects of which kinds a scene has: one, two or three alike, two or three different ones, two and another
Groupings = dict[tuple[int, ...], int]
GROUPINGS: Groupings = {(1,): 36, (2,): 16, (3,): 16, (1, 1): 20, (1, 1, 1): 4, (2, 1): 8}
# more of two and three alike, of which numbers are learnt
COUNTING: Groupings = {(1,): 20, (2,): 26, (3,): 28, (1, 1): 12, (1, 1, 1): 4, (2, 1): 10}


class Group(NamedTuple):
    """One to three subjects of a kind and colour. Only one that is alone of its kind has a side, and only one that is
    alone in its scene a distance; else they are empty."""

    kind: str
    colour: str
    count: int = 1
    side: str = ""
    distance: str = ""


class Scene(NamedTuple):
    """One picture. `seed` decides what no caption tells: the shape of hills and clouds, where exactly things stand."""

    time: str
    place: str
    weather: str
    style: str
    groups: tuple[Group, ...]
    seed: int


class Combination(NamedTuple):
    """What a picture is judged by, beside the number of its subjects."""

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
    counts: tuple[int, ...] = (1,),
    beside: Iterable[str] = KINDS,
    colours: Iterable[str] = COLOURS,
) -> Scene:
    """Return a scene of `combination` with as many subjects in each group, of which the first is the combination's."""
    others = [kind for kind in beside if kind != combination.kind and belongs(kind, combination.place)]
    kinds = [combination.kind, *rng.sample(others, len(counts) - 1)]
    # colours of different subjects differ, lest nobody could say whose is whose
    painted = [colour for colour in colours if colour != combination.colour]
    painted = [combination.colour, *rng.sample(painted, len(counts) - 1)]
    if counts == (1,):
        sides = [rng.choice(SIDES)]
    elif len(counts) == 3:
        sides = rng.sample(SIDES, 3)
    else:
        left_first = rng.random() < 0.5
        sides = ["left", "right"] if left_first else ["right", "left"]
    distance = rng.choices(DISTANCES, (2, 1))[0] if counts == (1,) else ""
    groups = tuple(
        Group(kind, colour, count, side if count == 1 else "", distance)
        for kind, colour, count, side in zip(kinds, painted, counts, sides[: len(counts)], strict=True)
    )
    weather = rng.choices(WEATHERS, (5, 4, 1))[0]
    return Scene(combination.time, combination.place, weather, combination.style, groups, rng.randrange(2**32))


def combinations_of(scene: Scene) -> list[Combination]:
    return [Combination(scene.time, scene.place, scene.style, group.kind, group.colour) for group in scene.groups]


def training_scenes(rng: random.Random, groupings: Groupings = GROUPINGS) -> Iterator[Scene]:
    """Yield scenes for ever none of which shows a held-out combination, with groups as often as `groupings` says."""
    train, held_out = combinations()
    never = set(held_out)
    while True:
        counts = rng.choices(list(groupings), list(groupings.values()))[0]
        scene = scene_of(rng, rng.choice(train), counts)
        if never.isdisjoint(combinations_of(scene)):
            yield scene
