"""SANA's latents as ComfyUI's LATENT: channels, scale, and previews.

Without TAESANA, previews show the colours of the latents. TAESANA is a small decoder, whose file the user puts into
models/vae_approx. Its architecture is the f32 decoder of https://github.com/madebyollin/taesd. It has ComfyUI's blocks,
but doubles the size five times. ComfyUI has only a decoder that doubles it three times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import comfy.latent_formats
import comfy.model_management
import comfy.utils
import folder_paths
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy.taesd.taesd import Block, Clamp, conv

from ....sana_core.checkpoints import Checkpoint
from ....sana_core.checkpoints.generation import latent_scale, saved_field
from ....sana_core.checkpoints.schemas import read_preview
from ....sana_core.errors import CheckpointError, InputError
from ....sana_core.model.known_models import DEFAULT_RESOLUTION, size_note
from ....sana_core.model.latents import CHANNELS, DOWNSCALE, latent_shape
from ....sana_core.runtime.accelerator import is_out_of_memory

if TYPE_CHECKING:
    from .model import SanaModel

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
    because a preview must not end the sampling.
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


# DC-AE f32c32 sana-1.0, from the scaled latent to RGB in [0, 1], fitted by the authors of
# https://github.com/city96/ComfyUI_ExtraModels/pull/92
RGB_FACTORS = [
    [-0.0020, -0.0061, -0.0017],
    [0.0014, 0.0037, 0.0041],
    [0.0101, 0.0003, -0.0143],
    [-0.0024, 0.0031, -0.0010],
    [0.0022, 0.0077, -0.0132],
    [0.0112, 0.0058, 0.0036],
    [-0.0729, 0.0111, 0.0361],
    [0.0323, 0.0287, 0.0250],
    [0.0016, -0.0011, 0.0028],
    [-0.0356, -0.0234, -0.0031],
    [-0.0002, -0.0021, -0.0127],
    [0.0002, 0.0012, -0.0008],
    [0.0138, 0.0027, 0.0074],
    [0.0130, 0.0026, 0.0060],
    [0.0153, 0.0095, 0.0067],
    [0.0052, -0.0095, 0.0085],
    [0.0144, -0.0033, 0.0095],
    [-0.0041, -0.0019, -0.0034],
    [-0.0025, 0.0005, 0.0020],
    [-0.0036, 0.0011, 0.0053],
    [-0.0052, 0.0081, -0.0376],
    [-0.0039, -0.0016, -0.0036],
    [-0.0066, -0.0068, -0.0100],
    [-0.0022, 0.0001, 0.0015],
    [-0.0929, -0.1138, -0.1092],
    [0.0008, 0.0056, 0.0348],
    [0.0127, 0.0297, 0.0032],
    [-0.0012, 0.0091, -0.0004],
    [0.0008, 0.0050, 0.0023],
    [0.0078, 0.0040, 0.0036],
    [-0.0018, 0.0049, 0.0142],
    [-0.0015, 0.0029, -0.0046],
]
RGB_BIAS = [0.4358, 0.3814, 0.3388]


class SanaLatents(comfy.latent_formats.LatentFormat):
    """The latent format of DC-AE f32c32."""

    latent_channels = CHANNELS
    spacial_downscale_ratio = DOWNSCALE

    def __init__(self, scale_factor: float, preview: dict | None) -> None:
        """`preview` has preview colours for latents of another VAE, which TAESANA cannot decode. None: released VAE."""
        self.scale_factor = scale_factor
        self.preview = preview
        rgb_factors = preview["rgb_factors"] if preview else RGB_FACTORS
        rgb_bias = preview["rgb_bias"] if preview else RGB_BIAS
        # previews expect [-1, 1]
        self.linear_factors = [[2 * factor for factor in row] for row in rgb_factors]
        self.linear_bias = [2 * bias - 1 for bias in rgb_bias]

    # ComfyUI reads these three properties when a sampling begins. It calls the reshape function on the latents, then
    # maps channels to RGB linearly. With TAESANA, the reshape function returns RGB already.
    @property
    def latent_rgb_factors(self) -> list[list[float]]:
        return torch.eye(3).tolist() if self.taesana_file() else self.linear_factors

    @property
    def latent_rgb_factors_bias(self) -> list[float]:
        return [0.0] * 3 if self.taesana_file() else self.linear_bias

    @property
    def latent_rgb_factors_reshape(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        path = self.taesana_file()
        return taesana_previewer(path, self.linear_preview) if path else None

    def linear_preview(self, latents: torch.Tensor) -> torch.Tensor:
        """Return images [B, 3, h, w] in [-1, 1] of scaled latents [B, 32, h, w], one pixel per cell."""
        factors, bias = latents.new_tensor(self.linear_factors), latents.new_tensor(self.linear_bias)
        return torch.nn.functional.linear(latents.movedim(1, -1), factors.T, bias).movedim(-1, 1)

    def taesana_file(self) -> str | None:
        return find_taesana() if self.preview is None else None


def latent_format(checkpoint: Checkpoint) -> SanaLatents:
    """Return the format of a checkpoint: its VAE's scale, and its own preview colours if it has any."""
    file = checkpoint.path / "preview.json"
    if file.exists():
        return SanaLatents(
            latent_scale(checkpoint), dict(zip(("rgb_factors", "rgb_bias"), read_preview(file), strict=True))
        )
    return SanaLatents(latent_scale(checkpoint), saved_field(checkpoint, "preview"))


def empty_latent(width: int, height: int, batch_size: int) -> dict:
    """Return a LATENT of zeros for images of `width` x `height` pixels."""
    device, dtype = comfy.model_management.intermediate_device(), comfy.model_management.intermediate_dtype()
    samples = torch.zeros(latent_shape(width, height, batch_size), device=device, dtype=dtype)
    return {"samples": samples, "downscale_ratio_spacial": DOWNSCALE}


def image_or_model_size(width: int, height: int, model: SanaModel | None) -> tuple[int, int]:
    """Return (width, height) in pixels. If both are 0, they are the default size of the model, or 1024 without one."""
    if width != 0 and height != 0:
        return width, height
    if width != 0 or height != 0:
        zero, other = ("width", height) if width == 0 else ("height", width)
        raise InputError(f"{zero}: got 0 beside {other}; set both sides, or both to 0 for the model's size")
    return (DEFAULT_RESOLUTION, DEFAULT_RESOLUTION) if model is None else model.default_size


def size_text(width: int, height: int, model: SanaModel | None) -> str:
    """Return a line with the size, and with the size that the model was trained for if that is another."""
    # A link may give floats.
    width, height = int(width), int(height)
    if model is None:
        return f"{width} x {height}"
    trained = model.trained_size(width, height)
    note = size_note(width, height, trained)
    if not note and (width, height) != trained:
        note = f"{width} x {height}; the nearest training size of this model is {trained[0]} x {trained[1]}"
    return note or f"{width} x {height}"
