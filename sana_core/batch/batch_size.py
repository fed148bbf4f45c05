"""How many images at once a device has memory for, by the same plan as SANA Plan's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from ..checkpoints import find_part, inspect_checkpoint
from ..checkpoints.configs import architecture
from ..memory import transformer_bytes
from ..model.known_models import Architecture
from ..model.latents import latent_shape
from ..runtime.accelerator import free_bytes
from .pipeline import SamplingSettings
from .plan import LARGEST_CHUNK, samples_one_by_one

# of what is free, for fragments and what others take meanwhile
SHARE = 0.8


def find_architecture(checkpoint: str | Path) -> Architecture:
    """Return the architecture of a checkpoint's transformer; only headers are read.

    Raises CheckpointError, MissingFileError or ReadError for what is no whole SANA.
    """
    return architecture(find_part(inspect_checkpoint(checkpoint), "transformer").headers)


def images_that_fit(
    device: torch.device, room: float, model: Architecture, width: int, height: int, dtype: torch.dtype
) -> int:
    """Return how many images of `width` x `height` pixels `device` should generate at once, at least 1.

    `room` are its bytes beside the weights, `dtype` is that of the forward. Where images are generated one by one
    anyway, chunks of one are shared out most evenly.
    """
    if samples_one_by_one(device):
        return 1
    _, _, rows, columns = latent_shape(width, height, 1)
    count = LARGEST_CHUNK
    while count > 1 and transformer_bytes(model, rows, columns, count, dtype, accelerator=True) > SHARE * room:
        count //= 2
    return count


def weight_bytes(
    checkpoint: str | Path, dtype: torch.dtype, kinds: Sequence[str] = ("transformer", "autoencoder")
) -> int:
    """Return the bytes of a checkpoint's parts of those kinds in `dtype`; only headers are read."""
    info = inspect_checkpoint(checkpoint)
    parts = [find_part(info, kind) for kind in kinds]
    return sum(math.prod(header.shape) for part in parts for header in part.headers.values()) * dtype.itemsize


def has_room_for_encoder(checkpoint: str | Path, settings: SamplingSettings, device: torch.device) -> bool:
    """Whether `device` has memory for the text encoder beside what is there."""
    needed = weight_bytes(checkpoint, getattr(torch, settings.dtype), ["text_encoder"])
    return needed <= SHARE * free_bytes(device)


def largest_chunk(
    checkpoint: str | Path, settings: SamplingSettings, device: torch.device, loaded: bool = False
) -> int:
    """Return how many images `device` should generate at once, with the weights `loaded` there already or not yet."""
    dtype = getattr(torch, settings.dtype)
    room = free_bytes(device) - (0 if loaded else weight_bytes(checkpoint, dtype))
    return images_that_fit(device, room, find_architecture(checkpoint), settings.width, settings.height, dtype)
