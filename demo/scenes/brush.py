"""Shapes in fractions of the picture's height, filled, or inked and filled."""

from __future__ import annotations

from typing import NamedTuple

from PIL import ImageDraw

# a soft pencil: black lines would be most of what an autoencoder of this size gets wrong
INK, PAPER = (92, 86, 92), (250, 248, 242)
# of the colours of sky and land, so much gives way to paper in a line drawing
WASHED = 0.6
OUTLINE = 1 / 110
Colour = tuple[float, ...]
Point = tuple[float, float]


def times(colour: Colour, light: Colour) -> Colour:
    return tuple(c * share for c, share in zip(colour, light, strict=True))


def between(a: Colour, b: Colour, share: float) -> Colour:
    return tuple(x + (y - x) * share for x, y in zip(a, b, strict=True))


class Brush(NamedTuple):
    """Draws on a picture `side` pixels high, from `origin` on and `size` as large; `up` is -1 where y counts upwards.

    Shapes that are not `coloured` are washed out where the brush is inked. Land is `wide` times as wide as high, things
    keep their form.
    """

    draw: ImageDraw.ImageDraw
    side: int
    inked: bool
    origin: Point = (0.0, 0.0)
    size: float = 1.0
    up: int = 1
    wide: float = 1.0

    def at(self, x: float, y: float, size: float) -> Brush:
        """Return a brush for a thing of height 1 whose foot is at (x, y), and whose y counts upwards."""
        return self._replace(origin=(x * self.wide, y), size=size, up=-1, wide=1.0)

    def polygon(self, points: list[Point], colour: Colour, coloured: bool = True) -> None:
        scaled = [self._pixel(point) for point in points]
        self.draw.polygon(scaled, fill=self._fill(colour, coloured))
        if self.inked:
            self.draw.line([*scaled, scaled[0]], fill=INK, width=round(self.side * OUTLINE), joint="curve")

    def box(self, left: float, y0: float, right: float, y1: float, colour: Colour, coloured: bool = True) -> None:
        self.polygon([(left, y0), (right, y0), (right, y1), (left, y1)], colour, coloured)

    def ellipse(self, x: float, y: float, rx: float, ry: float, colour: Colour, outlined: bool = True) -> None:
        across, down = self._pixel((x, y))
        rx, ry = (radius * self.size * self.side for radius in (rx, ry))
        ink = INK if self.inked and outlined else None
        box = (across - rx, down - ry, across + rx, down + ry)
        self.draw.ellipse(box, fill=self._fill(colour, True), outline=ink, width=round(self.side * OUTLINE))

    def line(self, points: list[Point], colour: Colour, width: float, outlined: bool = True) -> None:
        """Draw a line as wide as that fraction of the picture's height, whatever the size of the thing."""
        shown = INK if self.inked and outlined else self._fill(colour, True)
        self.draw.line([self._pixel(point) for point in points], fill=shown, width=max(1, round(width * self.side)))

    def _pixel(self, point: Point) -> Point:
        steps = (point[0] * self.wide, self.up * point[1])
        x, y = (at + by * self.size for at, by in zip(self.origin, steps, strict=True))
        return x * self.side, y * self.side

    def _fill(self, colour: Colour, coloured: bool) -> tuple[int, ...]:
        shown = colour if coloured or not self.inked else between(colour, PAPER, WASHED)
        return tuple(round(min(max(c, 0), 255)) for c in shown)
