"""Predict the memory that generating an image takes, stage by stage."""

from __future__ import annotations

import argparse
import json
import sys

from ..batch.local import local_devices
from ..errors import InputError
from ..memory import DTYPES, MemoryPlan, fitting_cards, plan_memory
from ..model.known_models import DECODERS, DEFAULT_RESOLUTION, VARIANTS, VIDEO_FRAMES, VIDEOS
from ..split.cost import GPU_SPEEDS, LEAST_GAIN, LINKS, Cost, split_cost
from ..split.speed import probe
from ..video.memory import VIDEO_VARIANTS, plan_video

EXAMPLE = """example:
  python -m sana_core plan 1.6B --width 4096 --height 4096
  python -m sana_core plan 1.6B --width 4096 --height 4096 --split 4 --link pcie"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("variant", choices=[*VARIANTS, *VIDEO_VARIANTS])
    parser.add_argument("--width", type=int, help=f"pixels; default: {DEFAULT_RESOLUTION}, or a video model's own")
    parser.add_argument("--height", type=int, help=f"pixels; default: {DEFAULT_RESOLUTION}, or a video model's own")
    parser.add_argument("--frames", type=int, default=VIDEO_FRAMES, help="of a video")
    parser.add_argument("--batch", type=int, default=1, help="images generated together")
    parser.add_argument("--prompts", type=int, default=1, help="different prompts of these images")
    parser.add_argument("--pag", action="store_true", help="with perturbed attention, a third pass in each step")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--vae", choices=DECODERS, default="dc-ae-f32c32")
    parser.add_argument("--split", type=int, metavar="N", help="what N devices take and gain that share an image")
    parser.add_argument("--link", choices=LINKS, help="for --split, as published; default: this machine's, measured")
    parser.add_argument("--json", action="store_true", help="print all figures, in bytes")


def run(arguments: argparse.Namespace) -> None:
    is_video = arguments.variant in VIDEO_VARIANTS
    own = VIDEOS[VIDEO_VARIANTS[arguments.variant]].size if is_video else (DEFAULT_RESOLUTION, DEFAULT_RESOLUTION)
    arguments.width = own[0] if arguments.width is None else arguments.width
    arguments.height = own[1] if arguments.height is None else arguments.height
    if is_video and arguments.split is not None:
        raise InputError("split: got SANA-Video, which devices cannot share, expected a model of images; leave it out")
    image = arguments.width, arguments.height
    plan: MemoryPlan
    if is_video:
        plan = plan_video(arguments.variant, *image, arguments.frames, arguments.batch, arguments.dtype)
    else:
        plan = plan_memory(
            arguments.variant,
            *image,
            arguments.batch,
            arguments.dtype,
            vae=arguments.vae,
            prompts=arguments.prompts,
            pag=arguments.pag,
        )
    cost = None if arguments.split is None else find_cost(arguments)
    if arguments.json:
        shared = {} if cost is None else {"split": {**cost._asdict(), "gain": cost.gain}}
        sys.stdout.write(json.dumps({**plan, **shared}, indent=2) + "\n")
        return
    lines = [f"{'GB':18}{'weights':>9}{'beyond':>9}{'together':>10}"]
    for name, stage in (("text", plan["text"]), ("transformer", plan["transformer"])):
        lines.append(row(name, stage["weights"], stage["activations"]))
    for method, size in plan["decode"]["methods"].items():
        lines.append(row(f"decode, {method}", plan["decode"]["weights"], size))
    lines.append(fitting_cards(plan) + ", one stage at a time")
    if cost is not None:
        lines += describe(cost)
    sys.stdout.write("\n".join(lines) + "\n")


def find_cost(arguments: argparse.Namespace) -> Cost:
    """Return what sharing takes and gains. Raises InputError without a link where this machine has no two devices."""
    dtype = DTYPES[arguments.dtype]
    if arguments.link is not None:
        gpu, link = GPU_SPEEDS[arguments.link], LINKS[arguments.link]
    else:
        devices = local_devices(None)
        if len(devices) < 2:
            raise InputError(
                f"link: got none, and this machine has no two devices to measure; give {' or '.join(LINKS)}"
            )
        gpu, link = probe(devices, dtype)
    size = arguments.width, arguments.height
    return split_cost(arguments.variant, size, arguments.split, gpu, link, element=dtype.itemsize)


def describe(cost: Cost) -> list[str]:
    """Return lines about an image that several devices share."""
    together = cost.computing + cost.exchanging
    lines = [
        f"{cost.devices} devices share an image{', the two prompts apart' if cost.groups > 1 else ''}: a guided step "
        f"takes {together * 1e3:.1f} ms, on one {cost.alone * 1e3:.1f} ms, {cost.gain:.2f} times as fast",
        f"each launches {cost.launches} and moves {cost.moved / 1e9:.1f} GB, one alone {cost.launches_alone} and "
        f"{cost.moved_alone / 1e9:.1f} GB",
        "they exchange nothing but the result of each step"
        if cost.groups == cost.devices
        else f"{cost.exchanges} exchanges a step; in a block {cost.sum_bytes / 1e6:.2f} MB of sums from each device, "
        f"and {cost.row_bytes / 1e6:.2f} MB for a neighbour",
        "each device holds all the weights",
    ]
    if cost.gain < LEAST_GAIN:
        lines.append("it does not pay: use fewer devices, or a larger image")
    return lines


def row(name: str, weights: int, activations: int | None) -> str:
    if activations is None:
        return f"{name:18}{weights / 1e9:9.2f}  a tensor of 2^31 elements"
    return f"{name:18}{weights / 1e9:9.2f}{activations / 1e9:9.2f}{(weights + activations) / 1e9:10.2f}"
