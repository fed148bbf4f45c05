"""Live previews by TAESANA, a small decoder for SANA's latents. The user puts its file into models/vae_approx.

Its architecture is the f32 decoder of https://github.com/madebyollin/taesd. It has ComfyUI's blocks, but doubles the
size five times. ComfyUI has only a decoder that doubles it three times.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import comfy.utils
import folder_paths
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy.taesd.taesd import Block, Clamp, conv

from ....sana_core.errors import CheckpointError
from ....sana_core.model.latents import CHANNELS, DOWNSCALE
from ....sana_core.runtime.accelerator import is_out_of_memory

NAME = "taesana_decoder"
# Channels of the three blocks at each size. The first size is the size of the latent, each other size is the double.
WIDTHS = (256, 128, 64, 64, 64)


def taesana_decoder() -> torch.nn.Sequential:
    """Return the decoder without weights. Scaled latents [B, 32, h, w] become images [B, 3, 32h, 32w], about [0, 1]."""
    parts = [Clamp(), conv(CHANNELS, WIDTHS[0]), torch.nn.ReLU()]
    for width, following in zip(WIDTHS, (*WIDTHS[1:], WIDTHS[-1]), strict=True):
        parts += [Block(width, width) for _ in range(3)]
        parts += [torch.nn.Upsample(scale_factor=2), conv(width, following, bias=False)]
    parts += [Block(WIDTHS[-1], WIDTHS[-1]), conv(WIDTHS[-1], 3)]
    return torch.nn.Sequential(*parts)


def find_taesana() -> str | None:
    """Return the path of TAESANA's decoder, or None if there is none or if ComfyUI has another preview method."""
    if args.preview_method not in (LatentPreviewMethod.Auto, LatentPreviewMethod.TAESD):
        return None
    names = [name for name in folder_paths.get_filename_list("vae_approx") if name.startswith(NAME)]
    return folder_paths.get_full_path("vae_approx", names[0]) if names else None


def taesana_previewer(
    path: str, coarse: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that decodes the first of scaled latents [B, 32, h, w] to an image [1, 3, H, W] in [-1, 1].

    The image is not larger than ComfyUI's previews. If memory runs out, the function returns the image of `coarse`,
    because a preview must not end the sampling. Raises CheckpointError if the file is not TAESANA's decoder.
    """
    decoder = taesana_decoder().requires_grad_(False)
    try:
        decoder.load_state_dict(comfy.utils.load_torch_file(path, safe_load=True))
    except RuntimeError:
        raise CheckpointError(
            f"preview: models/vae_approx holds a {NAME} that is not the decoder of TAESANA; download it again"
        ) from None

    def preview(latents: torch.Tensor) -> torch.Tensor:
        latents = latents[:1]
        # The latents of a 1024 px image, 32 x 32 cells, would take 805 MB. No estimate of memory includes this.
        cells, side = max(1, math.ceil(args.preview_size / DOWNSCALE)), max(latents.shape[-2:])
        smaller = latents
        if side > cells:
            size = [max(1, round(rows * cells / side)) for rows in latents.shape[-2:]]
            smaller = torch.nn.functional.interpolate(latents, size, mode="area")
        try:
            return decoder.to(smaller)(smaller) * 2 - 1
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return coarse(latents)

    return preview
