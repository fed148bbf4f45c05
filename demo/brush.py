"""Antialiased shapes in fractions of the image's height: filled, with or without outlines, or with a shaky hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

# The ink is soft, because black lines would be most of the error of an autoencoder of this size.
INK, PAPER = (70, 70, 88), (250, 248, 242)
# In a line drawing, the exponent of the light that sky and land reflect.
WASHED = 0.36
# Width of outlines, as a fraction of the image's shorter side.
OUTLINE = 1 / 104
Colour = tuple[float, ...]
Points = Sequence[tuple[float, float]] | np.ndarray


def times(colour: Colour, light: Colour) -> Colour:
    return tuple(c * share for c, share in zip(colour, light, strict=True))


def between(a: Colour, b: Colour, share: float) -> Colour:
    return tuple(x + (y - x) * share for x, y in zip(a, b, strict=True))


def washed(colour: Colour) -> Colour:
    """Return a thin wash of `colour` on paper."""
    return tuple(paper * (max(c, 0) / 255) ** WASHED for c, paper in zip(colour, PAPER, strict=True))


def curve(points: Points, closed: bool = True) -> np.ndarray:
    """Return a smooth line [N, 2] through `points` (a uniform Catmull-Rom spline of 8 pieces a point)."""
    p = np.asarray(points, float)
    p = np.concatenate([p[-1:], p, p[:2]] if closed else [p[:1], p, p[-1:]])
    t = (np.arange(8) / 8)[:, None, None]
    a, b, c, d = p[:-3], p[1:-2], p[2:-1], p[3:]
    line = 0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
    line = line.swapaxes(0, 1).reshape(-1, 2)
    return line if closed else np.concatenate([line, p[-1:]])


def circle(x: float, y: float, rx: float, ry: float, start: float = 0.0, end: float = 360.0) -> np.ndarray:
    """Return an ellipse, or a part of it between two angles in degrees."""
    angle = np.radians(np.linspace(start, end, 49))
    return np.stack([x + rx * np.cos(angle), y + ry * np.sin(angle)], 1)


class Hand:
    """Moves points by up to `amount`, by a smooth random field that varies over a length of about `reach`."""

    def __init__(self, rng: np.random.Generator, amount: float, reach: float) -> None:
        angle, turn = rng.uniform(0, 2 * math.pi, (2, 6))
        self.waves = np.stack([np.cos(angle), np.sin(angle)]) * 2 * math.pi / reach * rng.uniform(0.6, 1.6, 6)
        self.phases, self.amount = turn, amount / 3

    def move(self, points: np.ndarray) -> np.ndarray:
        wave = np.sin(points @ self.waves + self.phases)
        return points + self.amount * np.stack([wave[:, :3].sum(1), wave[:, 3:].sum(1)], 1)


def dense(points: np.ndarray, spacing: float) -> np.ndarray:
    """Return `points` with interpolated points, so that the distance is at most `spacing`."""
    lengths = np.hypot(*np.diff(points, axis=0).T)
    pieces = np.maximum(np.ceil(lengths / spacing), 1).astype(int)
    at = np.concatenate([[0], np.cumsum(pieces)])
    where = np.arange(at[-1] + 1)
    return np.stack([np.interp(where, at, column) for column in points.T], 1)


class Canvas:
    """The image that is being drawn. y is from 0 (top) to 1 (bottom), x is from 0 (left) to `wide` (right)."""

    def __init__(self, width: int, height: int, inked: bool, hand: Hand | None) -> None:
        self.renderer = RendererAgg(width, height, 72)
        self.pixels = np.asarray(self.renderer.buffer_rgba())
        self.pixels[...] = 255
        self.context = self.renderer.new_gc()
        self.context.set_joinstyle("round")
        self.context.set_capstyle("round")
        self.context.set_snap(False)
        # Agg has y upwards and flips the image.
        self.place = Affine2D().scale(height, -height).translate(0, height)
        self.height, self.wide = height, width / height
        self.unit = min(width, height)
        self.inked, self.hand = inked, hand

    def draw(self, points: np.ndarray, fill: Colour | None, alpha: float, line: Colour | None, width: float) -> None:
        """Fill with a colour of 0 to 255, and draw the outline `width` pixels wide."""
        if self.hand is not None:
            points = self.hand.move(dense(points, 0.02))
        self.context.set_linewidth(0.0 if line is None else width)
        if line is not None:
            self.context.set_foreground((*(c / 255 for c in line), alpha), isRGBA=True)
        face = None if fill is None else (*(min(max(c / 255, 0.0), 1.0) for c in fill), alpha)
        self.renderer.draw_path(self.context, Path(points), self.place, face)


class Brush(NamedTuple):
    """Draws shapes in the coordinates of a subject, or of the canvas by default.

    A subject has height 1 and its foot at (0, 0), with y upwards. It is drawn at `origin`, enlarged by `size`. In line
    drawings, shapes that are not `coloured` are washed out. Shades have no outline.
    """

    canvas: Canvas
    origin: tuple[float, float] = (0.0, 0.0)
    size: float = 1.0
    across: int = 1
    up: int = 1

    def at(self, x: float, y: float, size: float, across: int = 1) -> Brush:
        return Brush(self.canvas, (x, y), size, across, -1)

    def fill(self, points: Points, colour: Colour, coloured: bool = True, outlined: bool = True) -> None:
        canvas = self.canvas
        shown = colour if coloured or not canvas.inked else washed(colour)
        ink = INK if canvas.inked and outlined else None
        placed = self._placed(points)
        canvas.draw(np.concatenate([placed, placed[:1]]), shown, 1.0, ink, canvas.unit * OUTLINE)

    def shade(self, points: Points, colour: Colour, alpha: float) -> None:
        """Add a transparent layer of `colour`. In a line drawing it is more transparent."""
        self.canvas.draw(self._placed(points), colour, alpha * (0.6 if self.canvas.inked else 1), None, 0.0)

    def box(self, left: float, y0: float, right: float, y1: float, colour: Colour, **how: bool) -> None:
        self.fill([(left, y0), (right, y0), (right, y1), (left, y1)], colour, **how)

    def stroke(self, points: Points, colour: Colour, width: float, alpha: float = 1.0, outlined: bool = True) -> None:
        """Draw a line with round ends. `width` is a fraction of the subject's height."""
        canvas, placed = self.canvas, self._placed(points)
        across, ink = width * self.size * canvas.height, canvas.unit * OUTLINE
        if canvas.inked and outlined:
            canvas.draw(placed, None, 1.0, INK, across + ink)
            across = max(across - ink, 1.0)
        canvas.draw(placed, None, alpha, colour, across)

    def outline(self, points: Points) -> None:
        """Draw an outline, but only in a line drawing."""
        if self.canvas.inked:
            self.canvas.draw(self._placed(points), None, 1.0, INK, self.canvas.unit * OUTLINE)

    def _placed(self, points: Points) -> np.ndarray:
        return np.asarray(points, float) * (self.across * self.size, self.up * self.size) + self.origin
