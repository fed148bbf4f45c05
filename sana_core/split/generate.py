"""Generate images one after another, each shared by all devices of this process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..batch.pipeline import (
    Conditioning,
    Models,
    Request,
    ResolvedSettings,
    decode,
    encode_texts,
    load_decoder,
    load_encoder,
    load_models,
    sample,
)
from ..batch.plan import ImageSpec
from ..checkpoints import Checkpoint
from ..errors import InputError, first_line
from ..model.latents import DOWNSCALE
from ..model.row_shards import check_rows, check_splittable
from ..runtime.accelerator import is_driver_error, is_out_of_memory, release_memory_of
from ..runtime.cancellation import Poll, no_poll
from ..runtime.device_team import DeviceThreads
from ..runtime.text import get_logger
from ..sampling.guidance import ShardedModel
from .devices import Split, relative_speeds

if TYPE_CHECKING:
    from diffusers import AutoencoderDC

logger = get_logger(__name__)


def check_devices(devices: Sequence[torch.device]) -> None:
    """Raise InputError for fewer than two devices, and for an accelerator that is named twice."""
    if len(devices) < 2:
        got = ", ".join(map(str, devices)) or "none"
        raise InputError(f"devices: got {got} to share an image, expected two or more; name more, or leave split out")
    twice = [device for device in devices if device.type != "cpu" and devices.count(device) > 1]
    if twice:
        raise InputError(f"devices: got {twice[0]} twice, expected each once: it would do the same work in two halves")


def generate_split(request: Request, poll: Poll = no_poll) -> Generator[tuple[ImageSpec, torch.Tensor], None, None]:
    """Yield each image of `request` with its pixels [3, H, W] in [-1, 1], sampled and decoded by all of its devices.

    The latents differ from the latents of a single device only by rounding. On CPUs in float32, for widths of 512, 640,
    768 px ..., two or more devices give the same bits for any number of devices. If a device fails, the others repeat
    the step without it. `poll` cancels by raising.
    """
    workload, checkpoint, settings, devices = request
    if workload.chunk not in (None, 1):
        raise InputError(f"chunk: got {workload.chunk} with split, expected 1: devices share one image at a time")
    if settings.compiled:
        raise InputError("compiled: got true with split, expected false: devices meet in each block; leave it out")
    check_devices(devices)
    check_rows(settings.height // DOWNSCALE, len(devices))
    images = workload.remaining
    used = [workload.prompts[image.prompt] for image in images]
    encoded = workload.encoded
    if encoded is None:
        encoder = load_encoder(checkpoint, devices[0], settings.dtype, settings.reference)
        encoded = encode_texts(encoder, used, settings.negative_prompt, poll)
        del encoder
    texts, negative = encoded
    models = load_on(devices, checkpoint, settings)
    check_splittable("checkpoint", models[0].transformer)
    transformers, autoencoder = [model.transformer for model in models], models[0].autoencoder
    assert autoencoder is not None
    with DeviceThreads() as threads:
        split = Split(devices, relative_speeds(devices, transformers), threads)
        sharded = ShardedModel(partial(split.run, poll=poll), transformers)
        for image in images:
            prompts = Conditioning([texts[workload.prompts[image.prompt]]], negative)
            # On the CPU, because the decode may lose the device that has them.
            latents = sample(models[0], settings, (image,), prompts, poll, workload.inputs, sharded).cpu()
            living = [devices[member] for member in split.living]
            yield image, decode_split(autoencoder, latents, living, threads, checkpoint, settings, poll)


def decode_split(
    autoencoder: AutoencoderDC,
    latents: torch.Tensor,
    devices: Sequence[torch.device],
    threads: DeviceThreads,
    checkpoint: Checkpoint,
    settings: ResolvedSettings,
    poll: Poll,
) -> torch.Tensor:
    """Return the image of `latents`, decoded by all `devices`, or by the CPU if none of them can."""
    try:
        return decode(autoencoder, latents, poll, devices, threads=threads)[0]
    except Exception as error:
        if not (is_out_of_memory(error) or is_driver_error(error)):
            raise
        failure = error
    logger.warning("no device could decode the image (%s), the CPU decodes it", first_line(release_memory_of(failure)))
    # Loaded again, because the weights may be on a device that failed.
    return decode(load_decoder(checkpoint, torch.device("cpu"), settings.dtype), latents, poll)[0]


def load_on(devices: Sequence[torch.device], checkpoint: Checkpoint, settings: ResolvedSettings) -> list[Models]:
    """Load the models on each of `devices`, but only once per device. Only the first device has the decoder."""
    loaded: dict[torch.device, Models] = {}
    for device in devices:
        if device not in loaded:
            decoder = None if loaded else checkpoint
            loaded[device] = load_models(checkpoint, device, settings, decoder)
    return [loaded[device] for device in devices]
