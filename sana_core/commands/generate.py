"""Draw pictures of prompts and write them as PNG files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EXAMPLE = """example:
  python -m sana_core generate "a red circle on a blue background" \\
      --checkpoint demo/sana-tiny --width 128 --height 128 --out output"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="+", help="one or more prompts")
    parser.add_argument("--checkpoint", required=True, help="a folder in the diffusers layout")
    parser.add_argument("--out", type=Path, default=Path("output"), help="folder for the PNG files")
    parser.add_argument("--seed", type=int, default=0, help="picture i of each prompt uses seed + i")
    parser.add_argument("--count", type=int, default=1, help="pictures of each prompt")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.5)
    parser.add_argument("--width", type=int, default=1024, help="pixels, a multiple of 32")
    parser.add_argument("--height", type=int, default=1024, help="pixels, a multiple of 32")
    parser.add_argument("--negative-prompt", default="")


def run(arguments: argparse.Namespace) -> None:
    from PIL import Image

    from ..generate import generate

    images = generate(
        arguments.prompts,
        arguments.checkpoint,
        seed=arguments.seed,
        count=arguments.count,
        steps=arguments.steps,
        guidance=arguments.guidance,
        width=arguments.width,
        height=arguments.height,
        negative_prompt=arguments.negative_prompt,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    pixels = ((images + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    for index, picture in enumerate(pixels):
        prompt, offset = divmod(index, arguments.count)
        path = arguments.out / f"{prompt:05d}_{arguments.seed + offset}.png"
        Image.fromarray(picture).save(path)
        sys.stdout.write(f"{path}\n")
