"""Say which model and settings fit a GPU, and predict the memory of each stage before anything is loaded."""

from __future__ import annotations

import argparse
import json

from ..advice import PREDICTED, Gpu, answer, model_table, sold_gpu, this_gpu
from ..errors import InputError
from ..memory import DTYPES, DecodePlan, MemoryPlan, fitting_cards, plan_memory
from ..model.known_models import DECODERS, DEFAULT_RESOLUTION, GPU_SIZES, VARIANTS, VIDEOS
from ..runtime.text import write_lines
from ..video.latents import VideoPlan, plan_video

# the decoder of most models
VAE = "dc-ae-f32c32"

EXAMPLE = """example:
  python -m sana_core plan
  python -m sana_core plan --gpu 8
  python -m sana_core plan 1.6B --width 4096 --height 4096"""


def configure(parser: argparse.ArgumentParser) -> None:
    models = [*VARIANTS, *VIDEOS]
    parser.add_argument("variant", nargs="?", choices=models, help="without it, a recommendation and all models")
    sizes = list(map(str, GPU_SIZES))
    parser.add_argument("--gpu", choices=sizes, help="plan for a GPU of this memory in GB; default: this computer's")
    parser.add_argument("--width", type=int, help=f"pixels; default: {DEFAULT_RESOLUTION}, or the video model's")
    parser.add_argument("--height", type=int, help=f"pixels; default: {DEFAULT_RESOLUTION}, or the video model's")
    parser.add_argument("--frames", type=int, help="of a video; default: the model's own, 81 or 193")
    parser.add_argument("--batch", type=int, default=1, help="images generated together")
    parser.add_argument("--prompts", type=int, default=1, help="different prompts of these images")
    parser.add_argument("--pag", action="store_true", help="with perturbed attention, a third pass in each step")
    parser.add_argument("--image-guidance", type=float, help="VIBE only: at 1 and below, two passes in a step")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, or float32 on a GPU without bfloat16")
    parser.add_argument("--vae", choices=DECODERS, default=VAE)
    parser.add_argument("--json", action="store_true", help="print all figures, in bytes")


def run(arguments: argparse.Namespace) -> None:
    gpu = this_gpu() if arguments.gpu is None else sold_gpu(int(arguments.gpu))
    if arguments.dtype is not None:
        gpu = gpu._replace(dtype=arguments.dtype, reason="")
    is_video = arguments.variant in VIDEOS
    side = (DEFAULT_RESOLUTION, DEFAULT_RESOLUTION)
    width, height = VIDEOS[arguments.variant].size if is_video else side
    arguments.width = width if arguments.width is None else arguments.width
    arguments.height = height if arguments.height is None else arguments.height
    if is_video:
        image_options = {"prompts": 1, "pag": False, "vae": VAE, "image_guidance": None}
        wrong = [name for name, default in image_options.items() if getattr(arguments, name) != default]
        if wrong:
            raise InputError(f"{wrong[0]}: got SANA-Video, expected a model of images; leave it out")
    elif arguments.frames is not None:
        got = arguments.variant or "no model"
        raise InputError(f"frames: got {got}, expected SANA-Video, such as {next(iter(VIDEOS))}; leave it out")
    image = arguments.width, arguments.height
    plan: MemoryPlan
    encode: DecodePlan | None = None
    if is_video:
        plan = plan_video(arguments.variant, *image, arguments.frames, arguments.batch, gpu.dtype)
        sentence = video_answer(gpu, plan)
    else:
        sentence, fitting = answer(gpu, arguments.variant, *image, arguments.batch, arguments.vae)
        options = {name: getattr(arguments, name) for name in ("vae", "prompts", "pag", "image_guidance")}
        plan = image_plan = plan_memory(fitting.variant, *image, arguments.batch, gpu.dtype, **options)
        encode = image_plan["encode"]
    if arguments.json:
        write_lines(*json.dumps({**plan, "answer": sentence}, indent=2).splitlines())
        return
    lines = [sentence, "", f"{'GB (10^9 bytes)':18}{'weights':>9}{'beyond':>9}{'together':>10}"]
    for name, stage in (("text", plan["text"]), ("transformer", plan["transformer"])):
        lines.append(row(name, stage["weights"], stage["activations"]))
    for name, pixels in (("encode", encode), ("decode", plan["decode"])):
        for method, size in pixels["methods"].items() if pixels is not None else ():
            lines.append(row(f"{name}, {method}", plan["decode"]["weights"], size))
    lines.append(f"The stages run one after another, so it {fitting_cards(plan)}. {gpu.describe()}")
    if arguments.variant is None:
        lines += ["", *columns(model_table()), PREDICTED]
    write_lines(*lines)


def video_answer(gpu: Gpu, plan: VideoPlan) -> str:
    video = f"{plan['variant']} at {plan['width']} x {plan['height']} px, {plan['frames']} frames, in {plan['dtype']}"
    if plan["peak"] <= gpu.usable:
        return f"{gpu.name}: {video} fits."
    if plan["smallest"] <= gpu.usable:
        return f"{gpu.name}: {video} fits with one of the two prompts at a time, as ComfyUI does by itself."
    return f"{gpu.name}: {video} does not fit; it {fitting_cards(plan).replace('fits', 'needs')}."


def columns(rows: list[list[str]]) -> list[str]:
    rows = [[cell.strip("`") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def row(name: str, weights: int, activations: int | None) -> str:
    if activations is None:
        return f"{name:18}{weights / 1e9:9.2f}  a tensor of 2^31 elements"
    return f"{name:18}{weights / 1e9:9.2f}{activations / 1e9:9.2f}{(weights + activations) / 1e9:10.2f}"
