"""What each decode does to real pictures: writes docs/decode.jpg, with the bundled checkpoint.

A mosaic of its training pictures is encoded once and decoded whole, in strips and in tiles, by us and by diffusers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sana_core  # noqa: E402
from sana_core.decode import Tiles  # noqa: E402
from sana_core.picture_files import levels  # noqa: E402

SIDE, TILE, OVERLAP, GAIN = 512, 128, 32, 4
PROMPTS = [
    f"a {color} {shape} on a {ground} background"
    for color, ground in (("red", "blue"), ("green", "white"), ("yellow", "black"), ("blue", "white"))
    for shape in ("circle", "square", "triangle", "star")
]


def mosaic() -> torch.Tensor:
    """Return 4 x 4 pictures [1, 3, 512, 512] that the bundled checkpoint draws."""
    pictures = sana_core.generate(PROMPTS, ROOT / "demo" / "sana-tiny", steps=12, width=128, height=128)
    rows = [torch.cat(list(pictures[start : start + 4]), dim=2) for start in range(0, 16, 4)]
    return torch.cat(rows, dim=1)[None]


@torch.no_grad()
def main() -> None:
    autoencoder = sana_core.load_autoencoder(ROOT / "demo" / "sana-tiny")
    latents = sana_core.encode_images(autoencoder, mosaic())
    budget = 30 * 10**6
    pictures = {
        "whole": autoencoder.decode(latents).sample,
        "strips": sana_core.decode_latents(autoencoder, latents),
        "strips in 30 MB": sana_core.decode_latents(autoencoder, latents, max_bytes=budget),
        f"tiles of {TILE} px": sana_core.decode_latents(
            autoencoder, latents, method="tiles", tiles=Tiles(TILE, OVERLAP)
        ),
    }
    autoencoder.enable_tiling(TILE, TILE, TILE - OVERLAP, TILE - OVERLAP)
    pictures[f"diffusers, tiles of {TILE} px"] = autoencoder.decode(latents).sample[..., :SIDE, :SIDE]
    whole = levels(pictures["whole"][0]).astype(int)
    sheet = Image.new("RGB", (SIDE * len(pictures) // 2, SIDE + 60), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for index, (name, pixels) in enumerate(pictures.items()):
        picture = levels(pixels[0])
        difference = np.abs(picture.astype(int) - whole)
        error = f"mean {difference.mean():.2f}, most {difference.max()} of 255"
        x = index * SIDE // 2
        for y, image in ((40, picture), (40 + SIDE // 2, (difference * GAIN).clip(0, 255).astype(np.uint8))):
            sheet.paste(Image.fromarray(image).resize((SIDE // 2, SIDE // 2), Image.Resampling.LANCZOS), (x, y))
        draw.text((x + 6, 4), name, "black", font)
        draw.text((x + 6, 20), error, "black", font)
        sys.stdout.write(f"{name}: {error}\n")
    draw.text(
        (6, SIDE + 42),
        f"above: the picture; below: its difference from the undivided decode, times {GAIN}",
        "black",
        font,
    )
    sheet.save(ROOT / "docs" / "decode.jpg", quality=90)


if __name__ == "__main__":
    main()
