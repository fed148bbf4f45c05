"""Latents to pixels: which plan, picture after picture, and on after memory ran out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..checks import check_finite, check_number
from ..errors import InputError
from ..latents import check_channels
from ..polling import Poll, Polled, no_poll
from .blended_tiles import decode_tiles
from .device_memory import PeakMemory, free_bytes
from .devices import Workers, shared_rows
from .oom import OomRetry, Report
from .plan import METHODS, Plan, Planner
from .stages import Stages, decoder_stages

if TYPE_CHECKING:
    from diffusers import AutoencoderDC

# of the free memory, since other programs take some too
BUDGET = 0.9
TILE, OVERLAP = 1024, 128  # pixels
Progress = Callable[[int, int], None]


@torch.no_grad()
def decode_latents(
    autoencoder: AutoencoderDC,
    latents: torch.Tensor,
    method: str = "auto",
    max_bytes: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    report: dict[str, Any] | None = None,
    *,
    out: torch.Tensor | None = None,
    tile: int = TILE,
    overlap: int = OVERLAP,
    poll: Poll = no_poll,
    progress: Progress | None = None,
) -> torch.Tensor:
    """Return pictures [B, 3, 32 h, 32 w], about [-1, 1], of `latents` [B, 32, h, w] in the autoencoder's own scale.

    "strips" and "whole" give the same pixels, "tiles" blends tiles of `tile` pixels, each with statistics of its own.
    "auto" is the fastest exact plan within `max_bytes` of memory beyond weights, latents and pictures; without it,
    within what is free. `devices` share the rows of each picture out. The pictures are written into `out` if it is
    given, on any device. `poll` is called many times a strip and cancels by raising; `progress` gets pixel rows done
    and in all. `report` is filled with what was done. Raises InputError for latents of other channels or with NaN, an
    unknown method, or a budget that no plan fits.
    """
    check_channels("samples", latents.shape)
    scale = decoder_stages(autoencoder).downscale
    count, _, h, w = latents.shape
    if out is None:
        like = next(autoencoder.parameters())
        out = torch.empty(count, 3, h * scale, w * scale, device=like.device, dtype=like.dtype)
    rows = decode_rows(
        autoencoder,
        latents,
        method,
        max_bytes,
        devices,
        report,
        tile=tile,
        overlap=overlap,
        poll=poll,
        progress=progress,
    )
    for picture, top, pixels in rows:
        out[picture, :, top : top + pixels.shape[1]] = pixels
    return out


@torch.no_grad()
def decode_rows(
    autoencoder: AutoencoderDC,
    latents: torch.Tensor,
    method: str = "auto",
    max_bytes: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    report: dict[str, Any] | None = None,
    *,
    tile: int = TILE,
    overlap: int = OVERLAP,
    poll: Poll = no_poll,
    progress: Progress | None = None,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (picture, first row, pixels [3, n, W]) as they are done, as `decode_latents` has them.

    One picture after the other; with one device its rows come from top to bottom.
    """
    check_channels("samples", latents.shape)
    check_finite("samples", latents)
    if method not in METHODS:
        raise InputError(f"method: got {method!r}, expected one of {', '.join(METHODS)}")
    like = next(autoencoder.parameters())
    if method in ("whole", "tiles") and [torch.device(name) for name in devices or [like.device]] != [like.device]:
        raise InputError(
            f"devices: got {len(devices or ())} for method {method}, which runs on the autoencoder's; choose method "
            "auto or strips, or no devices"
        )
    stages = decoder_stages(autoencoder)
    planner = planner_for(autoencoder, latents.shape)
    workers = None if devices is None else Workers(autoencoder.decoder, [torch.device(name) for name in devices])
    if max_bytes is None:
        max_bytes = int(BUDGET * min(free_bytes(device) for device in (workers.devices if workers else [like.device])))
    plan = choose(planner, method, max_bytes, tile, overlap)
    total, done = len(latents) * latents.shape[2] * stages.downscale, 0
    notes = Report(report, stages, plan)
    with PeakMemory(like.device) as peak:
        for picture in range(len(latents)):
            one = latents[picture : picture + 1].to(device=like.device, dtype=like.dtype)
            if not stages.attends:
                # as attention leaves its maps, and rows of strips are one piece of memory
                one = one.contiguous(memory_format=torch.channels_last)
            if workers is not None and plan.method == "strips":
                parts = shared_rows(workers, stages, one, OomRetry(planner, plan, notes), poll)
            else:
                parts = picture_rows(autoencoder, stages, planner, plan, one, notes, poll)
            for top, pixels in parts:
                poll()
                notes.report["strips"] += plan.method == "strips"
                yield picture, top, pixels[0]
                done += pixels.shape[2]
                if progress is not None:
                    progress(done, total)
                del pixels
    notes.finish(peak.bytes)


def planner_for(autoencoder: AutoencoderDC, latent_shape: Sequence[int]) -> Planner:
    """Return what plans the decode of latents [B, 32, h, w] where the autoencoder is."""
    like = next(autoencoder.parameters())
    return Planner(decoder_stages(autoencoder), latent_shape[2], latent_shape[3], like.dtype, like.device.type != "cpu")


def choose(planner: Planner, method: str, budget: float, tile: int, overlap: int) -> Plan:
    """Return the plan for `method` within `budget` bytes. Raises InputError for sizes that make no tiles."""
    if method == "whole":
        return planner.whole()
    if method == "tiles":
        scale = planner.stages.downscale
        check_number("tile", tile, scale, 2**20)
        check_number("overlap", overlap, 0, tile - scale)
        return planner.tiles(int(tile // scale), int(overlap // scale))
    return planner.strips(budget)


def picture_rows(
    autoencoder: AutoencoderDC,
    stages: Stages,
    planner: Planner,
    plan: Plan,
    latents: torch.Tensor,
    notes: Report,
    poll: Poll,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, pixels [1, 3, n, W]) of one picture, from top to bottom."""
    decoder = autoencoder.decoder
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
    retry = OomRetry(planner, plan, notes)
    boundary = retry.global_stage(decoder, stages, latents, poll)
    yield from retry.local_stage(decoder, stages, boundary, poll)
