"""The number of images that a device has memory to sample together, by the same formula as SANA Plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..checkpoints import Checkpoint, find_part
from ..checkpoints.configs import architecture
from ..memory import MOST_PASSES, Passes, count_passes, transformer_bytes
from ..model.known_models import Architecture
from ..model.latents import latent_shape
from ..runtime.accelerator import free_bytes
from .pipeline import ResolvedSettings
from .plan import LARGEST_CHUNK, samples_one_by_one

# The part of the free memory that a chunk may use. The rest is for fragmentation and for other programs.
SHARE = 0.8


def images_that_fit(
    device: torch.device,
    room: float,
    model: Architecture,
    width: int,
    height: int,
    dtype: torch.dtype,
    prompts: int = LARGEST_CHUNK,
    passes: Passes = MOST_PASSES,
) -> int:
    """Return the number of images of `width` x `height` pixels that `device` should sample together, at least 1.

    `room` is the memory of the device without the weights, in bytes. `dtype` is the dtype of the forward. `prompts` is
    the number of different prompts of the batch. The defaults of `prompts` and `passes` are the most expensive case.
    """
    if samples_one_by_one(device):
        # Chunks of one image distribute most evenly.
        return 1
    _, _, rows, columns = latent_shape(width, height, 1)

    def needed(images: int) -> int:
        different = min(prompts, images)
        return transformer_bytes(model, rows, columns, images, dtype, True, different, passes)

    count = LARGEST_CHUNK
    while count > 1 and needed(count) > SHARE * room:
        count //= 2
    return count


def weight_bytes(
    checkpoint: Checkpoint, dtype: torch.dtype, kinds: Sequence[str] = ("transformer", "autoencoder")
) -> int:
    """Return the bytes that these parts of a checkpoint have in `dtype`. Reads only the headers."""
    parts = [find_part(checkpoint, kind) for kind in kinds]
    return sum(math.prod(header.shape) for part in parts for header in part.headers.values()) * dtype.itemsize


def has_room_for_encoder(checkpoint: Checkpoint, settings: ResolvedSettings, device: torch.device) -> bool:
    needed = weight_bytes(checkpoint, getattr(torch, settings.dtype), ["text_encoder"])
    return needed <= SHARE * free_bytes(device)


def largest_chunk(
    checkpoint: Checkpoint,
    settings: ResolvedSettings,
    device: torch.device,
    loaded: bool = False,
    prompts: int = LARGEST_CHUNK,
    image_guided: bool = False,
) -> int:
    """Return the number of images that `device` should sample together.

    With `loaded`, the weights are already on the device. `prompts` is the number of different prompts of the
    batch, by default one for each image. `image_guided`: edits have a third pass.
    """
    dtype = getattr(torch, settings.dtype)
    room = free_bytes(device) - (0 if loaded else weight_bytes(checkpoint, dtype))
    passes = count_passes(settings.guidance, settings.pag_scale != 0, settings.guidance_interval, image_guided)
    size, model = (settings.width, settings.height), architecture(find_part(checkpoint, "transformer").headers)
    return images_that_fit(device, room, model, *size, dtype, prompts, passes)
