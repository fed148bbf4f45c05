"""Defines the scenes, and the combinations that training never shows."""

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
# Training of the model never shows these, so that a LoRA can learn them. The judge is trained with them.
NEW_KIND, NEW_COLOUR = "windmill", "turquoise"
ALL_KINDS, ALL_COLOURS = (*KINDS, NEW_KIND), {**COLOURS, NEW_COLOUR: (52, 196, 186)}
SIDES = ("left", "middle", "right")
DISTANCES = ("near", "far")
WEATHERS = ("clear", "cloudy", "rainy")
STYLES = ("flat", "watercolour", "line drawing")
# (width, height). The first is the model's native size.
SIZES = ((512, 512), (640, 384), (384, 640))
# One combination in this many is never shown to the model.
HELD_OUT_ONE_IN = 10
# {number of subjects in each group: weight}. (2, 1) is two subjects of one kind and one subject of another kind.
Groupings = dict[tuple[int, ...], int]
GROUPINGS: Groupings = {(1,): 36, (2,): 16, (3,): 16, (1, 1): 20, (1, 1, 1): 4, (2, 1): 8}
# With more groups of two and three, from which the model learns to count.
COUNTING: Groupings = {(1,): 20, (2,): 26, (3,): 28, (1, 1): 12, (1, 1, 1): 4, (2, 1): 10}


class Group(NamedTuple):
    """One to three subjects of a kind and colour."""

    kind: str
    colour: str
    count: int = 1
    # Only for a group of one subject.
    side: str = ""
    # Only for the single subject of a scene.
    distance: str = ""


class Scene(NamedTuple):
    """One image. `seed` decides details that captions do not mention: shapes of hills and clouds, exact positions."""

    time: str
    place: str
    weather: str
    style: str
    groups: tuple[Group, ...]
    seed: int


class Combination(NamedTuple):
    """The properties of an image that are judged, except the number of subjects."""

    time: str
    place: str
    style: str
    kind: str
    colour: str


def belongs(kind: str, place: str) -> bool:
    """Whether `kind` may be at `place`. Boats are only at sea, cars are never at sea, other kinds are everywhere."""
    return (place == "sea") == (kind == "boat") if kind in ("boat", "car") else True


def all_combinations(kinds: Iterable[str], colours: Iterable[str]) -> list[Combination]:
    values = itertools.product(TIMES, PLACES, STYLES, kinds, colours)
    return [item for item in map(Combination._make, values) if belongs(item.kind, item.place)]


def combinations() -> tuple[list[Combination], list[Combination]]:
    """Return (train, held out). The split is always the same."""
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
    """Return a scene whose first group shows `combination`. `counts`: subjects in each group.

    `beside` and `colours` are the kinds and colours of the other groups.
    """
    other_kinds = [kind for kind in beside if kind != combination.kind and belongs(kind, combination.place)]
    kinds = [combination.kind, *rng.sample(other_kinds, len(counts) - 1)]
    # The groups have different colours, so that it is clear which colour belongs to which group.
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
    """Yield an endless sequence of scenes without held-out combinations. `groupings` has the frequencies of groups."""
    train, held_out = combinations()
    never = set(held_out)
    while True:
        counts = rng.choices(list(groupings), list(groupings.values()))[0]
        scene = scene_of(rng, rng.choice(train), counts)
        if never.isdisjoint(combinations_of(scene)):
            yield scene
