"""Draw pictures of prompts and write them as PNG files."""

from __future__ import annotations

import argparse
import sys

from ..batch.plan import batch_pictures
from ..batch.png import file_name
from ..whole_files import check_free, make_folder, unfinished
from .options import add_drawing, cluster_of, say, settings_of

EXAMPLE = """example:
  python -m sana_core generate "a watercolour of a red lighthouse on the sea at dusk" \\
      --checkpoint demo/sana-scenes --width 256 --height 256 --out output"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="+", help="one or more prompts")
    parser.add_argument("--overwrite", action="store_true", help="replace images that are in the folder")
    parser.add_argument("--split", action="store_true", help="all devices share each image together")
    add_drawing(parser)


def run(arguments: argparse.Namespace) -> None:
    from PIL import Image

    from ..generate import generate
    from ..picture_files import LEVEL, levels

    pictures = batch_pictures(len(arguments.prompts), arguments.count, arguments.seed)
    paths = [arguments.out / file_name(picture) for picture in pictures]
    if not arguments.overwrite:
        check_free(paths)
    make_folder(arguments.out)
    where = {
        "devices": arguments.devices,
        "cluster": cluster_of(arguments),
        "chunk": arguments.chunk,
        "split": arguments.split,
        "say": say,
    }
    settings = settings_of(arguments)._asdict()
    seed, count = arguments.seed, arguments.count
    images = generate(arguments.prompts, arguments.checkpoint, seed, count, **where, **settings)
    for path, pixels in zip(paths, images, strict=True):
        with unfinished(path, replace=arguments.overwrite) as part:
            Image.fromarray(levels(pixels)).save(part, "PNG", compress_level=LEVEL)
        sys.stdout.write(f"{path}\n")
