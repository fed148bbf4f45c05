"""Draws the subjects of a scene. A subject has height 1 and its foot at (0, 0), and the light comes from the left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .brush import Brush, Colour, between, circle, curve

# Returns a colour in the light of the hour.
Lit = Callable[[Colour], Colour]
DARK = (30, 26, 60)


def shaded(colour: Colour, share: float = 0.26) -> Colour:
    return between(colour, DARK, share)


def pale(colour: Colour) -> bool:
    return min(colour) > 0.8 * max(colour)


def house(b: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    """A gable in the light, a long side in the shade."""
    roof = lit((122, 70, 62))
    b.box(0.2, 0.62, 0.31, 0.98, lit((150, 104, 90)))
    b.fill([(0.02, 0), (0.46, 0), (0.46, 0.5), (0.02, 0.5)], shaded(colour))
    b.fill([(-0.46, 0), (0.02, 0), (0.02, 0.52), (-0.22, 0.84), (-0.46, 0.52)], colour)
    b.fill([(-0.22, 0.93), (0.3, 0.93), (0.53, 0.46), (0.06, 0.46)], roof)
    b.fill([(-0.22, 0.93), (-0.22, 0.8), (-0.47, 0.45), (-0.53, 0.5)], shaded(roof, 0.15))
    b.fill([(-0.22, 0.93), (-0.22, 0.8), (0.0, 0.46), (0.075, 0.46)], shaded(roof, 0.35), outlined=False)
    b.box(-0.32, 0, -0.13, 0.34, lit((92, 62, 56)))
    b.box(0.13, 0.17, 0.35, 0.36, lamp)
    b.fill(circle(-0.225, 0.56, 0.07, 0.07), lamp)


def lighthouse(b: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    other = lit((86, 92, 110)) if pale(colour) else lit((246, 242, 234))

    def half(y: float) -> float:
        return 0.17 - 0.085 * y / 0.74

    rock = [(-0.24, 0.0), (-0.2, 0.05), (0.0, 0.07), (0.2, 0.05), (0.24, 0.0), (0.0, -0.02)]
    b.fill(curve(rock), lit((120, 112, 112)))
    for i in range(5):
        low, high = 0.03 + 0.142 * i, 0.03 + 0.142 * (i + 1)
        band = [(-half(low), low), (half(low), low), (half(high), high), (-half(high), high)]
        b.fill(band, other if i % 2 else colour)
    b.shade([(0.02, 0.03), (half(0.03), 0.03), (half(0.74), 0.74), (0.01, 0.74)], DARK, 0.24)
    b.box(-0.065, 0.77, 0.065, 0.89, lamp)
    b.box(-0.13, 0.735, 0.13, 0.775, lit((74, 70, 84)))
    dome = np.concatenate([circle(0, 0.885, 0.095, 0.1, 0, 180), [(-0.095, 0.885)]])
    b.fill(dome, other if pale(colour) else colour)


def boat(b: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    sail = lit((252, 246, 234))
    b.fill([(-0.012, 0.28), (0.022, 0.28), (0.022, 0.99), (-0.012, 0.99)], lit((104, 76, 60)), outlined=False)
    main = [(0.05, 0.34), *curve([(0.44, 0.34), (0.3, 0.62), (0.05, 0.95)], closed=False)]
    b.fill(main, sail)
    b.shade([(0.05, 0.34), (0.44, 0.34), (0.4, 0.42), (0.05, 0.5)], DARK, 0.12)
    jib = [(-0.05, 0.88), *curve([(-0.05, 0.36), (-0.2, 0.34), (-0.4, 0.36)], closed=False)]
    b.fill(jib, between(sail, colour, 0.45))
    hull = [(-0.53, 0.28), *curve([(0.53, 0.29), (0.46, 0.1), (0.34, 0.0)], closed=False)]
    hull += [*curve([(-0.36, 0.0), (-0.46, 0.12), (-0.53, 0.28)], closed=False)]
    b.fill(hull, colour)
    b.shade([(-0.43, 0.08), (0.44, 0.08), (0.35, 0.0), (-0.37, 0.0)], DARK, 0.35)
    b.shade([(-0.52, 0.27), (0.52, 0.28), (0.51, 0.235), (-0.5, 0.225)], (255, 255, 255), 0.4)


# x, y and radius of the puffs of a tree's crown
CROWN = (
    (-0.24, 0.5, 0.2),
    (0.24, 0.49, 0.2),
    (-0.19, 0.72, 0.21),
    (0.2, 0.71, 0.2),
    (0.0, 0.81, 0.19),
    (0.0, 0.55, 0.25),
)


def tree(b: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    bark = lit((116, 80, 60))
    trunk = [(-0.1, 0), (-0.055, 0.1), (-0.05, 0.4), (0.05, 0.4), (0.055, 0.1), (0.1, 0)]
    b.fill(trunk, bark)
    b.shade([(0.005, 0), (0.1, 0), (0.055, 0.1), (0.05, 0.4), (0.005, 0.4)], DARK, 0.3)
    # Draw all puffs with outlines first. The smaller puffs without outlines then cover the inner lines.
    for x, y, r in CROWN:
        b.fill(circle(x, y, r, r), colour)
    for x, y, r in CROWN:
        b.fill(circle(x, y, 0.94 * r, 0.94 * r), colour, outlined=False)
    below = [(0.42, 0.5), (0.3, 0.34), (0.08, 0.32), (-0.22, 0.34)]
    below += [(-0.02, 0.42), (0.18, 0.46), (0.24, 0.6), (0.36, 0.66)]
    b.fill(curve(below), shaded(colour, 0.2), outlined=False)
    light = between(colour, (255, 255, 236), 0.24)
    for x, y, r in ((-0.2, 0.76, 0.1), (-0.02, 0.86, 0.085), (-0.25, 0.55, 0.075)):
        b.fill(circle(x, y, 1.15 * r, r), light, outlined=False)


def balloon(b: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    rope, dark = lit((104, 84, 74)), shaded(colour, 0.24)
    for x in (-1, 1):
        b.stroke([(0.13 * x, 0.32), (0.075 * x, 0.12)], rope, 0.022)

    half = [(0.1, 0.3), (0.2, 0.4), (0.32, 0.56), (0.335, 0.7), (0.27, 0.87), (0.12, 0.975), (0.0, 1.0)]
    side = curve(half, closed=False)

    def gore(left: float, right: float) -> np.ndarray:
        """The envelope between two shares of its half width."""
        return np.concatenate([side * (right, 1), side[::-1] * (left, 1)])

    b.fill(gore(-1, 1), colour)
    b.fill(gore(0.62, 1), shaded(colour, 0.36), outlined=False)
    b.fill(gore(-0.24, 0.24), dark, outlined=False)
    b.fill(gore(-1, -0.62), dark, outlined=False)
    b.outline(gore(-1, 1))
    b.box(-0.1, 0.27, 0.1, 0.32, dark, outlined=False)
    b.fill([(-0.09, 0.13), (0.09, 0.13), (0.075, 0.0), (-0.075, 0.0)], lit((166, 118, 74)))


def car(b: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    glass, tyre = lit((204, 228, 238)), lit((42, 42, 52))
    cabin = [(-0.58, 0.55), *curve([(-0.42, 0.93), (-0.3, 1.0), (0.14, 1.0), (0.26, 0.93)], closed=False), (0.52, 0.55)]
    b.fill(cabin, colour)
    b.fill([(-0.45, 0.57), (-0.33, 0.88), (-0.1, 0.88), (-0.1, 0.57)], glass, outlined=False)
    b.fill([(0.0, 0.57), (0.0, 0.88), (0.18, 0.88), (0.37, 0.57)], glass, outlined=False)
    upper = [(-0.94, 0.34), (-0.9, 0.52), (-0.6, 0.6), (0.5, 0.6), (0.86, 0.5), (0.95, 0.36)]
    body = [(-0.92, 0.2), *curve(upper, closed=False), (0.94, 0.2)]
    b.fill(body, colour)
    b.fill([(-0.92, 0.31), (0.945, 0.31), (0.94, 0.18), (-0.92, 0.18)], shaded(colour, 0.32), outlined=False)
    b.fill(circle(0.85, 0.43, 0.055, 0.065), (255, 240, 180), outlined=False)
    for x in (-0.52, 0.52):
        b.fill(circle(x, 0.2, 0.2, 0.2), tyre)
        b.fill(circle(x, 0.2, 0.09, 0.09), lit((206, 206, 212)), outlined=False)


def mountain(b: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    snow = lit((150, 160, 184)) if pale(colour) else lit((252, 252, 255))
    ridge = [(0.0, 1.0), (0.05, 0.78), (-0.03, 0.6), (0.07, 0.4), (-0.02, 0.2), (0.06, -0.05)]
    b.fill([(0, 1), (0.2, 0.72), (0.3, 0.64), (0.7, -0.05), (-0.7, -0.05), (-0.32, 0.55), (-0.2, 0.66)], colour)
    b.fill([*ridge, (0.7, -0.05), (0.3, 0.64), (0.2, 0.72)], shaded(colour, 0.3), outlined=False)
    cap = [(0, 1), (0.2, 0.72), (0.14, 0.66), (0.08, 0.73), (0.02, 0.63), (-0.06, 0.72), (-0.12, 0.62), (-0.2, 0.66)]
    b.fill(cap, snow)
    far = [(0, 1), (0.2, 0.72), (0.14, 0.66), (0.08, 0.73), (0.045, 0.68), (0.05, 0.78)]
    b.fill(far, shaded(snow, 0.2), outlined=False)


def windmill(b: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    b.fill([(-0.24, 0), (0.24, 0), (0.15, 0.62), (-0.15, 0.62)], colour)
    b.shade([(0.03, 0), (0.24, 0), (0.15, 0.62), (0.02, 0.62)], DARK, 0.24)
    b.fill(np.concatenate([circle(0, 0.61, 0.18, 0.15, 0, 180), [(-0.18, 0.61)]]), lit((92, 74, 82)))
    b.box(-0.07, 0, 0.07, 0.2, lit((92, 62, 56)))
    for x, y in ((1, 1), (-1, 1), (-1, -1), (1, -1)):
        b.stroke([(0, 0.64), (0.24 * x, 0.64 + 0.24 * y)], lit((96, 74, 64)), 0.03)
        sail = [(0.09, 0.05), (0.28, 0.24), (0.36, 0.16), (0.17, -0.03)]
        b.fill([(x * right, 0.64 + y * up) for right, up in sail], lit((248, 242, 228)))


SUBJECTS: dict[str, Callable[[Brush, Colour, Lit, Colour], None]] = {
    "house": house,
    "lighthouse": lighthouse,
    "boat": boat,
    "tree": tree,
    "balloon": balloon,
    "car": car,
    "mountain": mountain,
    "windmill": windmill,
}
