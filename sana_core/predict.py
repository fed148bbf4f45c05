"""One call of the model: from latents and prompts to the velocity, as the model's reference computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .errors import InputError
from .model.controlnet import check_width, control_residuals
from .model.forward import check_mask, prepare, velocity
from .model.known_models import GUIDANCE, is_video
from .model.reference import model_timestep
from .video import forward as video

if TYPE_CHECKING:
    from diffusers import SanaControlNetModel, SanaTransformer2DModel, SanaVideoTransformer3DModel


@torch.no_grad()
def predict_velocity(
    transformer: SanaTransformer2DModel | SanaVideoTransformer3DModel,
    x: torch.Tensor,
    timestep: torch.Tensor,
    embeds: torch.Tensor,
    mask: torch.Tensor,
    guidance: torch.Tensor | None = None,
    controlnet: SanaControlNetModel | None = None,
    control_latents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the velocity noise - x0 [B, 32, h, w] of the latents `x` [B, 32, h, w], in one call.

    The arithmetic follows the reference of `transformer`: NVIDIA's code or diffusers'. `timestep` [B] is 1000
    sigma, from 0 to 1000; `embeds` [B, T, C] and `mask` [B, T] are the prompts; `guidance` [B] is the guidance
    scale of SANA-Sprint models, 4.5 without it, and has no meaning for others. `control_latents` [B, 32, h, w] are
    the control image's, in the scale of `x`. SANA-Video takes `x` [B, C, T, h, w], and may have a time for each
    frame, `timestep` [B, T]; no ControlNet steers it. Raises InputError for a ControlNet of another width, latents
    of another shape than `x`, and for only one of both control arguments, and for a prompt without
    a token.
    """
    if (controlnet is None) != (control_latents is None):
        raise InputError("control_latents: got one of controlnet and control_latents, expected both; or give none")
    if control_latents is not None and control_latents.shape != x.shape:
        got, expected = list(control_latents.shape), list(x.shape)
        raise InputError(
            f"control_latents: got {got}, expected {expected}; encode a control image of that size for each"
        )
    check_mask("mask", mask)
    dtype, config = transformer.dtype, transformer.config
    x, embeds = x.to(dtype), embeds.to(dtype)
    if is_video(config):
        prompts = video.prepare(transformer, embeds, mask, *x.shape[2:])
        return video.velocity(transformer, x, model_timestep(transformer, timestep), prompts)
    residuals: Sequence[torch.Tensor | None] = ()
    if controlnet is not None and control_latents is not None:
        check_width(controlnet, transformer)
        prompts = prepare(controlnet, embeds, mask, *x.shape[-2:])
        residuals = control_residuals(controlnet, x, model_timestep(controlnet, timestep), prompts, control_latents)
    embedded = None
    if config.guidance_embeds:
        guidance = torch.full_like(timestep, GUIDANCE) if guidance is None else guidance
        embedded = guidance * config.guidance_embeds_scale
    constants = prepare(transformer, embeds, mask, *x.shape[-2:])
    return velocity(transformer, x, model_timestep(transformer, timestep), constants, embedded, None, residuals)
