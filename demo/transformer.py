"""Stage 3: a small SanaTransformer2DModel, trained with SANA's flow-matching loss on cached latents and embeddings."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderDC, SanaTransformer2DModel

from sana_core.model.known_models import SHIFT
from sana_core.model.text import TextEncoder, encode_prompts
from sana_core.sampling import shift_sigmas

from .autoencoder import to_pixels
from .pictures import PIXELS, combinations, draw_scene, placed_scenes, random_caption, random_scene
from .step import take_step

BATCH = 128
MAX_TOKENS = 28
DROP_PROMPT = 0.1


class Cycle(NamedTuple):
    """A stretch of training with a data set and a one-cycle schedule of its own, of which it runs `steps`."""

    steps: int
    schedule_steps: int
    learning_rate: float
    rounds: int  # of the grid of scenes
    jitter: float
    captions: int  # of each scene
    drop_instruction: float


# The first cycle learns to compose from the bare grid. It stops before it knows that by heart; the others see each
# picture a few times only, and held-out combinations gain.
CYCLES = (
    Cycle(3501, 5000, 1.5e-3, rounds=1, jitter=0.0, captions=4, drop_instruction=0.2),
    Cycle(2200, 2200, 1e-3, rounds=3, jitter=0.03, captions=2, drop_instruction=0.45),
    Cycle(2000, 2000, 1e-3, rounds=3, jitter=0.03, captions=2, drop_instruction=0.45),
)


def build(caption_channels: int, heads: int = 5, layers: int = 5, pixels: int = PIXELS) -> SanaTransformer2DModel:
    return SanaTransformer2DModel(
        in_channels=32,
        out_channels=32,
        num_attention_heads=heads,
        attention_head_dim=32,
        num_layers=layers,
        num_cross_attention_heads=heads,
        cross_attention_head_dim=32,
        cross_attention_dim=32 * heads,
        caption_channels=caption_channels,
        mlp_ratio=2.5,
        sample_size=pixels // 32,
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
    """Embeddings [N, 28, C] and mask [N, 28] of the captions; what follows would be padding."""
    unique = {caption: i for i, caption in enumerate(dict.fromkeys(captions))}
    batches = [list(unique)[i : i + 32] for i in range(0, len(unique), 32)]
    embeds, masks = zip(*(encode_prompts(encoder, batch, instruction, MAX_TOKENS) for batch in batches), strict=True)
    pick = [unique[caption] for caption in captions]
    return torch.cat(embeds)[pick], torch.cat(masks)[pick].float()


def flow_loss(
    model: SanaTransformer2DModel, x0: torch.Tensor, embeds: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Squared error of the velocity noise - x0 at logit-normal times, shifted (SANA paper, section 2.3)."""
    t = torch.sigmoid(torch.randn(len(x0)))
    sigma = shift_sigmas(t, SHIFT)
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
    model = build(encoder.model.config.hidden_size)
    before = 0
    for number, cycle in enumerate(CYCLES):
        run_cycle(
            model, cycle, number, autoencoder, encoder, lambda step, loss, start=before: report(start + step, loss)
        )
        before += cycle.steps
    return model.train(False)


def run_cycle(
    model: SanaTransformer2DModel,
    cycle: Cycle,
    number: int,
    autoencoder: AutoencoderDC,
    encoder: TextEncoder,
    report: Callable[[int, float], None],
) -> None:
    """Draw, encode and learn the scenes of one cycle."""
    if number:
        torch.manual_seed(5 + number)
    rng = random.Random(5 + number)
    combos, _ = combinations()
    scenes = [s for c in combos for _ in range(cycle.rounds) for s in placed_scenes(rng, c, cycle.jitter)]
    captions = [random_caption(rng, scene) for scene in scenes for _ in range(cycle.captions)]
    latents = cache_latents(autoencoder, scenes) * autoencoder.config.scaling_factor
    plain = cache_embeddings(encoder, captions, instruction=False)
    instructed = cache_embeddings(encoder, captions, instruction=True)
    null = cache_embeddings(encoder, [""], instruction=False)

    optimizer = torch.optim.AdamW(model.parameters(), cycle.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, cycle.learning_rate, total_steps=cycle.schedule_steps, pct_start=0.05
    )
    for step in range(cycle.steps):
        pick = torch.randint(len(captions), (BATCH,))
        dice = torch.rand(BATCH, 1)
        batch = []
        for empty, bare, full in zip(null, plain, instructed, strict=True):
            where = dice.view(-1, *[1] * (full.ndim - 1))
            kept = torch.where(where < DROP_PROMPT + cycle.drop_instruction, bare[pick], full[pick])
            batch.append(torch.where(where < DROP_PROMPT, empty, kept))
        loss = flow_loss(model, latents[pick // cycle.captions], *batch)
        take_step(model, optimizer, schedule, loss)
        if step % 20 == 0:
            report(step, loss.item())


def latent_scale(autoencoder: AutoencoderDC) -> float:
    """1 / standard deviation of the latents over 320 training pictures, rounded as SANA's 0.41407 is."""
    rng = random.Random(6)
    combos, _ = combinations()
    latents = cache_latents(autoencoder, [random_scene(rng, combo) for combo in combos * 2])
    return round(1 / latents.std().item(), 5)
