"""Draw pictures of prompts and write them as PNG files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..reference import AUTO, REFERENCE_HELP, REFERENCES

EXAMPLE = """example:
  python -m sana_core generate "a red circle on a blue background" \\
      --checkpoint demo/sana-tiny --width 128 --height 128 --out output"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="+", help="one or more prompts")
    parser.add_argument("--checkpoint", required=True, help="a folder in the diffusers layout")
    parser.add_argument("--out", type=Path, default=Path("output"), help="folder for the PNG files")
    parser.add_argument("--seed", type=int, default=0, help="picture i of each prompt uses seed + i")
    parser.add_argument("--count", type=int, default=1, help="pictures of each prompt")
    parser.add_argument("--steps", type=int, help="20, or 2 for SANA-Sprint, if left out")
    parser.add_argument("--guidance", type=float, help="4.5 if left out")
    parser.add_argument("--sampler", help="flow_dpmpp_2m, or scm for SANA-Sprint, if left out")
    parser.add_argument("--pag-scale", type=float, default=0.0, help="perturbed-attention guidance, 1 to 3; 0 is off")
    parser.add_argument("--pag-blocks", default="", help="blocks to perturb, like 8 or 7,8")
    parser.add_argument("--compile", action="store_true", help="torch.compile, with CUDA graphs where there is CUDA")
    parser.add_argument("--width", type=int, default=1024, help="pixels, a multiple of 32")
    parser.add_argument("--height", type=int, default=1024, help="pixels, a multiple of 32")
    parser.add_argument("--negative-prompt", default="")
    parser.add_argument("--reference", choices=REFERENCES, default=AUTO, help=REFERENCE_HELP)


def run(arguments: argparse.Namespace) -> None:
    from PIL import Image

    from ..batch.folder import make_folder
    from ..generate import generate
    from ..picture_files import levels

    make_folder(arguments.out)
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
        sampler=arguments.sampler,
        pag_scale=arguments.pag_scale,
        pag_blocks=arguments.pag_blocks,
        compiled=arguments.compile,
        reference=arguments.reference,
    )
    for index, pixels in enumerate(images):
        prompt, offset = divmod(index, arguments.count)
        path = arguments.out / f"{prompt:05d}_{arguments.seed + offset}.png"
        Image.fromarray(levels(pixels)).save(path)
        sys.stdout.write(f"{path}\n")
