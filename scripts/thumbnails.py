"""Cards for the templates whose picture the bundled model cannot draw, and the pack's icon and banner.

`python scripts/thumbnails.py` writes them beside the workflows and into docs/. A card has name, size, the memory of the
graphics card that SANA Plan predicts, and the time where somebody has measured it.
"""

from __future__ import annotations

import math
import sys

from PIL import Image, ImageDraw, ImageFont
from setup import ROOT

sys.path.append(str(ROOT))
from sana_core.memory import fitting_cards, plan_memory  # noqa: E402

SIDE, MARGIN, QUALITY = 512, 36, 90
PAPER, LINE, TEXT, FAINT = (24, 28, 36), (118, 185, 0), (240, 242, 245), (150, 158, 170)
# (template, what it draws, variant, pixels, time); the times of 1K are NVIDIA's (README of NVlabs/Sana, A100)
CARDS = [
    ("SANA 1K", "1024 x 1024, 20 steps", "1.6B", 1024, "1.2 s on an A100, says NVIDIA"),
    ("SANA 2K", "2048 x 2048, 20 steps", "1.6B", 2048, "no GPU has timed it yet"),
    ("SANA 4K", "4096 x 4096, 20 steps", "1.6B", 4096, "no GPU has timed it yet"),
    ("SANA 4K on 8 GB", "4096 x 4096 in strips", "1.6B", 4096, "same pixels as in one piece"),
    ("SANA 4K on all GPUs", "4096 x 4096, rows shared out", "1.6B", 4096, "each GPU holds the model"),
    ("SANA 8K", "8192 x 8192, two passes", "1.6B", 8192, "no GPU has timed it yet"),
    ("SANA Sprint", "1024 x 1024, 2 steps", "sprint-1.6B", 1024, "0.24 s on an A100, says NVIDIA"),
    ("SANA best settings for this card", "a chart for this computer", "", 0, "no model needed"),
]


def draw_card(name: str, what: str, variant: str, side: int, time: str) -> Image.Image:
    picture = Image.new("RGB", (SIDE, SIDE), PAPER)
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, SIDE, 12), LINE)
    font = ImageFont.load_default(56)
    y = 70
    for line in lines(draw, name, font):
        draw.text((MARGIN, y), line, TEXT, font)
        y += 66
    draw.text((MARGIN, y + 16), what, LINE, ImageFont.load_default(30))
    plan = plan_memory(variant, side, side, 1, "bfloat16", True) if variant else None
    memory = fitting_cards(plan) if plan else "any card"
    draw.text((MARGIN, SIDE - 130), memory, TEXT, ImageFont.load_default(34))
    draw.text((MARGIN, SIDE - 78), time, FAINT, ImageFont.load_default(26))
    if side:
        # how large the picture is beside one of 1024 px, on a scale of its own for each doubling
        width = 40 + 30 * math.log2(side / 1024)
        draw.rectangle((SIDE - MARGIN - width, SIDE - 60 - width, SIDE - MARGIN, SIDE - 60), outline=LINE, width=3)
    return picture


def lines(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont) -> list[str]:
    """Return `text` in lines that fit the card."""
    out = [""]
    for word in text.split():
        longer = f"{out[-1]} {word}".strip()
        if out[-1] and draw.textlength(longer, font) > SIDE - 2 * MARGIN:
            out.append(word)
        else:
            out[-1] = longer
    return out


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
    for name, *words in CARDS:
        draw_card(name, *words).save(ROOT / "workflows" / f"{name}.jpg", quality=QUALITY)
    draw_sign(400, 400).save(ROOT / "docs" / "icon.png")
    draw_sign(1260, 540).save(ROOT / "docs" / "banner.png")


if __name__ == "__main__":
    main()
