"""Exact decode with the VAE of another model, whose decoder is ComfyUI's AutoencoderKL, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import comfy.model_management
import comfy.sd
import comfy.utils
import torch

from ....sana_core.decode.group_norms import decode_normed, decoder_steps
from ....sana_core.errors import InputError
from ....sana_core.runtime.text import Json
from ..compat.internals import free_memory
from .vae import BUDGET, SHARE, report_text


def has_group_norms(vae: comfy.sd.VAE) -> bool:
    """Whether `decode_exactly` can decode with `vae`."""
    return decoder_steps(getattr(vae.first_stage_model, "decoder", None)) is not None


def decode_exactly(
    vae: comfy.sd.VAE, samples: torch.Tensor, method: str, budget_gb: float, devices: str
) -> tuple[torch.Tensor, str]:
    """Return the IMAGE of `samples` as VAE Decode computes it without tiles, and a report of the decode.

    Raises InputError for latents of another model, for options of SANA's VAE alone, and for an image that does not fit.
    """
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
        with exact_decoder(vae.first_stage_model.decoder, max_bytes, reports):
            pixels = vae.first_stage_model.decode(latents)
        image = vae.process_output(pixels.to(vae.output_device, vae.vae_output_dtype())).movedim(1, -1)
    return image, report_text(reports, len(samples), vae.device)


@contextmanager
def exact_decoder(decoder: torch.nn.Module, max_bytes: float, reports: list[Json]) -> Iterator[None]:
    """A context in which `decoder` decodes layer by layer in strips, and adds a report for each group of images.

    The VAE's own steps around it stay as they are.
    """
    bar = comfy.utils.ProgressBar(1)

    def forward(z: torch.Tensor, **ignored: object) -> torch.Tensor:
        # All convolutions run in strips, so there is no number of strips of an image.
        reports.append({"images": len(z), "strips": 0})
        return decode_normed(
            decoder,
            z,
            max_bytes,
            BUDGET * comfy.model_management.get_free_memory(torch.device("cpu")),
            poll=comfy.model_management.throw_exception_if_processing_interrupted,
            progress=bar.update_absolute,
            report=reports[-1],
        )

    decoder.forward = forward
    try:
        yield
    finally:
        del decoder.forward
