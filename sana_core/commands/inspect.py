"""Identify a checkpoint, which is a file or a folder. Reads only headers."""

from __future__ import annotations

import argparse

from ..checkpoints import Checkpoint, inspect_checkpoint
from ..checkpoints.generation import checkpoint_notes
from ..runtime.text import write_lines
from .options import path_of

EXAMPLE = """example:
  python -m sana_core inspect demo/sana-posters"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=path_of, metavar="PATH", help="files, or folders")


def run(arguments: argparse.Namespace) -> None:
    for path in arguments.paths:
        info = inspect_checkpoint(path)
        write_lines(f"{path}: {sentence(info)}")
        for part in info.parts:
            write_lines(f"  {sentence(part)}")
        for note in checkpoint_notes(info):
            write_lines(f"  {note}")


def sentence(info: Checkpoint) -> str:
    """Return `info` as a line: kind, resolution and its source, layout, reference, dtype, size."""
    words = [info.description]
    if info.resolution is not None:
        words.append(f"{info.resolution} px ({info.resolution_from})")
    if info.layout:
        words.append(f"{info.layout} layout")
    if info.reference:
        words.append(f"reference {info.reference}")
    words += [str(info.dtype).removeprefix("torch."), f"{info.size / 1e9:.3f} GB"]
    return ", ".join(words)
