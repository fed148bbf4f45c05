"""Bar charts for the user, and colours that other pictures share with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

# Sizes in pixels. LEFT is the space for names, RIGHT the space for words after the longest bar. LETTERS is large enough
# to read on a node, which shows the chart at a third of its width.
WIDTH, LEFT, RIGHT, TOP, STEP, BAR, BOTTOM, LETTERS = 900, 205, 190, 100, 50, 34, 50, 22
# Pixels from one line of the title to the next.
TITLE_STEP = 28
TEXT, LINE, PAPER = (40, 40, 40), (190, 50, 50), (250, 250, 248)
BLUE, ORANGE = (91, 122, 166), (226, 150, 74)
# The line is left out if it is farther right than this multiple of the longest bar.
FARTHEST = 2.5


class Bar(NamedTuple):
    """One bar of a chart."""

    # To the left of the bar.
    name: str
    # (length, colour), one after another.
    parts: Sequence[tuple[float, Colour]]
    # To the right of the bar.
    words: str


def draw_bars(
    title: str,
    bars: Sequence[Bar],
    legend: Sequence[tuple[str, Colour]] = (),
    line: tuple[float, str] | None = None,
    right: int = RIGHT,
) -> Image.Image:
    """Return the chart of `bars` on one scale. A long `title` is wrapped. `line` is a length and its name."""
    font = ImageFont.load_default(LETTERS)
    title = wrap(title, font)
    # Up to two lines of the title fit above the bars.
    top = TOP + max(0, len(title.splitlines()) - 2) * TITLE_STEP
    image = Image.new("RGB", (WIDTH, top + len(bars) * STEP + BOTTOM), PAPER)
    draw = ImageDraw.Draw(image)
    longest = max(sum(length for length, _ in bar.parts) for bar in bars) or 1.0
    if line is not None and line[0] > FARTHEST * longest:
        line = None
    scale = (WIDTH - LEFT - right) / max(longest, line[0] if line else 0.0)
    draw.multiline_text((20, 16), title, TEXT, font)
    for index, bar in enumerate(bars):
        x, y = float(LEFT), top + index * STEP
        draw.text((20, y + 4), bar.name, TEXT, font)
        for length, colour in bar.parts:
            draw.rectangle((x, y, x + length * scale, y + BAR), colour)
            x += length * scale
        draw.text((x + 8, y + 4), bar.words, TEXT, font)
    bottom = top + len(bars) * STEP
    if line is not None:
        x = LEFT + line[0] * scale
        draw.line((x, top - 12, x, bottom), LINE, 2)
        # The name of the line ends inside of the image.
        draw.text((min(x - 90, WIDTH - 20 - draw.textlength(line[1], font)), bottom), line[1], LINE, font)
    x = 20.0
    for name, colour in legend:
        draw.text((x, bottom), name, colour, font)
        x += draw.textlength(name, font) + 20
    return image


def wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Return `text` with line breaks, so that no line is wider than the chart."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in paragraph.split():
            longer = f"{line} {word}".strip()
            if line and font.getlength(longer) > WIDTH - 40:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return "\n".join(lines)


def as_image(image: Image.Image) -> torch.Tensor:
    """Return `image` as an IMAGE [1, H, W, 3] in [0, 1]."""
    return torch.from_numpy(np.asarray(image, np.float32) / 255)[None]
