"""From a prompt, and perhaps an image, to a video in one call, without a host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..checkpoints import find_part, inspect_checkpoint, load_text_encoder, load_video_transformer
from ..checkpoints.load import load_video_autoencoder, shift_of
from ..errors import InputError
from ..model.forward import Constants
from ..model.known_models import VIDEO_DEFAULTS, VIDEO_FRAMES, VIDEOS, Defaults
from ..model.latents import noise_stream
from ..model.reference import AUTO, model_timestep, reference_of
from ..model.text import encode_prompts
from ..sampling.samplers import find_sampler, own_sigmas, sampler_kwargs
from . import forward as video
from .latents import video_shape

if TYPE_CHECKING:
    from diffusers import SanaVideoTransformer3DModel


@torch.no_grad()
def generate_video(
    prompt: str,
    checkpoint: str | Path,
    seed: int = 0,
    frames: int = VIDEO_FRAMES,
    size: tuple[int, int] | None = None,
    first: torch.Tensor | None = None,
    negative_prompt: str = "",
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    reference: str = AUTO,
    sampler: str | None = None,
    steps: int | None = None,
    guidance: float | None = None,
) -> torch.Tensor:
    """Return a video [3, frames, height, width] in [-1, 1], float32 on the CPU, drawn by SANA-Video.

    `checkpoint` is a diffusers folder, `size` (width, height), by default the model's own. `first` [3, height, width]
    in [-1, 1] is the image that it begins with. Without `sampler`, `steps` and `guidance` they are those of the model's
    authors. Raises InputError for sizes and frames that the model does not have, and as the loaders do.
    """
    precision = getattr(torch, dtype)
    default = VIDEO_DEFAULTS
    how = Defaults(
        sampler or default.sampler,
        default.steps if steps is None else steps,
        default.guidance if guidance is None else guidance,
    )
    info = inspect_checkpoint(checkpoint)
    channels = find_part(info, "video_transformer").headers["patch_embedding.weight"].shape[1]
    width, height = size or VIDEOS[channels].size
    shape = video_shape(width, height, frames, channels)
    if first is not None and first.shape != (3, height, width):
        raise InputError(f"first: got {list(first.shape)}, expected {[3, height, width]}; scale and cut the image")
    prompts = encode(checkpoint, [negative_prompt, prompt], device, precision, reference)
    given = None
    if first is not None:
        vae, mean, std = load_video_autoencoder(info, device, precision)
        image = first[None, :, None].to(device, precision)
        given = (vae.encode(image).latent_dist.mode().float() - mean) / std
        del vae
    transformer = load_video_transformer(checkpoint, device, precision, reference)
    constants = video.prepare(transformer, *prompts, *shape[1:])
    noise = next(noise_stream(torch.empty(1, *shape), seed)).to(device)
    latents = sample(transformer, constants, noise, shift_of(info, None, reference), given, how)
    del transformer, constants
    vae, mean, std = load_video_autoencoder(info, device, precision)
    return vae.decode((latents * std + mean).to(precision)).sample[0].float().clamp(-1, 1).cpu()


def encode(
    checkpoint: str | Path, prompts: list[str], device: str | torch.device, dtype: torch.dtype, reference: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings [2, T, C] and mask [2, T] of a negative and a positive prompt, the latter instructed."""
    encoder = load_text_encoder(checkpoint, device, dtype, reference)
    negative, positive = (encode_prompts(encoder, [prompt], bool(i)) for i, prompt in enumerate(prompts))
    return torch.cat([negative[0], positive[0]]), torch.cat([negative[1], positive[1]])


def sample(
    transformer: SanaVideoTransformer3DModel,
    constants: Constants,
    noise: torch.Tensor,
    shift: float,
    given: torch.Tensor | None,
    how: Defaults,
) -> torch.Tensor:
    """Return latents [1, C, T, h, w] sampled from `noise`, their first frame `given` if there is one."""
    flow, rules = find_sampler(how.sampler), reference_of(transformer)
    keep = torch.ones(noise.shape[2], device=noise.device)
    keep[:1] = given is None
    held = 0.0 if given is None else given * (1 - keep)[:, None, None]

    def hold(latents: torch.Tensor) -> torch.Tensor:
        return latents * keep[:, None, None] + held

    def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        x = hold(x)
        timestep = model_timestep(transformer, keep * (1000 * sigma).to(keep), flow.whole_timesteps).expand(2, -1)
        both = video.velocity(transformer, x.repeat(2, 1, 1, 1, 1).to(transformer.dtype), timestep, constants).float()
        without, positive = (x - sigma * both).chunk(2)
        return hold(without + how.guidance * (positive - without))

    sigmas = own_sigmas(flow, rules, how.steps, shift)
    return hold(flow.sample(denoise, noise, sigmas, **sampler_kwargs(flow, rules, iter(()))))
