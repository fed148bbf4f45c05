"""A chart of horizontal bars, which nodes show as their image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

# pixels; LEFT is for the names, RIGHT for the words behind the longest bar. The letters can be read on a node, which is
# a third as wide
WIDTH, LEFT, RIGHT, TOP, STEP, BAR, BOTTOM, LETTERS = 900, 205, 190, 100, 50, 34, 50, 22
TEXT, LINE, PAPER = (40, 40, 40), (190, 50, 50), (250, 250, 248)
BLUE, ORANGE = (91, 122, 166), (226, 150, 74)
# a line much farther than the longest bar is off the chart
FARTHEST = 1.5


class Bar(NamedTuple):
    """`parts` lie one behind the other, as (length, colour), with `words` behind the last."""

    name: str
    parts: Sequence[tuple[float, Colour]]
    words: str


def draw_bars(
    title: str,
    bars: Sequence[Bar],
    legend: Sequence[tuple[str, Colour]] = (),
    line: tuple[float, str] | None = None,
    right: int = RIGHT,
) -> Image.Image:
    """Return the chart of `bars` on one scale; `title` has up to two lines, `line` is a length and its name."""
    image = Image.new("RGB", (WIDTH, TOP + len(bars) * STEP + BOTTOM), PAPER)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(LETTERS)
    longest = max(sum(length for length, _ in bar.parts) for bar in bars) or 1.0
    if line is not None and line[0] > FARTHEST * longest:
        line = None
    scale = (WIDTH - LEFT - right) / max(longest, line[0] if line else 0.0)
    draw.multiline_text((20, 16), title, TEXT, font)
    for index, bar in enumerate(bars):
        x, y = float(LEFT), TOP + index * STEP
        draw.text((20, y + 4), bar.name, TEXT, font)
        for length, colour in bar.parts:
            draw.rectangle((x, y, x + length * scale, y + BAR), colour)
            x += length * scale
        draw.text((x + 8, y + 4), bar.words, TEXT, font)
    bottom = TOP + len(bars) * STEP
    if line is not None:
        x = LEFT + line[0] * scale
        draw.line((x, TOP - 12, x, bottom), LINE, 2)
        draw.text((x - 90, bottom), line[1], LINE, font)
    x = 20.0
    for name, colour in legend:
        draw.text((x, bottom), name, colour, font)
        x += draw.textlength(name, font) + 20
    return image


def as_image(image: Image.Image) -> torch.Tensor:
    """Return `image` as an IMAGE [1, H, W, 3] in [0, 1]."""
    return torch.from_numpy(np.asarray(image, np.float32) / 255)[None]
