"""Decode latents: choose a plan, decode each image, continue after running out of memory.

The alternative decode in blended tiles is not exact, because the attention of a tile ends at its edges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import InputError
from ..model.latents import check_channels
from ..runtime.accelerator import free_bytes
from ..runtime.cancellation import Poll, Polled, no_poll
from ..runtime.checks import check_finite, check_name, check_number
from ..runtime.device_team import DeviceThreads
from ..runtime.text import Json
from .devices import BUDGET, Workers, shared_rows
from .oom import OomRetry
from .plan import METHODS, Plan, Planner
from .stages import Stages, decoder_stages
from .workspace import PeakMemory

if TYPE_CHECKING:
    from diffusers import AutoencoderDC
    from diffusers.models.autoencoders.autoencoder_dc import Decoder


def tile_starts(length: int, tile: int, overlap: int) -> list[int]:
    """Return the starts of tiles of the same size that cover `length` evenly and overlap by at least `overlap`."""
    if tile >= length:
        return [0]
    count = 1 + -(-(length - tile) // (tile - overlap))
    return [round(index * (length - tile) / (count - 1)) for index in range(count)]


def ramps(length: int, tile: int, starts: list[int]) -> torch.Tensor:
    """Return the weight [tiles, length] of each tile at each position: linear where tiles overlap, with a sum of 1."""
    position, begin = torch.arange(length).double() + 0.5, torch.tensor(starts).double()[:, None]
    weights = torch.minimum(position - begin, begin + tile - position).clamp(min=0)
    return (weights / weights.sum(0)).float()


def decode_tiles(
    decoder: Decoder, latents: torch.Tensor, tile: int, overlap: int, scale: int, poll: Poll
) -> Iterator[torch.Tensor]:
    """Yield the pixels [B, 3, n, scale * w] of `latents` [B, 32, h, w], top to bottom.

    `tile` and `overlap` are numbers of latent rows and columns. `scale`: pixels per latent.
    """
    height, width = latents.shape[2:]
    rows, columns = tile_starts(height, tile, overlap), tile_starts(width, tile, overlap)
    size = (min(tile, height), min(tile, width))
    down, across = (
        ramps(scale * length, scale * side, [scale * start for start in starts]).to(latents.device)
        for length, side, starts in ((height, size[0], rows), (width, size[1], columns))
    )
    band = torch.zeros(len(latents), 3, scale * size[0], scale * width, device=latents.device)
    for index, first_row in enumerate(rows):
        for column, first_column in enumerate(columns):
            with Polled(poll):
                pixels = decoder(latents[:, :, first_row : first_row + size[0], first_column : first_column + size[1]])
            y = slice(scale * first_row, scale * (first_row + size[0]))
            x = slice(scale * first_column, scale * (first_column + size[1]))
            band[:, :, :, x] += pixels * down[index, y, None] * across[column, x]
        finished = scale * ((rows[index + 1] if index + 1 < len(rows) else height) - first_row)
        yield band[:, :, :finished].to(latents.dtype)
        # Move the unfinished rows, which the next tiles overlap, to the top.
        band = torch.cat([band[:, :, finished:], torch.zeros_like(band[:, :, :finished])], dim=2)


Progress = Callable[[int, int], None]


class Tiles(NamedTuple):
    """The size of blended tiles and how far they overlap, in pixels."""

    size: int
    overlap: int


TILES = Tiles(1024, 128)


class DecodeOptions(NamedTuple):
    """Options of a decode. The first five fields are the arguments of `decode_latents`."""

    method: str = "auto"
    max_bytes: int | None = None
    devices: Sequence[str | torch.device] | None = None
    tiles: Tiles = TILES
    poll: Poll = no_poll
    # Called with (done, total), in pixel rows.
    progress: Progress | None = None
    # The bytes that a decode may allocate on a device. Used with `devices` and without `max_bytes`.
    free_bytes: Callable[[torch.device], int] = free_bytes
    # The threads of `devices`, for several decodes. None: they end with the decode.
    threads: DeviceThreads | None = None


@torch.no_grad()
def decode_latents(
    autoencoder: AutoencoderDC,
    latents: torch.Tensor,
    method: str = "auto",
    max_bytes: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    report: dict[str, Any] | None = None,
    *,
    tiles: Tiles = TILES,
    poll: Poll = no_poll,
    threads: DeviceThreads | None = None,
) -> torch.Tensor:
    """Return images [B, 3, 32 h, 32 w], about [-1, 1], of `latents` [B, 32, h, w] in the autoencoder's scale.

    `method`: "strips" and "whole" give the same pixels. "tiles" blends overlapping tiles of the size `tiles`, which
    changes the pixels, because each tile has its own statistics. "auto" is the fastest exact plan within `max_bytes`.
    On a CPU in float32, "strips" is bit-identical to "whole" if memory allows, and "auto" up to 512 latent cells.
    `max_bytes`: excludes weights, latents and images. By default 90 % of the free memory.
    `devices`: decode each image together. The images are then on the CPU. A device that fails is left out.
    `poll`: called many times per strip, cancels by raising.
    `threads`: the threads of `devices`, if several calls share them.
    `report`: receives the plan, time and memory.
    Raises InputError for latents of other channels or with NaN, an unknown method, or a budget that no plan fits.
    """
    check_channels("samples", latents.shape)
    scale = decoder_stages(autoencoder).downscale
    count, _, h, w = latents.shape
    like = next(autoencoder.parameters())
    # With several devices, any of them may fail, including the autoencoder's.
    device = torch.device("cpu") if shares(method, devices) else like.device
    out = torch.empty(count, 3, h * scale, w * scale, device=device, dtype=like.dtype)
    options = DecodeOptions(method, max_bytes, devices, tiles, poll, threads=threads)
    return decode_into(out, autoencoder, latents, options, report)


@torch.no_grad()
def decode_into(
    out: torch.Tensor,
    autoencoder: AutoencoderDC,
    latents: torch.Tensor,
    options: DecodeOptions,
    report: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Write the images of `latents` [B, 32, h, w] into `out` [B, 3, 32 h, 32 w], which may be on any device.

    Returns `out`. `report` receives the plan, time and memory.
    """
    for image, top, pixels in decode_rows(autoencoder, latents, options, report):
        out[image, :, top : top + pixels.shape[1]] = pixels
    return out


