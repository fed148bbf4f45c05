"""`generate` with VIBE: images edited by sentences, or images of prompts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from ..batch.pipeline import SamplingSettings
from ..checkpoints import Checkpoint
from ..checkpoints.load import config_of
from ..edit import edit_images
from ..errors import InputError
from ..model.known_models import edits_images
from ..runtime.file_ranges import FileRange, read_range
from ..training.images import decode_image

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
    """Return the images of `edit_images` for the options of the command."""
    import numpy as np

    pixels = None
    if arguments.edit is not None:
        name = f"edit: {str(arguments.edit):.240}"
        image = decode_image(read_range(FileRange(arguments.edit), name), name)
        pixels = torch.from_numpy(np.array(image)).movedim(-1, 0)
    sampling = settings, arguments.image_guidance, devices, arguments.split
    return edit_images(arguments.prompts, checkpoint, pixels, arguments.seed, arguments.count, *sampling)
