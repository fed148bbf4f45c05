"""Generate images of prompts and write them as PNG files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from ..batch.pipeline import SamplingSettings, local_devices
from ..batch.plan import ImageSpec, batch_images
from ..batch.png import ENTRY, file_name
from ..checkpoints import Checkpoint, find_part, inspect_checkpoint
from ..checkpoints.load import config_of
from ..edit import edit_images
from ..errors import FailedImagesError, InputError, OutputError, SanaError
from ..generate import generate
from ..model.known_models import VIDEOS, edits_images
from ..runtime.atomic_files import check_free, make_folder, output_file
from ..runtime.image_files import LEVEL, levels
from ..runtime.text import Json, get_logger, write_lines
from ..runtime.user_files import FileRange, read_range
from ..training.images import decode_image
from ..video.generate import check_writer, generate_video, read_first, write_video
from ..video.latents import video_shape
from .options import (
    add_sampling_options,
    choose_dtype,
    cluster_of,
    devices_of,
    path_of,
    settings_of,
    show_model,
    show_status,
)

logger = get_logger(__name__)

# Options that VIBE does not have.
OTHERS = ("best", "of", "scorer", "cluster", "chunk", "negative_prompt")


def is_edit(arguments: argparse.Namespace, checkpoint: Checkpoint) -> bool:
    """Whether VIBE generates: it is the model, or its options are set. Raises InputError for options that it lacks."""
    part = checkpoint.transformer
    is_vibe = part is not None and edits_images(config_of(part))
    if not is_vibe and arguments.edit is arguments.image_guidance is None:
        return False
    wrong = [name for name in OTHERS if getattr(arguments, name) is not None]
    wrong += [name for name in ("width", "height") if arguments.edit is not None and getattr(arguments, name)]
    if wrong:
        raise InputError(
            f"{wrong[0]}: got it for VIBE, expected this machine, no negative prompt and the image's size; leave it out"
        )
    if arguments.edit is None and arguments.image_guidance is not None:
        raise InputError("image_guidance: got it without an image, expected --edit; add it, or leave it out")
    return True


def edited(
    arguments: argparse.Namespace,
    checkpoint: Checkpoint,
    settings: SamplingSettings,
    devices: Sequence[torch.device] | None,
) -> torch.Tensor:
    import numpy as np

    pixels = None
    if arguments.edit is not None:
        name = f"edit: {str(arguments.edit):.240}"
        image = decode_image(read_range(FileRange(arguments.edit), name), name)
        pixels = torch.from_numpy(np.array(image)).movedim(-1, 0)
    sampling = settings, arguments.image_guidance, devices, arguments.split
    return edit_images(arguments.prompts, checkpoint, pixels, arguments.seed, arguments.count, *sampling)


EXAMPLE = """example:
  python -m sana_core generate "a watercolour of a red lighthouse on the sea at dusk" \\
      --checkpoint demo/sana-posters --width 512 --height 512 --out output
  python -m sana_core generate "Waves roll against a lighthouse." --motion-score 30 \\
      --checkpoint SANA-Video_2B_480p_diffusers --out clip.mp4"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="+", help="one or more prompts")
    parser.add_argument("--overwrite", action="store_true", help="replace images that are in the folder")
    parser.add_argument("--split", action="store_true", help="all devices of this machine share each image")
    parser.add_argument(
        "--frames", type=int, help="frames of the video; default: the model's; --out is its file, as clip.mp4"
    )
    parser.add_argument("--first", type=path_of, help="the image that the video begins with")
    parser.add_argument("--edit", type=path_of, help="the image that VIBE changes; the prompts say how")
    parser.add_argument("--image-guidance", type=float, help="how closely an edit keeps the image; default: 1.2")
    parser.add_argument("--motion-score", type=int, help="of the video; default: 10, or 20 for 2.0; 0: none")
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> None:
    from PIL import Image, PngImagePlugin

    # Options of a video alone are checked before the files are read.
    wants_video = not (arguments.frames is arguments.first is arguments.motion_score is None)
    checkpoint = None if wants_video else inspect_checkpoint(arguments.checkpoint)
    if checkpoint is None or checkpoint.is_video:
        run_video(arguments)
        return
    is_vibe = is_edit(arguments, checkpoint)
    specs = batch_images(len(arguments.prompts), arguments.of or arguments.count, arguments.seed)
    paths = [arguments.out / file_name(spec) for spec in specs]
    check_free(paths, arguments.overwrite)
    make_folder(arguments.out)
    devices = devices_of(arguments)
    batch_options = {name: getattr(arguments, name) for name in ("chunk", "best", "of", "scorer")}
    settings = settings_of(arguments, devices)
    options: Json = {**batch_options, "say": show_status, "report": {}, **settings._asdict()}
    where = devices, cluster_of(arguments), arguments.split
    show_model(checkpoint)
    failure: FailedImagesError | None = None
    failures: list[SanaError] = []
    try:
        if is_vibe:
            images = edited(arguments, checkpoint, settings, devices)
        else:
            images = generate(arguments.prompts, checkpoint, arguments.seed, arguments.count, *where, **options)
    except FailedImagesError as error:
        # The other images are written before the run ends with this error.
        if error.images is None:
            raise
        images, failure = error.images, error
        failures.append(error)
    texts = [PngImagePlugin.PngInfo() for _ in images]
    if picked := options["report"].get("picked"):
        paths = [arguments.out / file_name(ImageSpec(0, pick["prompt"], pick["seed"])) for pick in picked]
        for text, pick in zip(texts, picked, strict=True):
            text.add_text(ENTRY, json.dumps({**pick, "prompt": arguments.prompts[pick["prompt"]]}, allow_nan=False))
    for number, (path, pixels, text) in enumerate(zip(paths, images, texts, strict=True)):
        if failure is not None and number in failure.failed:
            continue
        try:
            with output_file(path, arguments.overwrite) as part:
                Image.fromarray(levels(pixels)).save(part, "PNG", pnginfo=text, compress_level=LEVEL)
        except OutputError as error:
            # The other images are in memory only.
            failures.append(error)
        else:
            write_lines(path)
    for other_failure in failures[1:]:
        logger.warning("%s", other_failure)
    if failures:
        raise failures[0]