@torch.no_grad()
def decode_rows(
    autoencoder: AutoencoderDC,
    latents: torch.Tensor,
    options: DecodeOptions,
    report: dict[str, Any] | None = None,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (image, first row, pixels [3, n, W]) of `latents` [B, 32, h, w] as soon as they are decoded.

    The images come one after another. With one device, the rows of an image come from top to bottom. `report` receives
    the plan, time and memory.
    """
    check_channels("samples", latents.shape)
    check_finite("samples", latents)
    method, max_bytes, devices = options.method, options.max_bytes, options.devices
    check_name("method", method, METHODS)
    like = next(autoencoder.parameters())
    vae_device = like.device
    if method in ("whole", "tiles") and [torch.device(name) for name in devices or [vae_device]] != [vae_device]:
        raise InputError(
            f"devices: got {len(devices or ())} for method {method}, which runs on the VAE's device; choose method "
            "auto or strips, or no devices"
        )
    stages, (height, width) = decoder_stages(autoencoder), latents.shape[2:]
    planner = Planner(stages, height, width, like.dtype, vae_device.type != "cpu", same_bits=method == "strips")
    report = {} if report is None else report
    report.update(events=[], strips=0)
    if devices is None or not shares(method, devices):
        budget = BUDGET * free_bytes(vae_device) if max_bytes is None else max_bytes
        plan = choose(planner, method, budget, options.tiles)
        report.update(plan.report(stages))
        rows_of = partial(image_rows, autoencoder, planner, plan, report=report, poll=options.poll)
        yield from planned_rows(rows_of, latents, like, stages, options, report)
        return
    # A copy on the CPU survives the failure of a device.
    latents, resolved = latents.cpu(), [torch.device(name) for name in devices]
    with nullcontext(options.threads) if options.threads is not None else DeviceThreads() as threads:
        workers = Workers(autoencoder.decoder, resolved, options.free_bytes, report["events"], threads, options.poll)
        report.update(workers.choose_plans(planner, max_bytes).report(stages))
        shared = partial(shared_rows, workers, planner, report=report, poll=options.poll)
        yield from planned_rows(shared, latents, like, stages, options, report)


def shares(method: str, devices: Sequence[str | torch.device] | None) -> bool:
    """Whether `devices` decode each image together."""
    return devices is not None and method not in ("whole", "tiles")


def planned_rows(
    rows_of: Callable[[torch.Tensor], Iterator[tuple[int, torch.Tensor]]],
    latents: torch.Tensor,
    like: torch.Tensor,
    stages: Stages,
    options: DecodeOptions,
    report: Json,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (image, first row, pixels [3, n, W]). `rows_of` decodes one image of `latents`, in the dtype of `like`."""
    total, done_rows, started = len(latents) * latents.shape[2] * stages.downscale, 0, time.perf_counter()
    with PeakMemory(like.device) as peak:
        for image in range(len(latents)):
            one = latents[image : image + 1].to(like.dtype)
            if not stages.attends:
                # Strips need rows that are contiguous. Attention blocks return such maps, but this decoder has none.
                one = one.contiguous(memory_format=torch.channels_last)
            for top, pixels in rows_of(one):
                options.poll()
                if report["method"] == "strips":
                    report["strips"] += 1
                yield image, top, pixels[0]
                done_rows += pixels.shape[2]
                if options.progress is not None:
                    options.progress(done_rows, total)
                del pixels
    report.update(seconds=time.perf_counter() - started, peak_bytes=peak.bytes)


def choose(planner: Planner, method: str, budget: float, tiles: Tiles) -> Plan:
    """Return the plan for `method` within `budget` bytes."""
    if method == "whole":
        return planner.whole()
    if method == "tiles":
        scale = planner.stages.downscale
        check_number("tile", tiles.size, scale, 2**20)
        check_number("overlap", tiles.overlap, 0, tiles.size - scale)
        return planner.tiles(int(tiles.size // scale), int(tiles.overlap // scale))
    return planner.strips(budget)


def image_rows(
    autoencoder: AutoencoderDC, planner: Planner, plan: Plan, latents: torch.Tensor, report: Json, poll: Poll
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, pixels [1, 3, n, W]) of one image, from top to bottom."""
    decoder, stages = autoencoder.decoder, planner.stages
    latents = latents.to(next(decoder.parameters()).device)
    if plan.method == "whole":
        with Polled(poll):
            pixels = decoder(latents)
        yield 0, pixels
        return
    if plan.method == "tiles":
        top = 0
        for pixels in decode_tiles(decoder, latents, plan.tile, plan.overlap, stages.downscale, poll):
            yield top, pixels
            top += pixels.shape[2]
        return
    retry = OomRetry(planner, plan, report)
    boundary = retry.global_stage(decoder, stages, latents, poll)
    yield from retry.local_stage(decoder, stages, boundary, poll)
