"""Predict the memory that drawing a picture takes, stage by stage."""

from __future__ import annotations

import argparse
import json
import sys

EXAMPLE = """example:
  python -m sana_core plan 1.6B --width 4096 --height 4096"""


def configure(parser: argparse.ArgumentParser) -> None:
    from ..memory import DECODERS, DTYPES, VARIANTS

    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--width", type=int, default=1024, help="pixels, a multiple of 32")
    parser.add_argument("--height", type=int, default=1024, help="pixels, a multiple of 32")
    parser.add_argument("--batch", type=int, default=1, help="pictures drawn together")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--vae", choices=DECODERS, default="dc-ae-f32c32")
    parser.add_argument("--json", action="store_true", help="print all figures, in bytes")


def run(arguments: argparse.Namespace) -> None:
    from ..memory import fitting_cards, plan_memory

    picture = arguments.width, arguments.height, arguments.batch
    plan = plan_memory(arguments.variant, *picture, arguments.dtype, vae=arguments.vae)
    if arguments.json:
        sys.stdout.write(json.dumps(plan, indent=2) + "\n")
        return
    lines = [f"{'GB':18}{'weights':>9}{'beyond':>9}{'together':>10}"]
    for name in ("text", "transformer"):
        lines.append(row(name, plan[name]["weights"], plan[name]["activations"]))
    for method, size in plan["decode"]["methods"].items():
        lines.append(row(f"decode, {method}", plan["decode"]["weights"], size))
    lines.append(fitting_cards(plan) + ", one stage at a time")
    sys.stdout.write("\n".join(lines) + "\n")


def row(name: str, weights: int, activations: int | None) -> str:
    if activations is None:
        return f"{name:18}{weights / 1e9:9.2f}  a tensor of 2^31 elements"
    return f"{name:18}{weights / 1e9:9.2f}{activations / 1e9:9.2f}{(weights + activations) / 1e9:10.2f}"
