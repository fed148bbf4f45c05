"""Draw pictures of prompts and write them as PNG files."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..batch.plan import Picture, batch_pictures
from ..batch.png import ENTRY, file_name
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
    from PIL import Image, PngImagePlugin

    from ..generate import generate
    from ..picture_files import LEVEL, levels

    pictures = batch_pictures(len(arguments.prompts), arguments.of or arguments.count, arguments.seed)
    paths = [arguments.out / file_name(picture) for picture in pictures]
    if not arguments.overwrite:
        check_free(paths)
    make_folder(arguments.out)
    report: dict[str, Any] = {}
    where: dict[str, Any] = {
        "devices": arguments.devices,
        "cluster": cluster_of(arguments),
        "chunk": arguments.chunk,
        "split": arguments.split,
        "say": say,
        "best": arguments.best,
        "of": arguments.of,
        "scorer": arguments.scorer,
        "after": arguments.after,
        "report": report,
    }
    settings = settings_of(arguments)._asdict()
    seed, count = arguments.seed, arguments.count
    images = generate(arguments.prompts, arguments.checkpoint, seed, count, **where, **settings)
    texts = [PngImagePlugin.PngInfo() for _ in images]
    if "picked" in report:
        paths = [arguments.out / file_name(Picture(0, pick["prompt"], pick["seed"])) for pick in report["picked"]]
        for text, pick in zip(texts, report["picked"], strict=True):
            text.add_text(ENTRY, json.dumps({**pick, "prompt": arguments.prompts[pick["prompt"]]}))
    for path, pixels, text in zip(paths, images, texts, strict=True):
        with unfinished(path, replace=arguments.overwrite) as part:
            Image.fromarray(levels(pixels)).save(part, "PNG", pnginfo=text, compress_level=LEVEL)
        sys.stdout.write(f"{path}\n")
