"""From prompts to pictures in one call, without a host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .checkpoints import load_autoencoder, load_text_encoder, load_transformer
from .decode import decode_latents
from .latents import noise_like, picture_shape
from .sampling import SHIFT, Denoiser, find_sampler
from .text import encode_prompts

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel


def denoiser(
    transformer: SanaTransformer2DModel, cond: tuple, uncond: tuple, guidance: float, whole_timesteps: bool
) -> Denoiser:
    """Return model(x, sigma) -> x0 with classifier-free guidance; `cond` and `uncond` are (embeds, mask).

    The uncond pass is left out at guidance 1.
    """
    pairs = [cond] if guidance == 1 else [uncond, cond]

    def model(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        count = len(x)
        embeds, mask = (torch.cat([pair[k].expand(count, *pair[k].shape[1:]) for pair in pairs]) for k in (0, 1))
        timestep = sigma * 1000
        timestep = (timestep.floor() if whole_timesteps else timestep).expand(len(embeds)).to(x.device)
        velocity = transformer(x.repeat(len(pairs), 1, 1, 1), embeds, timestep, encoder_attention_mask=mask).sample
        if guidance != 1:
            without, with_prompt = velocity.chunk(2)
            velocity = without + guidance * (with_prompt - without)
        return x - sigma * velocity

    return model


@torch.no_grad()
def generate(
    prompts: list[str],
    checkpoint: str | Path,
    seed: int = 0,
    count: int = 1,
    steps: int = 20,
    guidance: float = 4.5,
    width: int = 1024,
    height: int = 1024,
    negative_prompt: str = "",
    sampler: str = "flow_dpmpp_2m",
) -> torch.Tensor:
    """Return pictures [len(prompts) * count, 3, height, width] in [-1, 1], computed in fp32.

    Picture i of each prompt uses seed + i, so it is the same alone and in a batch. Raises ValueError for a size that
    is no multiple of 32, a prompt of more than 300 tokens, or a checkpoint that cannot be loaded.
    """
    flow = find_sampler(sampler)
    transformer = load_transformer(checkpoint)
    autoencoder = load_autoencoder(checkpoint)
    encoder = load_text_encoder(checkpoint)
    uncond = encode_prompts(encoder, [negative_prompt], instruction=False)
    shape = picture_shape(width, height, count)
    noise = noise_like(torch.empty(shape), seed)
    sigmas = flow.sigmas(steps, SHIFT)
    pictures = []
    for prompt in prompts:
        # SANA never saw the instruction with nothing behind it
        cond = encode_prompts(encoder, [prompt], instruction=bool(prompt.strip()))
        model = denoiser(transformer, cond, uncond, guidance, flow.whole_timesteps)
        latents = flow.sample(model, noise, sigmas) / autoencoder.config.scaling_factor
        pictures.append(decode_latents(autoencoder, latents).clamp(-1, 1))
    return torch.cat(pictures)
