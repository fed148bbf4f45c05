"""Draw many pictures of many prompts on every device, or on a Ray cluster.

Each picture is written as it finishes. A run that was interrupted goes on where it was when it is started again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ..batch.draw import Settings, resolve_settings
from ..batch.fingerprint import KEPT, describe_settings
from ..batch.folder import OutputFolder, read_manifest
from ..batch.hold import Hold, hold
from ..batch.local import draw_local
from ..batch.plan import Picture, batch_pictures
from ..batch.png import encode_png
from ..errors import InputError, OutputError, SanaError
from ..whole_files import make_folder
from .options import add_drawing, settings_of

EXAMPLE = """example:
  python -m sana_core batch prompts.txt --count 4 --out output \\
      --checkpoint demo/sana-tiny --width 128 --height 128"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", type=Path, help="a text file in UTF-8, one prompt a line")
    add_drawing(parser)
    parser.add_argument(
        "--out-shared",
        action="store_true",
        help="all machines of the cluster have the folder: each writes there itself",
    )
    parser.add_argument("--report", action="store_true", help="say at the end who drew how many, and how fast")


def read_prompts(file: Path) -> list[str]:
    """Return the lines of `file` that are not empty. Raises InputError for none, and for a file not in UTF-8."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"prompts: {file} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise InputError(f"prompts: {file} holds no prompt; write one a line")
    return prompts


def run(arguments: argparse.Namespace) -> None:
    if arguments.out_shared and arguments.cluster is None:
        raise InputError("out-shared: it is for machines of a cluster; add --cluster, or leave it out")
    prompts = read_prompts(arguments.prompts)
    pictures = batch_pictures(len(prompts), arguments.count, arguments.seed)
    settings = resolve_settings(settings_of(arguments), arguments.checkpoint)
    make_folder(arguments.out)
    # a folder of another program is left as it is
    read_manifest(arguments.out)
    with hold(arguments.out) as held:
        carry_on(arguments, prompts, settings, pictures, held)


def carry_on(
    arguments: argparse.Namespace, prompts: list[str], settings: Settings, pictures: list[Picture], held: Hold
) -> None:
    """Draw what is not in the folder yet."""
    described = describe_settings(settings, arguments.checkpoint, show_reading)
    folder = OutputFolder(held, prompts, described)
    done = folder.find_done(pictures)
    if done:
        sys.stdout.write(f"{len(done)} of {len(pictures)} pictures are there already\n")
    started = time.monotonic()
    report: dict[str, Any] = {"drawn": {}}
    drawn = draw(arguments, prompts, settings, described, pictures, done, report, held)
    try:
        with closing(drawn):
            for number, (picture, png) in enumerate(drawn, len(done) + 1):
                path = folder.note(picture, png) if isinstance(png, str) else save(folder, picture, png, len(pictures))
                sys.stdout.write(f"{path} ({number} of {len(pictures)})\n")
                sys.stdout.flush()
    except BaseException:
        # what ended the run is what is said; the pictures say themselves what they are
        with suppress(OSError):
            folder.write_manifest()
        raise
    folder.write_manifest()
    if arguments.report:
        seconds, count = time.monotonic() - started, len(pictures) - len(done)
        sys.stdout.write(f"{count} pictures in {seconds:.1f} s, {count / seconds:.2f} a second\n")
        for worker, number in report["drawn"].items():
            sys.stdout.write(f"  {worker}: {number}\n")


def show_reading(done: int, total: int) -> None:
    """Say how much of the weights is read, where that takes more than a moment."""
    if total >= KEPT:
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rreading the weights, this once: {done / 1e9:.1f} of {total / 1e9:.1f} GB{end}")
        sys.stderr.flush()


def draw(
    arguments: argparse.Namespace,
    prompts: list[str],
    settings: Settings,
    described: dict[str, Any],
    pictures: list[Picture],
    done: frozenset[int],
    report: dict[str, Any],
    held: Hold,
) -> Generator[tuple[Picture, bytes | str], None, None]:
    """Yield each picture that is not done as a PNG file, or its digest where a machine has written it itself."""
    options = (prompts, arguments.checkpoint, settings, pictures)
    if arguments.cluster is not None:
        from ..batch.cluster import draw_on_cluster

        address, chunk = arguments.cluster, arguments.chunk
        shared = held if arguments.out_shared else None
        drawing = draw_on_cluster(*options, address, chunk, done, described, report=report, shared=shared)
        with closing(drawing) as files:
            yield from files
        return
    with closing(draw_local(*options, arguments.devices, arguments.chunk, done, report=report)) as drawn:
        for picture, pixels in drawn:
            yield picture, encode_png(pixels, prompts[picture.prompt], picture.seed, described)


def save(folder: OutputFolder, picture: Picture, png: bytes, total: int) -> Path:
    """Write the picture. Raises OutputError that says what is safe already, for example on a full disk."""
    try:
        return folder.save(picture, png)
    except SanaError:
        raise
    except OSError as error:
        raise OutputError(
            f"out: cannot write into {folder.path} ({error.strerror or error}); {len(folder.entries)} of {total} "
            "pictures are there, the same command draws the rest"
        ) from error
