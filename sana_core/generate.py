"""From prompts to pictures in one call, without a host."""

from __future__ import annotations

from pathlib import Path

import torch

from .checkpoints import inspect_checkpoint, load_autoencoder, load_text_encoder, load_transformer
from .checkpoints.load import shift_of
from .decode import decode_latents
from .defaults import check_sampler, model_defaults
from .guidance import denoiser, perturbed_attention
from .latents import check_number, noise_stream, picture_shape
from .sampling import find_sampler, sample_scm
from .schedules import shift_sigmas
from .text import encode_prompts


@torch.no_grad()
def generate(
    prompts: list[str],
    checkpoint: str | Path,
    seed: int = 0,
    count: int = 1,
    steps: int | None = None,
    guidance: float | None = None,
    width: int = 1024,
    height: int = 1024,
    negative_prompt: str = "",
    sampler: str | None = None,
    pag_scale: float = 0.0,
    pag_blocks: str = "",
    guidance_interval: tuple[float, float] = (0.0, 1.0),
    compiled: bool = False,
) -> torch.Tensor:
    """Return pictures [len(prompts) * count, 3, height, width] in [-1, 1], computed in fp32.

    Picture i of each prompt uses seed + i, so it is the same alone and in a batch. Steps, guidance and sampler are
    without a value those of the model: 20, 4.5 and "flow_dpmpp_2m", or SANA-Sprint's. Perturbed attention of
    `pag_scale` acts in `pag_blocks`, like "8"; guidance acts from the first share of `guidance_interval` of the
    sampling to the second. Raises ValueError for a size that is no multiple of 32, a prompt of more than 300 tokens,
    numbers out of range, or a checkpoint that cannot be loaded.
    """
    transformer = load_transformer(checkpoint)
    defaults = model_defaults(transformer.config)
    sampler = sampler or defaults.sampler
    flow = find_sampler(sampler)
    check_sampler(transformer.config, sampler)
    check_number("guidance_interval", guidance_interval[0], 0, 1)
    check_number("guidance_interval", guidance_interval[1], guidance_interval[0], 1)
    shift = shift_of(inspect_checkpoint(checkpoint))
    ends = shift_sigmas(1 - torch.tensor(guidance_interval, dtype=torch.float64), shift).tolist()
    perturbed = perturbed_attention(transformer.config, pag_scale, pag_blocks) if pag_scale else None
    sigmas = flow.sigmas(defaults.steps if steps is None else steps, shift)
    shape = picture_shape(width, height, count)

    autoencoder = load_autoencoder(checkpoint)
    encoder = load_text_encoder(checkpoint)
    uncond = encode_prompts(encoder, [negative_prompt], instruction=False)
    pictures = []
    for prompt in prompts:
        # SANA never saw the instruction with nothing behind it
        cond = encode_prompts(encoder, [prompt], instruction=bool(prompt.strip()))
        model = denoiser(
            transformer,
            cond,
            uncond,
            defaults.guidance if guidance is None else guidance,
            flow.whole_timesteps,
            perturbed,
            (ends[0], ends[1]),
            compiled,
        )
        noise = noise_stream(torch.empty(shape), seed)
        start = next(noise)
        more = {"noise": noise} if flow.sample is sample_scm else {}
        latents = flow.sample(model, start, sigmas, **more) / autoencoder.config.scaling_factor
        pictures.append(decode_latents(autoencoder, latents).clamp(-1, 1))
    return torch.cat(pictures)
