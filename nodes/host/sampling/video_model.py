"""SANA-Video's transformer as what ComfyUI's samplers drive, and its latents in ComfyUI's formats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import comfy.conds
import comfy.latent_formats
import comfy.model_management
import comfy.utils
import torch
from diffusers import SanaVideoTransformer3DModel

from ....sana_core.checkpoints.configs import video_autoencoder_name
from ....sana_core.errors import InputError
from ....sana_core.model.known_models import VideoModel, is_video, nearest_shape, video_model
from ....sana_core.model.latents import LARGEST_BATCH
from ....sana_core.model.reference import model_timestep
from ....sana_core.runtime.checks import check_whole
from ....sana_core.video.forward import velocity
from ....sana_core.video.latents import check_first, video_shape
from ....sana_core.video.transformer import SanaVideo2Transformer3DModel
from ..loading.weights import config_tensor
from .guidance import require_sana
from .model import WHOLE_TIMESTEPS, PromptBatch, SanaDiffusionModel, SanaModel

if TYPE_CHECKING:
    import comfy.sd


def middle_frame(latents: torch.Tensor) -> torch.Tensor:
    """Return the frame of `latents` [B, C, T, h, w] that previews show, [B, C, 1, h, w]: the first may be given."""
    middle = latents.shape[2] // 2
    return latents[:, :, middle : middle + 1]


def video_format(channels: int) -> comfy.latent_formats.LatentFormat:
    """Return the latent format of Wan 2.1's VAE or of LTX-2's, by the number of channels."""
    wan, ltx = comfy.latent_formats.Wan21, comfy.latent_formats.LTXV
    latents = wan() if channels == wan.latent_channels else ltx()
    latents.latent_rgb_factors_reshape = middle_frame
    return latents


class SanaVideoDiffusionModel(SanaVideoTransformer3DModel):
    """The transformer with the call that ComfyUI makes; its parameters keep diffusers' names."""

    library = SanaVideoTransformer3DModel
    forward = SanaDiffusionModel.forward

    def _forward(
        self,
        x,
        timesteps,
        context,
        control,
        transformer_options,
        attention_mask=None,
        prompt: PromptBatch | None = None,
        **kwargs,
    ):
        timesteps = model_timestep(self, timesteps, transformer_options.get(WHOLE_TIMESTEPS, False))
        if prompt is None or torch.is_grad_enabled():
            return self.library.forward(
                self, x, context, timesteps, encoder_attention_mask=attention_mask, return_dict=False
            )[0]
        constants, _ = prompt.constants(self, x)
        return velocity(self, x, timesteps, constants)


class SanaVideo2DiffusionModel(SanaVideo2Transformer3DModel):
    """SANA-Video 2.0's transformer with the same call."""

    library = SanaVideo2Transformer3DModel
    forward = SanaDiffusionModel.forward
    _forward = SanaVideoDiffusionModel._forward


class SanaVideoModel(SanaModel):
    """What ComfyUI's samplers drive: as for images, with a time for each frame where frames are given."""

    @property
    def facts(self) -> VideoModel:
        return video_model(self.diffusion_model.config)

    @property
    def resolution(self) -> int:
        """The side of a square with the area of the videos that it was trained with."""
        return round(math.prod(self.facts.size) ** 0.5)

    def check_latent(self, field, shape):
        channels, patch = self.diffusion_model.config.in_channels, self.facts.patch
        if len(shape) != 5 or shape[1] != channels or 0 in shape or shape[3] % patch or shape[4] % patch:
            side = self.facts.downscale
            raise InputError(
                f"{field}: got a latent of shape {list(shape)}, expected [batch, {channels}, frames, height / {side}, "
                f"width / {side}], sides of multiples of {patch}; use SANA Video Latent"
            )

    def check_control(self, control):
        if control is not None:
            raise InputError("control_net: got a ControlNet for SANA-Video, which has none; disconnect it")

    @property
    def default_size(self):
        return self.facts.size

    def trained_size(self, width, height):
        return nearest_shape(width, height, self.facts.shapes)

    def process_timestep(self, timestep, denoise_mask=None, **kwargs):
        timestep = super().process_timestep(timestep)
        # frames that are given are at time 0
        return timestep if denoise_mask is None else timestep[:, None] * denoise_mask.mean((1, 3, 4))

    def scale_latent_inpaint(self, sigma, noise, latent_image, **kwargs):
        return latent_image

    def extra_conds(self, **kwargs):
        out = super().extra_conds(**kwargs)
        if kwargs.get("denoise_mask") is not None:
            out["denoise_mask"] = comfy.conds.CONDRegular(kwargs["denoise_mask"])
        return out

    def state_dict_for_saving(self, unet_state_dict, *others, **parts):
        own = {"flow_shift": self.model_config.sampling_settings["shift"]}
        config = config_tensor("video_transformer", {**self.diffusion_model.config, **own})
        # past the images' model, which adds its own
        return super(SanaModel, self).state_dict_for_saving({**unet_state_dict, **config}, *others, **parts)


def require_video(model: torch.nn.Module) -> SanaVideoModel:
    """Return `model`. Raises InputError unless it is a SANA-Video model."""
    if not is_video(require_sana(model).diffusion_model.config):
        raise InputError("model: got one of images, expected SANA-Video; use SANA Empty Latent for an image")
    return model


def video_latent(
    base: SanaVideoModel,
    size: tuple[int, int],
    frames: int,
    batch_size: int,
    vae: comfy.sd.VAE | None = None,
    first_image: torch.Tensor | None = None,
) -> dict:
    """Return a LATENT for `batch_size` videos of `size`, (width, height) in pixels, with that many `frames`.

    With `first_image`, an IMAGE, and `vae`, the first frame is that image, and the noise mask keeps it.
    """
    check_whole("batch_size", batch_size, 1, LARGEST_BATCH)
    shape = video_shape(*size, frames, base.facts)
    if vae is not None:
        check_video_vae(vae, base.facts)
    device, dtype = comfy.model_management.intermediate_device(), comfy.model_management.intermediate_dtype()
    samples = torch.zeros((int(batch_size), *shape), device=device, dtype=dtype)
    if first_image is None:
        return {"samples": samples, "downscale_ratio_spacial": base.facts.downscale}
    check_first(base.facts)
    first = encode_first(vae, first_image, size).to(samples)
    # The samplers recognise these values as an empty latent.
    samples = base.latent_format.process_out(samples)
    samples[:, :, :1] = first
    mask = torch.ones((len(samples), 1, shape[1], 1, 1), device=device)
    mask[:, :, 0] = 0
    return {"samples": samples, "noise_mask": mask}


def check_video_vae(vae: comfy.sd.VAE, model: VideoModel) -> None:
    """Raise InputError unless `vae` has the latents of `model`. LTX-2 and LTX-2.3 differ only in their layers."""
    got, expected = f"one of {vae.latent_channels} channels", str(model.channels)
    if vae.latent_channels == model.channels:
        got, expected = video_autoencoder_name(vae.first_stage_model.state_dict()), model.vae
    if got != expected:
        raise InputError(f"vae: got {got}, expected {expected}; use the VAE of the SANA-Video model")


def encode_first(vae: comfy.sd.VAE | None, image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return the latent [1, C, 1, h, w] of the first of `image` [B, H, W, 3], cut and scaled to `size`."""
    if vae is None:
        raise InputError("first_image: got one without a VAE, which encodes it; connect the VAE of SANA Loader")
    pixels = comfy.utils.common_upscale(image[:1, :, :, :3].movedim(-1, 1), *size, "lanczos", "center")
    return vae.encode(pixels.movedim(1, -1))
