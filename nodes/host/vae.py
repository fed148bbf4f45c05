"""DC-AE as ComfyUI's VAE."""

from __future__ import annotations

from pathlib import Path

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import torch
from diffusers import AutoencoderDC

from ...sana_core.checkpoints import find_part, inspect_checkpoint
from ...sana_core.decode import decode_latents, encode_images
from ...sana_core.latents import CHANNELS, DOWNSCALE
from .weights import load_component, wide_dtype

# Measured at 1024 x 1024 in fp32: 2.7 GB beyond the weights, for 128 channels at full resolution.
ELEMENTS_PER_PIXEL = 650 / 128


class SanaAutoencoder(AutoencoderDC):
    """DC-AE with the calls that ComfyUI's VAE makes."""

    device = None  # ComfyUI writes it; diffusers has a property without setter here

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return decode_latents(self, z)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return encode_images(self, x)


def load_vae(path: Path, disable_dynamic: bool = False) -> comfy.sd.VAE:
    """Return the VAE of the checkpoint at `path`.

    Raises ValueError or FileNotFoundError, with the file's name, for what is no DC-AE.
    """
    info = find_part(inspect_checkpoint(path), "autoencoder")
    # ComfyUI's VAE has no constructor for a module of ours; the pixel-space one, which has no weights, sets up all
    # else, and its module is then exchanged.
    device = comfy.model_management.vae_device()
    dtype = wide_dtype(device)
    vae = comfy.sd.VAE(sd={"pixel_space_vae": torch.ones(())}, device=device, dtype=dtype)

    autoencoder = load_component(info, dtype, None, comfy.ops.disable_weight_init)
    autoencoder.__class__ = SanaAutoencoder
    elements = ELEMENTS_PER_PIXEL * autoencoder.config.decoder_block_out_channels[0]

    vae.first_stage_model = autoencoder
    vae.downscale_ratio = vae.upscale_ratio = DOWNSCALE
    vae.latent_channels = CHANNELS
    vae.disable_offload = False
    vae.memory_used_decode = lambda shape, dtype: (
        elements * shape[2] * shape[3] * DOWNSCALE**2 * comfy.model_management.dtype_size(dtype)
    )
    vae.memory_used_encode = lambda shape, dtype: (
        elements * shape[2] * shape[3] * comfy.model_management.dtype_size(dtype)
    )
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    vae.patcher = patcher_class(autoencoder, device, comfy.model_management.vae_offload_device())
    vae.patcher.cached_patcher_init = (load_vae_patcher, (path,))
    vae.size = comfy.model_management.module_size(autoencoder)
    return vae


def load_vae_patcher(path: Path, disable_dynamic: bool = False) -> comfy.model_patcher.ModelPatcher:
    """What ComfyUI calls for another copy of the weights."""
    return load_vae(path, disable_dynamic).patcher
