"""DC-AE as ComfyUI's VAE: core's decode and encode nodes run sana_core's, exact and in the memory that is free."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.utils
import torch
from diffusers import AutoencoderDC

from ...sana_core.checkpoints import find_part, inspect_checkpoint
from ...sana_core.checkpoints.load import load_part
from ...sana_core.decode import decode_latents, encode_images
from ...sana_core.decode.plan import Planner
from ...sana_core.decode.stages import decoder_stages, encoder_stages
from ...sana_core.errors import InputError
from ...sana_core.latents import CHANNELS, DOWNSCALE
from .stamps import reloader
from .weights import read, wide_dtype

# of the free memory
BUDGET = 0.9
# of a card, that a decode asks ComfyUI to clear where it could do with less
SHARE = 0.5


class SanaAutoencoder(AutoencoderDC):
    """DC-AE with the calls that ComfyUI's VAE makes."""

    device = None  # ComfyUI writes it; diffusers has a property without setter here
    comfy_has_chunked_io = True  # decode writes into ComfyUI's buffer, encode takes pictures from wherever they are

    def decode_output_shape(self, shape: torch.Size) -> tuple[int, ...]:
        return (shape[0], 3, shape[2] * DOWNSCALE, shape[3] * DOWNSCALE)

    def decode(self, z: torch.Tensor, output_buffer: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        weights = next(self.parameters())
        if options.get("max_bytes") is None:
            planner = planner_of(self, z.shape, weights.dtype)
            options["max_bytes"] = min(budget(planner, device) for device in options.get("devices") or [weights.device])
        if output_buffer is None:
            device = comfy.model_management.intermediate_device()
            output_buffer = torch.empty(self.decode_output_shape(z.shape), device=device, dtype=weights.dtype)
        if "progress" not in options:
            options["progress"] = comfy.utils.ProgressBar(len(z) * z.shape[2] * DOWNSCALE).update_absolute
        return decode_latents(
            self,
            z,
            out=output_buffer,
            poll=comfy.model_management.throw_exception_if_processing_interrupted,
            **options,
        )

    def decode_tiled(
        self, z: torch.Tensor, tile_x: int = 16, tile_y: int = 16, overlap: int = 0, **ignored: Any
    ) -> torch.Tensor:
        """Decode in strips that need no more memory than tiles of this size, in rows and columns of latents, would."""
        planner = planner_of(self, z.shape, next(self.parameters()).dtype)
        tiles = planner.tiles(max(tile_x, tile_y), overlap)
        return self.decode(z, method="strips", max_bytes=max(tiles.peak_bytes, planner.floor().peak_bytes))

    def encode(self, x: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        weights = next(self.parameters())
        max_bytes = budget(encoder_planner_of(self, x.shape, weights.dtype), weights.device)
        poll = comfy.model_management.throw_exception_if_processing_interrupted
        return encode_images(self, x, max_bytes=max_bytes, poll=poll)


def budget(planner: Planner, device: torch.device) -> int:
    """Return what work may take of `device`: of its free memory, but never less than it can do with."""
    free = comfy.model_management.get_free_memory(device)
    return max(int(free * BUDGET), planner.floor().peak_bytes)


def planner_of(autoencoder: AutoencoderDC, latent_shape: torch.Size, dtype: torch.dtype) -> Planner:
    device = comfy.model_management.vae_device()
    return Planner(decoder_stages(autoencoder), latent_shape[2], latent_shape[3], dtype, device.type != "cpu")


def encoder_planner_of(autoencoder: AutoencoderDC, image_shape: torch.Size, dtype: torch.dtype) -> Planner:
    rows, columns = (side // DOWNSCALE for side in image_shape[2:])
    device = comfy.model_management.vae_device()
    return Planner(encoder_stages(autoencoder), rows, columns, dtype, device.type != "cpu")


def reserved_bytes(planner: Planner) -> int:
    """Return what a decode asks ComfyUI to have free: what suits it, but no more of the card than it has to."""
    total = comfy.model_management.get_total_memory(comfy.model_management.vae_device())
    floor = planner.floor()
    return (planner.fitting(max(total * SHARE, floor.peak_bytes)) or floor).peak_bytes


def load_vae(path: Path, disable_dynamic: bool = False) -> comfy.sd.VAE:
    """Return the VAE of the checkpoint at `path`.

    Raises CheckpointError or MissingFileError, with the file's name, for what is no DC-AE.
    """
    reload = reloader(load_vae_patcher, path)
    info = find_part(inspect_checkpoint(path), "autoencoder")
    # ComfyUI's VAE has no constructor for a module of ours; the pixel-space one, which has no weights, sets up all
    # else, and its module is then exchanged.
    device = comfy.model_management.vae_device()
    dtype = wide_dtype(device)
    vae = comfy.sd.VAE(sd={"pixel_space_vae": torch.ones(())}, device=device, dtype=dtype)

    # not adopted: strips use the weights many times, so they stay on the device whole, as layers of torch's own do
    autoencoder = load_part(info, dtype, read)
    autoencoder.__class__ = SanaAutoencoder
    comfy.model_management.archive_model_dtypes(autoencoder)

    vae.first_stage_model = autoencoder
    vae.downscale_ratio = vae.upscale_ratio = DOWNSCALE
    vae.latent_channels = CHANNELS
    vae.disable_offload = False
    vae.handles_tiling = True
    vae.memory_used_decode = lambda shape, dtype: reserved_bytes(planner_of(autoencoder, shape, dtype))
    vae.memory_used_encode = lambda shape, dtype: reserved_bytes(encoder_planner_of(autoencoder, shape, dtype))
    # core would blend three passes of tiles
    vae.encode_tiled_ = lambda pixels, **ignored: autoencoder.encode(vae.process_input(pixels).to(dtype)).to(
        device=vae.output_device, dtype=vae.vae_output_dtype()
    )
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    vae.patcher = patcher_class(autoencoder, device, comfy.model_management.vae_offload_device())
    vae.patcher.cached_patcher_init = (reload, (path,))
    vae.size = comfy.model_management.module_size(autoencoder)
    return vae


def load_vae_patcher(path: Path, disable_dynamic: bool = False) -> comfy.model_patcher.ModelPatcher:
    """What ComfyUI calls for another copy of the weights."""
    return load_vae(path, disable_dynamic).patcher


def decode(vae: comfy.sd.VAE, samples: torch.Tensor, method: str, budget_gb: float, devices: str) -> tuple:
    """Return the IMAGE of `samples`, and a report of how it was made."""
    report: dict[str, Any] = {}
    options: dict[str, Any] = {"method": method, "report": report}
    if budget_gb:
        planner = planner_of(vae.first_stage_model, samples.shape, vae.vae_dtype)
        floor = math.ceil(planner.floor().peak_bytes / 1e6) / 1e3
        if budget_gb < floor:
            size = f"{samples.shape[3] * DOWNSCALE} x {samples.shape[2] * DOWNSCALE}"
            raise InputError(f"budget_gb: got {budget_gb}, expected at least {floor} for a picture of {size}, or 0")
        options["max_bytes"] = int(budget_gb * 1e9)
    if devices == "all":
        options["devices"] = comfy.model_management.get_all_torch_devices()
    return vae.decode(samples, options), report_text(report)


def report_text(report: dict[str, Any]) -> str:
    """Return what `decode_latents` reports; it does not where ComfyUI saw memory run out and called `decode_tiled`."""
    if "seconds" not in report:
        return "memory ran out; decoded again, in strips that need no more of it than ComfyUI's tiles"
    lines = [
        report["plan"],
        f"{report['strips']} strips, {report['seconds']:.2f} s",
        f"peak {report['predicted_bytes'] / 1e6:.0f} MB predicted, {report['peak_bytes'] / 1e6:.0f} MB measured",
    ]
    return "\n".join([*lines, *report["events"]])
