"""Stage 3: a small SanaTransformer2DModel, trained with SANA's flow-matching loss on cached latents and embeddings."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from diffusers import AutoencoderDC, SanaTransformer2DModel

from sana_core.text import TextEncoder, encode_prompts

from .autoencoder import to_pixels
from .pictures import PIXELS, combinations, draw_scene, random_caption, random_scene

PICTURES = 6400  # 40 of each training combination
STEPS, BATCH, LEARNING_RATE = 4000, 64, 1.5e-3
SHIFT = 3.0
MAX_TOKENS = 28
DROP_PROMPT, DROP_INSTRUCTION = 0.1, 0.2


def build(caption_channels: int) -> SanaTransformer2DModel:
    return SanaTransformer2DModel(
        in_channels=32,
        out_channels=32,
        num_attention_heads=5,
        attention_head_dim=32,
        num_layers=5,
        num_cross_attention_heads=5,
        cross_attention_head_dim=32,
        cross_attention_dim=160,
        caption_channels=caption_channels,
        mlp_ratio=2.5,
        sample_size=PIXELS // 32,
        patch_size=1,
        interpolation_scale=1.0,
    )


@torch.no_grad()
def cache_latents(autoencoder: AutoencoderDC, scenes: list) -> torch.Tensor:
    """Latents [N, 32, h, w] of the drawn scenes, not yet scaled."""
    batches = [scenes[i : i + 16] for i in range(0, len(scenes), 16)]
    return torch.cat(
        [autoencoder.encode(to_pixels(np.stack([draw_scene(s) for s in batch]))).latent for batch in batches]
    )


def cache_embeddings(encoder: TextEncoder, captions: list[str], instruction: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and mask of the captions, cut to the longest of them; the rest would be padding."""
    batches = [captions[i : i + 32] for i in range(0, len(captions), 32)]
    embeds, masks = zip(*(encode_prompts(encoder, batch, instruction, MAX_TOKENS) for batch in batches), strict=True)
    return torch.cat(embeds), torch.cat(masks).float()


def flow_loss(
    model: SanaTransformer2DModel, x0: torch.Tensor, embeds: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Squared error of the velocity noise - x0 at logit-normal times, shifted (SANA paper, section 2.3)."""
    t = torch.sigmoid(torch.randn(len(x0)))
    sigma = SHIFT * t / (1 + (SHIFT - 1) * t)
    s = sigma.view(-1, 1, 1, 1)
    noise = torch.randn_like(x0)
    with torch.autocast("cpu", torch.bfloat16):
        velocity = model((1 - s) * x0 + s * noise, embeds, sigma * 1000, encoder_attention_mask=mask).sample
    return (velocity.float() - (noise - x0)).square().mean()


def train(
    autoencoder: AutoencoderDC, encoder: TextEncoder, report: Callable[[int, float], None]
) -> SanaTransformer2DModel:
    """Train on the latents of `autoencoder`, whose config must already hold the scaling factor."""
    torch.manual_seed(5)
    rng = random.Random(5)
    combos, _ = combinations()
    scenes = [random_scene(rng, combos[i % len(combos)]) for i in range(PICTURES)]
    captions = [random_caption(rng, scene) for scene in scenes]
    latents = cache_latents(autoencoder, scenes) * autoencoder.config.scaling_factor
    plain = cache_embeddings(encoder, captions, instruction=False)
    instructed = cache_embeddings(encoder, captions, instruction=True)
    null = cache_embeddings(encoder, [""], instruction=False)

    model = build(instructed[0].shape[-1])
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.05)
    for step in range(STEPS):
        pick = torch.randint(PICTURES, (BATCH,))
        dice = torch.rand(BATCH, 1)
        batch = []
        for empty, bare, full in zip(null, plain, instructed, strict=True):
            where = dice.view(-1, *[1] * (full.ndim - 1))
            kept = torch.where(where < DROP_PROMPT + DROP_INSTRUCTION, bare[pick], full[pick])
            batch.append(torch.where(where < DROP_PROMPT, empty, kept))
        loss = flow_loss(model, latents[pick], *batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            report(step, loss.item())
    return model.train(False)


def latent_scale(autoencoder: AutoencoderDC) -> float:
    """1 / standard deviation of the latents over 320 training pictures, rounded as SANA's 0.41407 is."""
    rng = random.Random(6)
    combos, _ = combinations()
    latents = cache_latents(autoencoder, [random_scene(rng, combo) for combo in combos * 2])
    return round(1 / latents.std().item(), 5)
