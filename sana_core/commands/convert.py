"""Convert a checkpoint of any layout to a safetensors file with diffusers' names and the config in its header."""

from __future__ import annotations

import argparse

from ..checkpoints.convert import convert_checkpoint
from ..runtime.text import write_lines
from .options import path_of

EXAMPLE = """example:
  python -m sana_core convert Sana_1600M_1024px.pth Sana_1600M_1024px.safetensors --dtype bfloat16"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=path_of, help="a file or folder of any layout")
    parser.add_argument("target", type=path_of, help="a .safetensors file, which must not exist yet")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="default: as stored")
    parser.add_argument("--resolution", type=int, help="pixels that the model was trained at, if the file is wrong")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights in a training's .pth")


def run(arguments: argparse.Namespace) -> None:
    chosen = arguments.dtype, arguments.resolution, arguments.ema
    write_lines(*convert_checkpoint(arguments.source, arguments.target, *chosen))
