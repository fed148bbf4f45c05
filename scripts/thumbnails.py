"""The cards of the template browser, and the pack's icon and banner. `python scripts/thumbnails.py` writes the icons.

scripts/gallery.py draws each card from the images that its template shows after a run with the demo model. A template
that needs downloaded files gets an image of the demo model, because its model cannot run here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from setup import ROOT

sys.path.append(str(ROOT))
import sana_core  # noqa: E402
from sana_core.runtime.image_files import levels  # noqa: E402

# Pixels of a card, and of the line of words at its foot.
SIDE, FOOT, MARGIN, QUALITY = 512, 40, 14, 85
HEIGHT = SIDE - FOOT
PAPER, LINE, TEXT, FAINT = (24, 28, 36), (118, 185, 0), (240, 242, 245), (150, 158, 170)
# (title of the node that shows an image, label on the card), in rows
Rows = Sequence[Sequence[tuple[str, str]]]
ROWS: dict[str, Rows] = {
    "SANA 1 first image": [[("Save Image", "")]],
    "SANA image to image and inpaint": [
        [("Image to image", "image to image")],
        [("Inpaint", "inpaint")],
    ],
    "SANA second pass": [[("Before", "before")], [("After", "second pass")]],
    "SANA ControlNet": [[("Edges", "edges")], [("Result", "after")]],
    "SANA LoRA": [[("Without the LoRA", "before")], [("With the LoRA", "with the LoRA")]],
    "SANA train a LoRA": [[("Contact sheet", "20 images")], [("Image with the LoRA", "the LoRA")]],
}
# Prompt and seed for the demo model.
PROMPTS = {
    "SANA 1K and 2K": ("a watercolour of a pink mountain among green hills at noon", 1),
    "SANA 4K and 8K": ("a flat drawing of a blue house in the snow at night", 1),
    "SANA Sprint": ("a flat drawing of an orange car in the desert at dusk", 0),
    "SANA video from text or image": ("a flat drawing of a yellow boat on the sea at noon", 2),
}


def draw_card(name: str, shown: Mapping[str, Sequence[Image.Image]], report: str = "") -> Image.Image:
    """Return the card of a template. `shown` are the images on its nodes by title, `report` the text of SANA Doctor."""
    card = Image.new("RGB", (SIDE, SIDE), PAPER)
    if name in ROWS:
        draw_rows(card, [[(shown[title][0], words) for title, words in row] for row in ROWS[name]])
    elif name == "SANA batch on all GPUs":
        images = shown["Save Image"]
        draw_rows(card, [[(image, "") for image in images[start : start + 2]] for start in range(0, len(images), 2)])
    elif name == "SANA check this computer":
        draw_check(card, shown["SANA Plan"][0], report)
    else:
        prompt, seed = PROMPTS[name]
        options = {"width": 512, "height": 512, "seed": seed}
        (pixels,) = sana_core.generate([prompt], ROOT / "demo" / "sana-posters", **options)
        image = Image.fromarray(levels(pixels))
        if name == "SANA Sprint":
            draw_steps(card, image)
        elif name == "SANA video from text or image":
            draw_film(card, image)
        else:
            draw_sizes(card, image, [1, 2] if name == "SANA 1K and 2K" else [1, 2, 4, 8])
    words = name.removeprefix("SANA ") + ("" if report else " - demo model")
    ImageDraw.Draw(card).text((MARGIN, HEIGHT + 9), words, FAINT, ImageFont.load_default(20))
    return card


def label(card: Image.Image, x: float, y: float, words: str) -> None:
    draw, font = ImageDraw.Draw(card), ImageFont.load_default(20)
    draw.text((x + 8, y + 5), words, TEXT, font, stroke_width=2, stroke_fill=PAPER)


def draw_rows(card: Image.Image, rows: Sequence[Sequence[tuple[Image.Image, str]]]) -> None:
    """Fill the card with rows of (image, label)."""
    height = HEIGHT // len(rows)
    for number, row in enumerate(rows):
        for column, (image, words) in enumerate(row):
            left, right = (SIDE * edge // len(row) for edge in (column, column + 1))
            # The subject of an image is in its lower half.
            cell = ImageOps.fit(image, (right - left - 2, height - 2), Image.Resampling.LANCZOS, centering=(0.5, 0.7))
            card.paste(cell, (left, number * height))
            label(card, left, number * height, words)


def draw_sizes(card: Image.Image, image: Image.Image, thousands: Sequence[int]) -> None:
    """Frames show each size beside the largest one."""
    card.paste(ImageOps.fit(image, (SIDE, HEIGHT), Image.Resampling.LANCZOS))
    for size in thousands:
        width, height = (side * size // thousands[-1] for side in (SIDE, HEIGHT))
        ImageDraw.Draw(card).rectangle((0, HEIGHT - height, width, HEIGHT), outline=TEXT, width=3)
        label(card, 0, HEIGHT - height, f"{size}K")


def draw_steps(card: Image.Image, image: Image.Image) -> None:
    """Strips of the image with less and less noise."""
    pixels = np.asarray(ImageOps.fit(image, (SIDE, HEIGHT), Image.Resampling.LANCZOS), np.float32)
    noise = np.random.default_rng(0).normal(128, 70, pixels.shape)
    for step, share in enumerate((1.0, 0.4, 0.0)):
        left, right = (SIDE * edge // 3 for edge in (step, step + 1))
        strip = (share * noise + (1 - share) * pixels)[:, left:right]
        card.paste(Image.fromarray(strip.clip(0, 255).astype(np.uint8)), (left, 0))
        label(card, left, 0, ("noise", "step 1", "step 2")[step])


def draw_film(card: Image.Image, image: Image.Image) -> None:
    """A strip of film with frames of a camera that moves over the image, and the sign of a player."""
    draw = ImageDraw.Draw(card)
    frame = HEIGHT // 3
    for number in range(3):
        top, left = number * frame, 40 * number
        part = image.crop((left, 220, left + 430, 220 + 430 * (frame - 8) // 400))
        card.paste(part.resize((400, frame - 8), Image.Resampling.LANCZOS), (56, top + 4))
        for y in range(top + 12, top + frame - 12, 32):
            for x in (16, SIDE - 40):
                draw.rounded_rectangle((x, y, x + 24, y + 18), 5, TEXT)
    x, y = SIDE / 2, HEIGHT / 2
    corners = [(x + 60, y), (x - 42, y - 54), (x - 42, y + 54)]
    draw.polygon(corners, TEXT, PAPER, 4)


def draw_check(card: Image.Image, chart: Image.Image, report: str) -> None:
    """The first lines of the report above the chart of SANA Plan."""
    height = SIDE * chart.height // chart.width
    card.paste(chart.resize((SIDE, height), Image.Resampling.LANCZOS), (0, HEIGHT - height))
    draw = ImageDraw.Draw(card)
    rows = [[cell.strip() for cell in line.split("|") if cell.strip(" -#")] for line in report.splitlines()]
    lines = ["   ".join(row) for row in rows if row and not row[0].startswith(("<", "what"))]
    for number, line in enumerate(lines[: (HEIGHT - height) // 24]):
        colour = LINE if number < 2 else TEXT
        draw.text((MARGIN, 6 + 24 * number), line.strip("# ")[:60], colour, ImageFont.load_default(17))


def draw_sign(width: int, height: int) -> Image.Image:
    """Return the sign of the pack, as icon or as banner: shapes that the demo model can generate."""
    sign = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sign)
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
    return sign


def main() -> None:
    draw_sign(400, 400).save(ROOT / "docs" / "icon.png")
    draw_sign(1260, 540).save(ROOT / "docs" / "banner.png")


if __name__ == "__main__":
    main()