# Options that only images have, and their defaults.
IMAGES_ONLY = {
    **dict.fromkeys(("best", "of", "scorer", "lora", "cluster", "gpus", "resource", "chunk")),
    **dict.fromkeys(("pag_scale", "pag_blocks", "guidance_interval", "edit", "image_guidance")),
    **{"count": 1, "split": False, "compile": False, "gpus_per_worker": 1.0},
}


def run_video(arguments: argparse.Namespace) -> None:
    """Generate one video and write it. Raises InputError for what only images have."""
    wrong = [name for name, default in IMAGES_ONLY.items() if getattr(arguments, name) != default]
    wrong += ["prompts"] * (len(arguments.prompts) > 1) + ["devices"] * (len(arguments.devices or ()) > 1)
    if wrong:
        raise InputError(f"{wrong[0]}: it is for images, expected one video of one prompt with --frames; leave it out")
    check_writer(arguments.out)
    check_free([arguments.out], arguments.overwrite)
    make_folder(arguments.out.parent)
    checkpoint = inspect_checkpoint(arguments.checkpoint)
    model = VIDEOS[find_part(checkpoint, "video_transformer").variant]
    width, height = model.size
    size = (
        width if arguments.width is None else arguments.width,
        height if arguments.height is None else arguments.height,
    )
    frames = model.frames if arguments.frames is None else arguments.frames
    video_shape(*size, frames, model)
    first = None if arguments.first is None else read_first(arguments.first, size)
    names = "steps", "guidance", "sampler", "negative_prompt", "motion_score", "reference"
    settings = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    devices = local_devices(arguments.devices)
    settings |= {"dtype": choose_dtype(arguments, devices), "device": str(devices[0])}
    show_model(checkpoint)
    generated = generate_video(arguments.prompts[0], checkpoint, arguments.seed, frames, size, first, **settings)
    write_video(arguments.out, generated, arguments.overwrite, model.rate)
    write_lines(arguments.out)
