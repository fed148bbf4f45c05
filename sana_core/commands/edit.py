"""`generate` with VIBE: images edited by sentences, or images of prompts."""

from __future__ import annotations

import argparse

import torch

from ..batch.pipeline import local_devices
from ..batch.plan import batch_images
from ..batch.png import file_name
from ..checkpoints import Checkpoint
from ..checkpoints.generation import record_of
from ..edit import edit_images
from ..errors import InputError
from ..model.known_models import ImageModel
from ..runtime.atomic_files import check_free, make_folder, output_file
from ..runtime.file_ranges import FileRange, read_range
from ..runtime.image_files import LEVEL, levels
from ..runtime.text import write_lines
from ..training.images import decode_image
from .options import settings_of, show_model

EDIT_HELP = "the image that VIBE edits; the prompts are instructions, as 'make it winter'"
# options that VIBE does not have, and their defaults
OTHERS = {
    **dict.fromkeys(("best", "of", "scorer", "cluster", "gpus", "resource", "chunk", "negative_prompt")),
    **{"split": False, "gpus_per_worker": 1.0},
}


def edits(arguments: argparse.Namespace, checkpoint: Checkpoint) -> bool:
    """Whether the run is VIBE's: its options are set, or its model is chosen."""
    part = checkpoint.transformer
    record = None if part is None else record_of(part)
    is_vibe = isinstance(record, ImageModel) and record.architecture.edits
    return is_vibe or arguments.edit is not None or arguments.image_guidance is not None


def run_edit(arguments: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Write an image for each prompt and seed. Raises InputError for options that VIBE does not have."""
    import numpy as np
    from PIL import Image

    wrong = [name for name, default in OTHERS.items() if getattr(arguments, name) != default]
    wrong += ["devices"] * (len(arguments.devices or ()) > 1)
    wrong += [name for name in ("width", "height") if arguments.edit is not None and getattr(arguments, name)]
    if wrong:
        raise InputError(
            f"{wrong[0]}: got it for VIBE, expected one device, no negative prompt and the image's size; leave it out"
        )
    paths = [
        arguments.out / file_name(spec)
        for spec in batch_images(len(arguments.prompts), arguments.count, arguments.seed)
    ]
    check_free(paths, arguments.overwrite)
    make_folder(arguments.out)
    pixels = None
    if arguments.edit is not None:
        name = f"edit: {str(arguments.edit):.240}"
        image = decode_image(read_range(FileRange(arguments.edit), name), name)
        pixels = torch.from_numpy(np.array(image)).movedim(-1, 0)
    device = local_devices(arguments.devices)[0]
    settings = settings_of(arguments, [device])
    show_model(checkpoint)
    how = {"settings": settings, "image_guidance": arguments.image_guidance, "device": device}
    images = edit_images(arguments.prompts, checkpoint, pixels, arguments.seed, arguments.count, **how)
    for path, edited in zip(paths, images, strict=True):
        with output_file(path, arguments.overwrite) as part:
            Image.fromarray(levels(edited)).save(part, "PNG", compress_level=LEVEL)
        write_lines(path)
