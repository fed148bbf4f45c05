"""Identify a checkpoint, which is a file or a folder. Reads only headers."""

from __future__ import annotations

import argparse
import sys

from ..checkpoints import CheckpointInfo, inspect_checkpoint
from ..checkpoints.notes import checkpoint_notes
from ..checkpoints.parts import describe
from .options import path_of

EXAMPLE = """example:
  python -m sana_core inspect demo/sana-posters"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=path_of, metavar="PATH", help="files, or folders")


def run(arguments: argparse.Namespace) -> None:
    for path in arguments.paths:
        info = inspect_checkpoint(path)
        sys.stdout.write(f"{path}: {sentence(info)}\n")
        for part in info.parts:
            sys.stdout.write(f"  {sentence(part)}\n")
        for note in checkpoint_notes(info):
            sys.stdout.write(f"  {note}\n")


def sentence(info: CheckpointInfo) -> str:
    """Return `info` as a line: kind, resolution and its source, layout, reference, dtype, size."""
    words = [describe(info)]
    if info.resolution is not None:
        words.append(f"{info.resolution} px ({info.resolution_from})")
    if info.layout:
        words.append(f"{info.layout} layout")
    if info.reference:
        words.append(f"reference {info.reference}")
    words += [str(info.dtype).removeprefix("torch."), f"{info.size / 1e9:.3f} GB"]
    return ", ".join(words)
