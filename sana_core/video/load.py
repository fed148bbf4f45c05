"""The VAE of a SANA-Video folder, and whether the folder's parts fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints import find_part
from ..checkpoints.load import build_module, load_part
from ..errors import CheckpointError
from ..model.known_models import VIDEOS

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint


def check_parts(info: Checkpoint, transformer: Checkpoint) -> None:
    """Raise CheckpointError unless the VAE and the text encoder of `info` fit `transformer`. Only headers are read."""
    vae, text = find_video_autoencoder(info), find_part(info, "text_encoder")
    check_vae(vae, transformer)
    width = text.headers["embed_tokens.weight"].shape[1]
    expected_width = transformer.headers["caption_projection.linear_1.weight"].shape[1]
    if width != expected_width:
        raise CheckpointError(
            f"{text.name}: got embeddings of {width} channels, expected {expected_width}; download the folder again"
        )
    build_module(vae)


def check_vae(vae: Checkpoint, transformer: Checkpoint) -> None:
    """Raise CheckpointError unless the video VAE `vae` decodes the latents of `transformer`."""
    expected = VIDEOS[transformer.variant].vae
    if vae.variant != expected:
        raise CheckpointError(f"{vae.name}: got the VAE {vae.variant}, expected {expected}; download the folder again")


def load_video_autoencoder(
    info: Checkpoint, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the video VAE in `info`, and the mean and the standard deviation [C, 1, 1, 1] of its latents.

    The transformer generates normalised latents, so these have to be undone before a decode.

    Raises CheckpointError for a file that is not in diffusers' layout with its configuration beside it, and as
    `load_part` does.
    """
    part = find_video_autoencoder(info)
    module: Any = load_part(part, torch.float32)
    values = module.config if part.variant == "wan-2.1" else dict(module.named_buffers())
    mean, std = (torch.as_tensor(values[f"latents_{name}"]).view(-1, 1, 1, 1).to(device) for name in ("mean", "std"))
    return module.to(device, dtype), mean, std


def find_video_autoencoder(info: Checkpoint) -> Checkpoint:
    """Return the video VAE in `info`. Raises CheckpointError unless diffusers' configuration is beside it."""
    part = find_part(info, "video_autoencoder")
    if part.layout != "diffusers" or part.config is None:
        raise CheckpointError(f"{part.name}: got a VAE without diffusers' configuration; use the diffusers folder")
    return part
