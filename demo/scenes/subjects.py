"""What stands, floats or flies in a scene, each of about height 1 with its foot at (0, 0)."""

from __future__ import annotations

from collections.abc import Callable

from .brush import Brush, Colour

# what becomes of a colour in the light of the hour
Lit = Callable[[Colour], Colour]


def house(brush: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    brush.box(-0.36, 0, 0.36, 0.52, colour)
    brush.polygon([(-0.45, 0.5), (0, 0.95), (0.45, 0.5)], lit((96, 66, 60)))
    brush.box(-0.08, 0, 0.08, 0.28, lit((84, 58, 46)))
    for x in (-0.22, 0.22):
        brush.box(x - 0.07, 0.26, x + 0.07, 0.4, lamp)


def lighthouse(brush: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    # white stripes would not show beside a white tower
    other = (70, 74, 84) if min(colour) > 0.8 * max(colour) else (236, 232, 226)
    for i in range(5):
        low, high = 0.18 * i, 0.18 * (i + 1)
        foot, top = (0.2 - 0.09 * y for y in (low, high))
        brush.polygon([(-foot, low), (foot, low), (top, high), (-top, high)], lit(other) if i % 2 else colour)
    brush.box(-0.1, 0.9, 0.1, 1.05, lamp)
    brush.polygon([(-0.15, 1.05), (0, 1.2), (0.15, 1.05)], lit((70, 62, 66)))


def boat(brush: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    brush.line([(0, 0.2), (0, 0.98)], lit((96, 70, 52)), 0.008)
    brush.polygon([(0.04, 0.95), (0.04, 0.3), (0.42, 0.3)], lit((238, 234, 224)))
    brush.polygon([(-0.05, 0.85), (-0.05, 0.3), (-0.34, 0.3)], lit((226, 220, 208)))
    brush.polygon([(-0.52, 0.26), (0.52, 0.26), (0.36, 0), (-0.36, 0)], colour)


def tree(brush: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    brush.box(-0.06, 0, 0.06, 0.4, lit((110, 78, 54)))
    for x, y, r in ((-0.2, 0.52, 0.22), (0.2, 0.52, 0.22), (0.0, 0.74, 0.25)):
        brush.ellipse(x, y, r, r, colour)
    brush.ellipse(0, 0.6, 0.24, 0.2, colour, outlined=False)  # the crown is one shape


def balloon(brush: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    for x in (-1, 1):
        brush.line([(0.25 * x, 0.9), (0.08 * x, 0.5)], lit((90, 74, 62)), 0.004)
    brush.box(-0.1, 0.4, 0.1, 0.55, lit((140, 98, 60)))
    brush.polygon([(-0.3, 0.94), (0.3, 0.94), (0.1, 0.64), (-0.1, 0.64)], colour)
    brush.ellipse(0, 1.1, 0.35, 0.36, colour)


def car(brush: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    brush.polygon([(-0.3, 0.34), (-0.18, 0.58), (0.2, 0.58), (0.34, 0.34)], colour)
    brush.polygon([(-0.2, 0.35), (-0.12, 0.52), (0.14, 0.52), (0.23, 0.35)], lit((196, 220, 232)))
    brush.box(-0.52, 0.1, 0.54, 0.36, colour)
    for x in (-0.3, 0.3):
        brush.ellipse(x, 0.1, 0.12, 0.12, lit((38, 38, 42)))
        brush.ellipse(x, 0.1, 0.05, 0.05, lit((170, 172, 176)))


def mountain(brush: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    # white snow would not show on a white mountain
    snow = (120, 130, 150) if min(colour) > 0.8 * max(colour) else (252, 252, 255)
    brush.polygon([(-0.62, 0), (0, 1), (0.62, 0)], colour)
    brush.polygon([(-0.155, 0.75), (0, 1), (0.155, 0.75), (0.05, 0.7), (0, 0.76), (-0.06, 0.69)], lit(snow))


def windmill(brush: Brush, colour: Colour, lit: Lit, lamp: Colour) -> None:
    brush.polygon([(-0.24, 0), (0.24, 0), (0.14, 0.62), (-0.14, 0.62)], colour)
    brush.polygon([(-0.17, 0.62), (0, 0.8), (0.17, 0.62)], lit((84, 70, 74)))
    for x, y in ((1, 1), (-1, 1), (-1, -1), (1, -1)):
        sail = [(0.04, -0.04), (0.3, 0.22), (0.22, 0.3), (-0.04, 0.04)]
        brush.polygon([(x * right, 0.66 + y * up) for right, up in sail], lit((240, 234, 220)))


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
