"""Positions the subjects of a scene, as large as possible without touching each other."""

from __future__ import annotations

import random
from typing import NamedTuple

from .world import SIDES, Scene

MARGIN, GAP = 0.045, 0.015
# The boxes that a subject of height 1 fills: left, bottom, right, top.
BOXES: dict[str, tuple[tuple[float, float, float, float], ...]] = {
    "house": ((-0.52, 0, 0.52, 1),),
    "lighthouse": ((-0.2, 0, 0.2, 1),),
    "boat": ((-0.52, 0, 0.52, 0.3), (-0.36, 0.3, 0.4, 0.75), (-0.12, 0.75, 0.16, 1)),
    "tree": ((-0.12, 0, 0.12, 0.35), (-0.42, 0.35, 0.42, 1)),
    "balloon": ((-0.34, 0.3, 0.34, 1), (-0.12, 0, 0.12, 0.3)),
    "car": ((-0.95, 0, 0.95, 1),),
    # Its foot is behind the land, and its slopes may be behind other subjects.
    "mountain": ((-0.36, 0.5, 0.36, 1),),
    "windmill": ((-0.3, 0, 0.3, 0.55), (-0.45, 0.4, 0.45, 1)),
}
# Height of a single subject that is near, as a share of the image's height.
HEIGHTS = {
    "house": 0.46,
    "lighthouse": 0.64,
    "boat": 0.56,
    "tree": 0.54,
    "balloon": 0.5,
    "car": 0.29,
    "mountain": 0.54,
    "windmill": 0.56,
}
# SMALLEST ends the search, because some subjects do not fit into some ranks at any size: the depth of mountains is
# fixed.
FAR, SHRINK, SMALLEST = 0.78, 0.94, 0.25
SHARES = {1: 1.0, 2: 0.86, 3: 0.76}
ACROSS = {"left": 0.26, "middle": 0.5, "right": 0.74}
# {number of subjects: ranks}. A rank has the horizontal positions and the depths (0 is near, 1 is far).
RANKS = {
    1: (((0.5,), (0.0,)),),
    2: (((0.27, 0.73), (0.1, 0.35)), ((0.27, 0.73), (0.4, 0.05)), ((0.3, 0.7), (1.0, 0.0)), ((0.3, 0.7), (0.0, 1.0))),
    3: (
        ((0.18, 0.5, 0.82), (0.1, 0.5, 0.1)),
        ((0.18, 0.5, 0.82), (0.4, 0.0, 0.5)),
        ((0.18, 0.5, 0.82), (0.0, 1.0, 0.0)),
        ((0.18, 0.5, 0.82), (1.0, 0.0, 1.0)),
        ((0.3, 0.7, 0.3), (1.0, 0.5, 0.0)),
    ),
}


class Placed(NamedTuple):
    """A subject with its foot at (x, y). Lengths are fractions of the image's height."""

    kind: str
    colour: str
    x: float
    y: float
    height: float
    depth: float


Box = tuple[float, float, float, float]


def boxes_of(subject: Placed) -> list[Box]:
    """Return the boxes that `subject` fills: left, top, right, bottom, with y downwards."""
    x, y, size = subject.x, subject.y, subject.height
    return [(x + a * size, y - d * size, x + c * size, y - b * size) for a, b, c, d in BOXES[subject.kind]]


def apart(one: Placed, other: Placed) -> bool:
    return not any(
        a[0] < b[2] + GAP and b[0] < a[2] + GAP and a[1] < b[3] + GAP and b[1] < a[3] + GAP
        for a in boxes_of(one)
        for b in boxes_of(other)
    )


def foot(kind: str, place: str, depth: float) -> float:
    """Return the y of a subject's foot at `depth`."""
    if kind == "mountain":
        # Behind the land, or behind the roofs.
        return {"sea": 0.6, "street": 0.52}.get(place, 0.63)
    return (0.56 - 0.1 * depth) if kind == "balloon" else 0.92 - 0.19 * depth


def placed(scene: Scene, across: list[float], depths: list[float], share: float, wide: float) -> list[Placed]:
    """Return the subjects of `scene` from left to right, at the positions `across` and `depths`.

    Their height is `share` of a single subject's height.
    """
    groups = sorted(scene.groups, key=lambda group: SIDES.index(group.side or "middle"))
    kinds = [(group.kind, group.colour) for group in groups for _ in range(group.count)]
    things = []
    for (kind, colour), x, depth in zip(kinds, across, depths, strict=True):
        height = HEIGHTS[kind] * share * (1 - 0.2 * depth)
        left = -min(box[0] for box in BOXES[kind]) * height + MARGIN
        right = max(box[2] for box in BOXES[kind]) * height + MARGIN
        x = min(max(x * wide, left), wide - right)
        y = max(foot(kind, scene.place, depth), height + MARGIN)
        things.append(Placed(kind, colour, x, y, height, depth))
    return things


def fits(things: list[Placed], wide: float) -> bool:
    inside = all(box[0] >= MARGIN - 1e-6 and box[2] <= wide - MARGIN + 1e-6 for t in things for box in boxes_of(t))
    return inside and all(apart(one, other) for i, one in enumerate(things) for other in things[:i])


def lay_out(scene: Scene, wide: float, rng: random.Random) -> list[Placed]:
    """Return the subjects of `scene`, the furthest first, for an image `wide` times as wide as high."""
    count, alone = sum(group.count for group in scene.groups), scene.groups[0]
    sided = any(group.side for group in scene.groups)
    ranks = [rank for rank in RANKS[count] if not sided or list(rank[0]) == sorted(rank[0])]
    rng.shuffle(ranks)
    best: list[Placed] = []
    largest = SMALLEST
    for across, depths in ranks:
        if count == 1:
            across, depths = (ACROSS[alone.side],), (0.75 if alone.distance == "far" else 0.0,)
        at = [x + rng.uniform(-0.02, 0.02) for x in across]
        deep = [min(max(depth + rng.uniform(-0.1, 0.1), 0.0), 1.0) for depth in depths]
        share = SHARES[count] * (FAR if alone.distance == "far" else rng.uniform(0.92, 1.0))
        while not fits(things := placed(scene, at, deep, share, wide), wide) and share > SMALLEST:
            share *= SHRINK
        # Another rank is only used if the subjects can be clearly larger.
        if share > largest:
            best, largest = things, 1.05 * share
    return sorted(best, key=lambda subject: (subject.kind != "mountain", -subject.depth))
