"""The exact encode of images to latents, in strips of rows: the reverse of the decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from ..runtime.accelerator import free_bytes
from ..runtime.cancellation import Poll, Polled, no_poll
from ..runtime.checks import check_finite, check_name
from .devices import BUDGET
from .oom import OomRetry
from .plan import Plan, Planner
from .row_partition import RowPartition, empty_partition
from .stages import Stages, encoder_stages
from .streaming import Layer, StreamedConv, run
from .strips import global_block, local_layer, output_size
from .workspace import Workspace, chunks

if TYPE_CHECKING:
    from diffusers import AutoencoderDC
    from diffusers.models.autoencoders.autoencoder_dc import Encoder

METHODS = ("auto", "strips", "whole")


@torch.no_grad()
def encode_images(
    autoencoder: AutoencoderDC,
    images: torch.Tensor,
    method: str = "auto",
    max_bytes: int | None = None,
    *,
    poll: Poll = no_poll,
) -> torch.Tensor:
    """Return the latents [B, 32, H / 32, W / 32] of `images` [B, 3, H, W] in [-1, 1], in the autoencoder's scale.

    The images may be on another device. Strips of them are copied to the autoencoder's device. "strips" and "whole"
    give the same latents, "auto" is the fastest plan within `max_bytes`, by default 90 % of the free memory. Raises
    InputError for images of other channels or with NaN, a side that is not a multiple of 32, an unknown method, or a
    budget that no plan fits.
    """
    stages = encoder_stages(autoencoder)
    check_images(images, stages)
    check_name("method", method, METHODS)
    like = next(autoencoder.parameters())
    height, width = (side // stages.downscale for side in images.shape[2:])
    planner = Planner(stages, height, width, like.dtype, like.device.type != "cpu", method == "strips")
    plan = (
        planner.whole()
        if method == "whole"
        else planner.strips(free_bytes(like.device) * BUDGET if max_bytes is None else max_bytes)
    )
    latents = [encode_one(autoencoder.encoder, stages, planner, plan, image[None], like, poll) for image in images]
    return torch.cat(latents)


def check_images(images: torch.Tensor, stages: Stages) -> None:
    """Raise InputError unless `images` are [B, 3, H, W], finite, and with sides that are multiples of the downscale."""
    shape, side = list(images.shape), stages.downscale
    if len(shape) != 4 or shape[1] != 3 or 0 in shape or shape[2] % side or shape[3] % side:
        raise InputError(
            f"pixels: got images of shape {shape}, expected [batch, 3, height, width] with sides that are multiples "
            f"of {side}; crop or scale them"
        )
    check_finite("pixels", images)


def encode_one(
    encoder: Encoder, stages: Stages, planner: Planner, plan: Plan, image: torch.Tensor, like: torch.Tensor, poll: Poll
) -> torch.Tensor:
    """Return the latents of one image. Each time that memory runs out, retry with half the budget."""
    if plan.method == "whole":
        with Polled(poll):
            return encoder(channels_last(image, like))
    retry = OomRetry(planner, plan, {"events": []})
    return retry.run(lambda: in_strips(encoder, stages, retry.plan, image, like, poll))


def in_strips(
    encoder: Encoder, stages: Stages, plan: Plan, image: torch.Tensor, like: torch.Tensor, poll: Poll
) -> torch.Tensor:
    """Return the latents of one image according to `plan`, with the device and dtype of `like`."""
    workspace = Workspace(like, plan.workspace)
    x = boundary_map(encoder, stages, plan, image, workspace, poll)
    for stage in range(stages.local, len(stages.widths)):
        for block in encoder.down_blocks[stage]:
            # A downsampling block belongs to the stage before it, with the finer resolution.
            x = global_block(block, x, plan.attention_rows, stages.downscale // 2**stage, workspace, poll)
    states = x.rows(0, x.height)
    latents = encoder.conv_out(states)
    if encoder.out_shortcut:
        latents += states.unflatten(1, (-1, encoder.out_shortcut_average_group_size)).mean(dim=2)
    return latents


def channels_last(pixels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return pixels.to(device=like.device, dtype=like.dtype).contiguous(memory_format=torch.channels_last)


def local_layers(encoder: Encoder, stages: Stages, size: tuple[int, int]) -> list[Layer]:
    """Return the layers from pixels to the map before the first attention stage."""
    layers: list[Layer] = []
    # `conv_in` keeps the image's resolution, or halves it if the first stage has no blocks.
    for block in (encoder.conv_in, *(block for stage in range(stages.local) for block in encoder.down_blocks[stage])):
        plain = isinstance(block, torch.nn.Conv2d)
        layers.append(StreamedConv(block, size) if plain else local_layer(block, size))
        size = (output_size(block, size[0]), output_size(block, size[1]))
    return layers


def boundary_map(
    encoder: Encoder, stages: Stages, plan: Plan, image: torch.Tensor, workspace: Workspace, poll: Poll
) -> RowPartition:
    """Run the local layers on `image` in strips and panels of `plan`. Returns the boundary map [1, C, H / 8, W / 8]."""
    stride = stages.stride
    height, width = image.shape[2] // stride, image.shape[3] // stride
    boundary = empty_partition(workspace.memory.new_empty(1), stages.boundary_width, height, width)
    for left, right in chunks(width, plan.columns or width):
        begin, end = max(0, left - stages.halo), min(width, right + stages.halo)
        layers, top, workspace.used = local_layers(encoder, stages, (image.shape[2], image.shape[3])), 0, 0
        for first, last in chunks(height, plan.rows):
            pixels = image[:, :, first * stride : last * stride, begin * stride : end * stride]
            rows = run(layers, workspace.put(pixels), last == height, workspace, poll).rows
            boundary.write(top, left, rows[..., left - begin : right - begin])
            top += rows.shape[2]
    return boundary
