"""Compares a decode in tiles with a decode in strips, magnified at the edge of a tile. Writes docs/decode.jpg.

A painting of 1024 x 1024 is encoded with the autoencoder of demo/sana-posters. The tiles have the default size of
diffusers and of ComfyUI's VAE Decode (Tiled): 512 px with an overlap of 64 px. It runs on the CPU in fp32.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import sana_core
from benchmarks import ROOT
from demo.painting import paint
from demo.world import Group, Scene
from sana_core.runtime.image_files import levels

SIDE, GAIN = 1024, 16
SCENE = Scene(
    "noon",
    "hills",
    "clear",
    "flat",
    (Group("house", "red", 1, "left"), Group("balloon", "yellow", 1, "right")),
    3,
)
# x, y, width, height in the image. The last row of tiles begins at 896 px and is blended until 960 px.
CROP = (300, 824, 340, 200)
PANEL, GAP, HEAD = (476, 280), 16, 44
PAPER, INK, FAINT = (255, 255, 255), (20, 24, 30), (96, 104, 116)


@torch.no_grad()
def decodes() -> dict[str, np.ndarray]:
    """Return {method: uint8 [height, width, 3]} of the undivided decode, the tiles and the strips."""
    autoencoder = sana_core.load_autoencoder(ROOT / "demo" / "sana-posters")
    pixels = torch.tensor(paint(SCENE, SIDE, SIDE)).permute(2, 0, 1)[None] / 127.5 - 1
    latents = sana_core.encode_images(autoencoder, pixels)
    undivided = autoencoder.decode(latents).sample
    strips = sana_core.decode_latents(autoencoder, latents, method="strips")
    autoencoder.enable_tiling()
    # diffusers returns complete tiles, which extend beyond the image.
    tiles = autoencoder.decode(latents).sample[..., :SIDE, :SIDE]
    images = {"whole": undivided, "tiles": tiles, "strips": strips}
    return {name: levels(pixels[0]) for name, pixels in images.items()}


def magnify(pixels: np.ndarray) -> Image.Image:
    x, y, width, height = CROP
    return Image.fromarray(pixels[y : y + height, x : x + width]).resize(PANEL, Image.Resampling.BICUBIC)


def draw(images: dict[str, np.ndarray]) -> Image.Image:
    """Return the figure: the scene, and a row for each method with its difference from the undivided decode."""
    side = 2 * (HEAD + PANEL[1]) - HEAD
    figure = Image.new("RGB", (side + 2 * (GAP + PANEL[0]), HEAD + side), PAPER)
    ink, large, small = ImageDraw.Draw(figure), ImageFont.load_default(22), ImageFont.load_default(17)
    scale = side / SIDE
    figure.paste(Image.fromarray(images["strips"]).resize((side, side), Image.Resampling.LANCZOS), (0, HEAD))
    x, y, width, height = (length * scale for length in CROP)
    ink.rectangle((x, HEAD + y, x + width, HEAD + y + height - 2), outline=PAPER, width=3)
    ink.text((0, 10), f"{SIDE} x {SIDE}, demo model's VAE", INK, large)
    titles = {"tiles": "Tiles of 512 px: a seam", "strips": "Strips, as in this pack: no seam"}
    for row, (name, title) in enumerate(titles.items()):
        difference = np.abs(images[name].astype(int) - images["whole"]).max(2)
        figures = f"x {GAIN}; mean {difference.mean():.2f}, max {difference.max()} of 255"
        sys.stdout.write(f"{name}: {figures}\n")
        top = row * (HEAD + PANEL[1])
        left, right = side + GAP, side + 2 * GAP + PANEL[0]
        ink.text((left, top + 10), title, INK, large)
        ink.text((right, top + 3), "difference from the undivided decode", INK, small)
        ink.text((right, top + 23), figures, FAINT, small)
        figure.paste(magnify(images[name]), (left, top + HEAD))
        amplified = (difference * GAIN).clip(0, 255).astype(np.uint8)
        figure.paste(magnify(amplified), (right, top + HEAD))
    return figure


def main() -> None:
    draw(decodes()).save(ROOT / "docs" / "decode.jpg", quality=90)


if __name__ == "__main__":
    main()
