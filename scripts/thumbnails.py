"""The cards of the templates that need released files, and the pack's icon and banner.

`python scripts/thumbnails.py` writes them beside the workflows and into docs/. What a released model would draw cannot
be shown here, so the demo model draws each card, and frames say how large the template's image is beside smaller ones.
scripts/gallery.py makes the other cards of what their templates save.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont, ImageOps
from setup import ROOT

sys.path.append(str(ROOT))
import sana_core  # noqa: E402
from sana_core.memory import fitting_cards, plan_memory  # noqa: E402
from sana_core.runtime.image_files import levels  # noqa: E402

# pixels of a card, and of the line of words at its foot
SIDE, FOOT, MARGIN, QUALITY = 512, 40, 14, 90
PAPER, LINE, TEXT, FAINT = (24, 28, 36), (118, 185, 0), (240, 242, 245), (150, 158, 170)


class Card(NamedTuple):
    """A prompt and a seed that the demo model draws, and the variant, the size in pixels and words of the template."""

    prompt: str
    seed: int
    variant: str
    pixels: int
    words: str = ""
    rows: int = 1  # that the image is divided into


CARDS = {
    "SANA 1K": Card("a watercolour of a red lighthouse on the sea at dusk", 1, "1.6B", 1024),
    "SANA 2K": Card("a watercolour of a pink mountain among green hills at noon", 1, "1.6B", 2048),
    "SANA 4K": Card("a flat drawing of a yellow boat on the sea at dusk", 4, "1.6B", 4096),
    "SANA 4K on 8 GB": Card(
        "a flat drawing of a red balloon over the desert at dawn", 1, "1.6B", 4096, "decodes in 2 GB"
    ),
    "SANA 4K on all GPUs": Card(
        "a flat drawing of a purple balloon among green hills at dawn", 0, "1.6B", 4096, rows=4
    ),
    "SANA 8K": Card("a flat drawing of a blue house in the snow at night", 1, "1.6B", 8192),
    "SANA Sprint": Card("a flat drawing of an orange car in the desert at dusk", 0, "sprint-1.6B", 1024, "in 2 steps"),
}
# of templates of videos: a prompt and a seed of the demo model, and words
VIDEO_CARDS = {
    "SANA text to video": ("a watercolour of a red lighthouse on the sea at dusk", 3, "832 x 480, 81 frames"),
    "SANA image to video": ("a flat drawing of a yellow boat on the sea at noon", 2, "from an image, 81 frames"),
    "SANA text to video 720p": ("a watercolour of a red balloon over the sea at dawn", 1, "1280 x 704, 81 frames"),
}


def draw_card(images: Sequence[Image.Image], words: str) -> Image.Image:
    """Return a square card of `images` in rows, which fill it, above `words`."""
    card = Image.new("RGB", (SIDE, SIDE), PAPER)
    across = math.ceil(math.sqrt(len(images)))
    first = len(images) % across or across
    rows = [images[:first], *(images[start : start + across] for start in range(first, len(images), across))]
    height = (SIDE - FOOT) // len(rows)
    for number, row in enumerate(rows):
        for column, image in enumerate(row):
            left, right = (SIDE * edge // len(row) for edge in (column, column + 1))
            # subjects stand in the lower half
            cell = ImageOps.fit(image, (right - left, height), Image.Resampling.LANCZOS, centering=(0.5, 0.7))
            card.paste(cell, (left, number * height))
    ImageDraw.Draw(card).text((MARGIN, SIDE - FOOT + 9), words, FAINT, ImageFont.load_default(20))
    return card


def draw_released(card: Card) -> Image.Image:
    """Return the card of a template that needs released files."""
    options = {"width": 512, "height": 512, "seed": card.seed}
    (pixels,) = sana_core.generate([card.prompt], ROOT / "demo" / "sana-posters", **options)
    memory = fitting_cards(plan_memory(card.variant, card.pixels, card.pixels, 1, "bfloat16", True))
    words = card.words or memory.replace("a GPU of ", "")
    drawn = draw_card([Image.fromarray(levels(pixels))], f"{card.pixels} px - {words} - demo model's image")
    draw, height = ImageDraw.Draw(drawn), SIDE - FOOT

    def label(x: float, y: float, text: str) -> None:
        draw.text((x + 8, y + 5), text, TEXT, ImageFont.load_default(18), stroke_width=1, stroke_fill=PAPER)

    for row in range(card.rows):
        top = height * row / card.rows
        draw.line((0, top, SIDE, top), TEXT, 2)
        label(0, top, f"GPU {row}" if card.rows > 1 else f"{card.pixels // 1024}K")
    for inside in (2**power for power in range(10, int(math.log2(card.pixels))) if card.rows == 1):
        width, top = SIDE * inside / card.pixels, height - height * inside / card.pixels
        draw.rectangle((0, top, width, height), outline=TEXT, width=2)
        label(0, top, f"{inside // 1024}K")
    return drawn


def draw_video(prompt: str, seed: int, words: str) -> Image.Image:
    """Return the card of a template that makes a video: an image with the sign that it plays."""
    (pixels,) = sana_core.generate([prompt], ROOT / "demo" / "sana-posters", width=512, height=512, seed=seed)
    drawn = draw_card([Image.fromarray(levels(pixels))], f"{words} - demo model's image")
    middle = SIDE / 2, (SIDE - FOOT) / 2
    corners = [(middle[0] + 60 * x, middle[1] + 60 * y) for x, y in ((1, 0), (-0.7, -0.9), (-0.7, 0.9))]
    ImageDraw.Draw(drawn).polygon(corners, TEXT, PAPER, 4)
    return drawn


def draw_sign(width: int, height: int) -> Image.Image:
    """Return the pack's sign, the shapes that the bundled model knows, as icon or as banner."""
    picture = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(picture)
    unit = height / 10
    left = width - height if width > height else 0
    draw.ellipse((left + unit, unit, left + 4.5 * unit, 4.5 * unit), (220, 50, 50))
    draw.rectangle((left + 5.5 * unit, unit, left + 9 * unit, 4.5 * unit), (60, 100, 220))
    corners = ((left + 2.75 * unit, 5.5 * unit), (left + 4.5 * unit, 9 * unit), (left + unit, 9 * unit))
    draw.polygon(corners, (240, 200, 40))
    draw.rectangle((left + 6.75 * unit, 5.5 * unit, left + 7.75 * unit, 9 * unit), LINE)
    draw.rectangle((left + 5.5 * unit, 6.75 * unit, left + 9 * unit, 7.75 * unit), LINE)
    if left:
        draw.text((unit, 2.6 * unit), "SANA", TEXT, ImageFont.load_default(round(2.6 * unit)))
        draw.text((unit, 6 * unit), "for ComfyUI, exact up to 8K", FAINT, ImageFont.load_default(round(0.75 * unit)))
    return picture


def main() -> None:
    for name, card in CARDS.items():
        draw_released(card).save(ROOT / "workflows" / f"{name}.jpg", quality=QUALITY)
    for name, card in VIDEO_CARDS.items():
        draw_video(*card).save(ROOT / "workflows" / f"{name}.jpg", quality=QUALITY)
    draw_sign(400, 400).save(ROOT / "docs" / "icon.png")
    draw_sign(1260, 540).save(ROOT / "docs" / "banner.png")


if __name__ == "__main__":
    main()
