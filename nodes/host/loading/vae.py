"""DC-AE as ComfyUI's VAE: core's decode and encode nodes run sana_core's, exact and in the memory that is free.

The VAE of another model, whose decoder is ComfyUI's AutoencoderKL, is decoded exactly too.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP
from diffusers import AutoencoderDC

from ....sana_core.checkpoints import find_part, inspect_checkpoint
from ....sana_core.checkpoints.checkpoint import Source
from ....sana_core.checkpoints.load import load_part
from ....sana_core.decode import DecodeOptions, decode_into, encode_images
from ....sana_core.decode.group_norms import decode_normed, decoder_steps
from ....sana_core.decode.plan import UNBOUNDED, Planner
from ....sana_core.decode.stages import decoder_stages, encoder_stages
from ....sana_core.errors import InputError, without_folder
from ....sana_core.model.latents import CHANNELS, DOWNSCALE, check_channels
from ....sana_core.model.layers import arrange_convolutions
from ....sana_core.runtime.cancellation import Poll, Polled
from ....sana_core.runtime.device_team import DeviceThreads
from ....sana_core.runtime.text import Json
from ..compat import empty_vae, free_memory, path_of, remember_loader
from ..file_stats import Reloader
from ..folders import one_gpu_note
from .video_vae import load_video_vae
from .weights import config_tensor, keep_on_device, read, wide_dtype

# The part of the free memory that a decode may use.
BUDGET = 0.9
# The part of a GPU's memory that ComfyUI should clear for a decode that could also work with less. To load a model that
# was unloaded takes longer than taller strips gain.
SHARE = 0.2
# Key of the attachment with the threads of decodes on several devices.
THREADS = "sana_threads"


class SanaAutoencoder(AutoencoderDC):
    """DC-AE with the calls that ComfyUI's VAE makes."""

    # ComfyUI assigns the device, but diffusers has a property without a setter.
    device = None
    # `decode` writes into ComfyUI's buffer, and `encode` accepts images on any device.
    comfy_has_chunked_io = True

    def decode_output_shape(self, shape: torch.Size) -> tuple[int, ...]:
        return (shape[0], 3, shape[2] * DOWNSCALE, shape[3] * DOWNSCALE)

    def decode(self, z: torch.Tensor, output_buffer: torch.Tensor | None = None, **options) -> torch.Tensor:
        weights = next(self.parameters())
        if options.get("devices"):
            # Each device gets a budget of its own, after it has a copy of the decoder.
            options["free_bytes"] = free_memory
        elif options.get("max_bytes") is None:
            options["max_bytes"] = budget(planner_of(self, z.shape, weights.dtype, weights.device), weights.device)
        if output_buffer is None:
            device = comfy.model_management.intermediate_device()
            output_buffer = torch.empty(self.decode_output_shape(z.shape), device=device, dtype=weights.dtype)
        if "progress" not in options:
            options["progress"] = comfy.utils.ProgressBar(len(z) * z.shape[2] * DOWNSCALE).update_absolute
        poll = options.setdefault("poll", comfy.model_management.throw_exception_if_processing_interrupted)
        # ComfyUI calls this once for each group of images that fits into memory.
        reports: list[Json] = options.pop("reports", [])
        report: Json = {}
        # On a CPU one layer of a strip takes seconds, so poll inside it.
        with Polled(poll) if weights.device.type == "cpu" else nullcontext():
            decode_into(output_buffer, self, z, DecodeOptions(**options), report)
        check_decoded(output_buffer, z, sum(earlier["images"] for earlier in reports))
        reports.append({**report, "images": len(z)})
        return output_buffer

    def decode_tiled(
        self, z: torch.Tensor, tile_x: int = 16, tile_y: int = 16, overlap: int = 0, **ignored
    ) -> torch.Tensor:
        """Decode in strips that need no more memory than tiles of this size, in rows and columns of latents, would."""
        weights = next(self.parameters())
        planner = planner_of(self, z.shape, weights.dtype, weights.device)
        tiles = planner.tiles(max(tile_x, tile_y), overlap)
        return self.decode(z, method="strips", max_bytes=max(tiles.peak_bytes, planner.floor().peak_bytes))

    def encode(self, x: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        weights = next(self.parameters())
        max_bytes = budget(encoder_planner_of(self, x.shape, weights.dtype, weights.device), weights.device)
        poll = comfy.model_management.throw_exception_if_processing_interrupted
        return encode_images(self, x, max_bytes=max_bytes, poll=poll)


def check_decoded(images: torch.Tensor, latents: torch.Tensor, first: int = 0) -> None:
    """Raise InputError if the decoder has overflowed. ComfyUI would show such images as black.

    `first` is the number of the first image in its batch.
    """
    for number, image in enumerate(images):
        # A sum needs no memory, unlike isfinite().
        if not math.isfinite(float(image.sum(dtype=torch.float32))):
            largest = float(latents[number].abs().max())
            raise InputError(
                f"samples: image {first + number} has NaN or infinity after the decode, because its latents reach "
                f"{largest:.3g}, expected about 10; sample again in bf16 or fp32"
            )


def check_latents(samples: torch.Tensor) -> None:
    """Raise InputError unless `samples` can be decoded. ComfyUI takes the first frame of latents with frames."""
    if not isinstance(samples, torch.Tensor) or samples.is_nested:
        raise InputError(
            f"samples: got {type(samples).__name__}, expected one tensor of latents; use SANA Empty Latent"
        )
    shape = samples.shape
    check_channels("samples", shape[:2] + shape[3:] if len(shape) == 5 and shape[2] else shape)
    if not samples.is_floating_point():
        got = str(samples.dtype).removeprefix("torch.")
        raise InputError(f"samples: got latents of {got}, expected floating-point numbers; encode with SANA's VAE")


def check_pixels(pixels: torch.Tensor) -> None:
    """Raise InputError unless `pixels` is an IMAGE that ComfyUI can crop to whole cells of latents."""
    if not isinstance(pixels, torch.Tensor):
        raise InputError(f"pixels: got {type(pixels).__name__}, expected an IMAGE; connect an output of that type")
    shape = pixels.shape
    if len(shape) != 4 or not shape[0] or shape[3] < 3 or not pixels.is_floating_point():
        got = str(pixels.dtype).removeprefix("torch.")
        raise InputError(
            f"pixels: got {got} of shape {list(shape)}, expected one or more images [batch, height, width, 3] of "
            "floating-point numbers; use Load Image"
        )
    if min(shape[1:3]) < DOWNSCALE:
        raise InputError(
            f"pixels: got images of {shape[2]} x {shape[1]}, expected at least {DOWNSCALE} x {DOWNSCALE}; scale them"
        )


def budget(planner: Planner, device: torch.device) -> int:
    """Return the memory budget: 90 % of the free memory, but at least the smallest plan."""
    return max(int(free_memory(device) * BUDGET), planner.floor().peak_bytes)


def planner_of(
    autoencoder: AutoencoderDC, latent_shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Planner:
    return Planner(decoder_stages(autoencoder), latent_shape[2], latent_shape[3], dtype, device.type != "cpu")


def encoder_planner_of(
    autoencoder: AutoencoderDC, image_shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Planner:
    rows, columns = (side // DOWNSCALE for side in image_shape[2:])
    return Planner(encoder_stages(autoencoder), rows, columns, dtype, device.type != "cpu")


@without_folder
class SanaVAE(comfy.sd.VAE):
    """ComfyUI's VAE around a SanaAutoencoder.

    ComfyUI calls the functions that estimate memory before it loads the weights. So the estimates are for
    `self.device`, the device that it will load them to. Select VAE Device changes it.
    """

    def memory_used_decode(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.reserved_bytes(planner_of(self.first_stage_model, shape, dtype, self.device))

    def memory_used_encode(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.reserved_bytes(encoder_planner_of(self.first_stage_model, shape, dtype, self.device))

    def decode(self, samples_in: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        # ComfyUI plans the memory before the decoder sees the latents.
        check_latents(samples_in)
        return super().decode(samples_in, *args, **kwargs)

    def decode_tiled(self, samples: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        check_latents(samples)
        return super().decode_tiled(samples, *args, **kwargs)

    def encode(self, pixel_samples: torch.Tensor) -> torch.Tensor:
        # ComfyUI crops the images and plans the memory before the encoder sees them.
        check_pixels(pixel_samples)
        return super().encode(pixel_samples)

    def encode_tiled(self, pixel_samples: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        check_pixels(pixel_samples)
        return super().encode_tiled(pixel_samples, *args, **kwargs)

    def reserved_bytes(self, planner: Planner) -> int:
        """Return the bytes that ComfyUI should clear: enough for an efficient plan, but not more than SHARE."""
        total, floor = comfy.model_management.get_total_memory(self.device), planner.floor()
        return (planner.fitting(max(total * SHARE, floor.peak_bytes)) or floor).peak_bytes

    def encode_tiled_(self, pixels: torch.Tensor, **ignored) -> torch.Tensor:
        """Encode in strips. ComfyUI would blend three passes of tiles."""
        latents = self.first_stage_model.encode(self.process_input(pixels).to(self.vae_dtype))
        return latents.to(device=self.output_device, dtype=self.vae_output_dtype())

    def get_sd(self) -> dict[str, torch.Tensor]:
        autoencoder = self.first_stage_model
        return {**autoencoder.state_dict(), **config_tensor("autoencoder", autoencoder.config)}


def load_vae(source: Source) -> comfy.sd.VAE:
    checkpoint = inspect_checkpoint(source)
    path = checkpoint.path
    # ComfyUI's option for dynamic VRAM is ignored, because these weights never use it.
    reload = Reloader(lambda path, **ignored: load_vae(path).patcher, path)
    for part in checkpoint.components:
        if part.kind == "video_autoencoder":
            return load_video_vae(part)
    part = find_part(checkpoint, "autoencoder")
    device = comfy.model_management.vae_device()
    dtype = wide_dtype(device)
    vae = empty_vae(device, dtype)
    vae.__class__ = SanaVAE
    # Functions for the pixel-space VAE, which would hide the methods.
    del vae.memory_used_decode, vae.memory_used_encode

    # These layers are not ComfyUI's and do not use dynamic VRAM. Strips use each weight many times, so all 0.6 GB stay
    # on the device.
    with Polled(comfy.model_management.throw_exception_if_processing_interrupted):
        autoencoder = load_part(part, dtype, partial(read, dtype=dtype))
    autoencoder.__class__ = SanaAutoencoder
    comfy.model_management.archive_model_dtypes(autoencoder)

    vae.first_stage_model = autoencoder
    vae.downscale_ratio = vae.upscale_ratio = DOWNSCALE
    vae.latent_channels = CHANNELS
    vae.disable_offload = True
    vae.handles_tiling = True
    vae.patcher = comfy.model_patcher.ModelPatcher(autoencoder, device, comfy.model_management.vae_offload_device())
    remember_loader(vae.patcher, reload, path)
    # For all decodes on several devices.
    vae.patcher.set_attachments(THREADS, DeviceThreads())
    keep_on_device(vae.patcher)
    # Arrange the convolutions after each load, because the device may have changed.
    vae.patcher.add_callback_with_key(
        CallbacksMP.ON_LOAD, "sana_arrange", lambda patcher, *load: arrange_convolutions(patcher.model)
    )
    vae.size = comfy.model_management.module_size(autoencoder)
    return vae


def decode(vae: comfy.sd.VAE, samples: torch.Tensor, method: str, budget_gb: float, devices: str) -> tuple:
    """Return the IMAGE of `samples`, and a report of the decode."""
    reports: list[Json] = []
    options: Json = {"method": method, "reports": reports}
    every = comfy.model_management.get_all_torch_devices() if devices == "all" else []
    if vae.device not in every:
        # With --cpu-vae the VAE stays on the CPU.
        every = []
    if budget_gb and method in UNBOUNDED:
        raise InputError(f"budget_gb: got {budget_gb} with method {method}, which has no budget; set it to 0")
    if budget_gb:
        planner = planner_of(vae.first_stage_model, samples.shape, vae.vae_dtype, vae.device)
        floor = math.ceil(planner.floor().peak_bytes / 1e6) / 1e3
        if budget_gb < floor:
            size = f"{samples.shape[3] * DOWNSCALE} x {samples.shape[2] * DOWNSCALE}"
            raise InputError(f"budget_gb: got {budget_gb}, expected at least {floor} for an image of {size}, or 0")
        options["max_bytes"] = int(budget_gb * 1e9)
    if every:
        options["devices"], options["threads"] = every, vae.patcher.get_attachment(THREADS)
        # Each other device needs room for a copy of the decoder.
        memory = vae.patcher.model_size() + vae.memory_used_decode(samples.shape, vae.vae_dtype)
        for device in every:
            if device != vae.device:
                comfy.model_management.free_memory(memory, device)
    image = vae.decode(samples, options)
    note = one_gpu_note() if devices == "all" else ""
    return image, "\n".join(filter(None, [report_text(reports, len(samples), vae.device), note]))


def check_image_vae(vae: comfy.sd.VAE) -> None:
    """Raise InputError unless `vae` has latents with the channels of SANA's images."""
    if vae.latent_channels != CHANNELS:
        got = vae.latent_channels
        raise InputError(f"vae: got one of {got} channels, expected {CHANNELS}; use the VAE of a SANA model of images")


def check_decodable(samples: torch.Tensor, vae: comfy.sd.VAE) -> None:
    """Raise InputError unless `samples` are SANA's latents of images, and `vae` has latents of that kind."""
    if samples.ndim == 5:
        raise InputError("samples: got the latent of a video, expected one of images; use VAE Decode for videos")
    check_channels("samples", samples.shape)
    check_image_vae(vae)


def vae_path(vae: comfy.sd.VAE, reader: str) -> str:
    """Return the checkpoint of `vae`, which `reader` loads again."""
    if not isinstance(vae.first_stage_model, SanaAutoencoder):
        got = type(vae.first_stage_model).__name__
        raise InputError(f"vae: got {got}, which {reader} cannot load; use SANA Loader or SANA Load VAE")
    return path_of(vae.patcher)


def load_for_decode(vae: comfy.sd.VAE, shape: torch.Size) -> None:
    """Load SANA's `vae` and clear memory for a decode of latents of that shape, as ComfyUI's VAE Decode does."""
    memory = vae.memory_used_decode(shape, vae.vae_dtype)
    comfy.model_management.load_models_gpu([vae.patcher], memory, force_full_load=vae.disable_offload)


def decode_loaded(vae: comfy.sd.VAE, samples: torch.Tensor, poll: Poll) -> torch.Tensor:
    """Return the IMAGE of `samples` by SANA's `vae`, which is loaded, in a thread that must not touch ComfyUI's lists.

    The caller shows the progress. Raises the out-of-memory error. ComfyUI would retry with tiles.
    """
    autoencoder = vae.first_stage_model
    shape = autoencoder.decode_output_shape(samples.shape)
    pixels = torch.empty(shape, device=vae.output_device, dtype=vae.vae_output_dtype())
    samples = samples.to(device=vae.device, dtype=vae.vae_dtype)
    autoencoder.decode(samples, output_buffer=pixels, progress=None, poll=poll)
    return vae.process_output(pixels).movedim(1, -1)


def report_text(reports: list[Json], images: int, device: torch.device) -> str:
    """Return the reports of the groups that ComfyUI decoded one after another, as text.

    If memory runs out in ComfyUI, it calls `decode_tiled` for all `images`, which adds no report.
    """
    if sum(report["images"] for report in reports) < images:
        return "ran out of memory; decoded again in smaller strips"
    strips, seconds = (sum(report[key] for report in reports) for key in ("strips", "seconds"))
    peaks = [report["peak_bytes"] for report in reports if report["peak_bytes"] is not None]
    # A process on a CPU keeps memory that it used before, so that its measured peak is often 0.
    measured = f", {max(peaks) / 1e6:.0f} MB measured" if peaks and device.type != "cpu" else ""
    decoded = f"{strips} strips" if strips else "decoded"
    predicted = max(report["predicted_bytes"] for report in reports)
    first = f"{decoded} in {seconds:.1f} s, peak {predicted / 1e6:.0f} MB predicted{measured}"
    return "\n".join([first, *(event for report in reports for event in report["events"]), reports[0]["plan"]])


def has_group_norms(vae: comfy.sd.VAE) -> bool:
    """Whether `decode_other_vae` can decode with `vae`."""
    return decoder_steps(getattr(vae.first_stage_model, "decoder", None)) is not None


def decode_other_vae(
    vae: comfy.sd.VAE, samples: torch.Tensor, method: str, budget_gb: float, devices: str
) -> tuple[torch.Tensor, str]:
    """Return the IMAGE of `samples` as VAE Decode computes it without tiles, and a report of the decode."""
    if samples.ndim != 4 or samples.shape[1] != vae.latent_channels:
        raise InputError(
            f"samples: got latents of shape {list(samples.shape)}, expected {vae.latent_channels} channels; use the "
            "VAE of the model that sampled them"
        )
    if method not in ("auto", "strips"):
        raise InputError(f"method: got {method} for another VAE than SANA's, expected auto or strips; use VAE Decode")
    if devices != "one":
        raise InputError(f"devices: got {devices} for another VAE than SANA's, expected one; choose it")
    vae.throw_exception_if_invalid()
    manager = comfy.model_management
    with manager.cuda_device_context(vae.device):
        memory = int(budget_gb * 1e9) or SHARE * manager.get_total_memory(vae.device)
        memory = min(memory, vae.memory_used_decode(samples.shape, vae.vae_dtype))
        manager.load_models_gpu([vae.patcher], memory_required=memory, force_full_load=vae.disable_offload)
        reports: list[Json] = []
        latents = samples.to(device=vae.device, dtype=vae.vae_dtype)
        max_bytes = int(budget_gb * 1e9) or BUDGET * free_memory(vae.device)
        decoder, bar = vae.first_stage_model.decoder, comfy.utils.ProgressBar(1)

        def forward(z: torch.Tensor, **ignored: object) -> torch.Tensor:
            # All convolutions run in strips, so there is no number of strips of an image.
            reports.append({"images": len(z), "strips": 0})
            return decode_normed(
                decoder,
                z,
                max_bytes,
                BUDGET * manager.get_free_memory(torch.device("cpu")),
                poll=manager.throw_exception_if_processing_interrupted,
                progress=bar.update_absolute,
                report=reports[-1],
            )

        # The VAE's own steps around its decoder stay as they are.
        decoder.forward = forward
        try:
            pixels = vae.first_stage_model.decode(latents)
        finally:
            del decoder.forward
        image = vae.process_output(pixels.to(vae.output_device, vae.vae_output_dtype())).movedim(1, -1)
    return image, report_text(reports, len(samples), vae.device)
