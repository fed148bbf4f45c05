"""Stage 1: a small AutoencoderDC with the proportions of SANA's, x32 and 32 channels, trained on drawn scenes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from diffusers import AutoencoderDC

from .pictures import PIXELS, combinations, draw_scene, random_scene

STEPS = 2200
# Crops cost a quarter of whole pictures and show the same edges; the last steps see whole ones, since the
# attention's sums run over all positions.
CROP, CROP_BATCH = 128, 16
WHOLE_STEPS, WHOLE_BATCH = 300, 5
LEARNING_RATE = 2e-3

CHANNELS = (16, 32, 32, 64, 64, 128)
BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
MULTISCALES = ((), (), (), (5,), (5,), (5,))
LAYERS = (1,) * 6


def build() -> AutoencoderDC:
    return AutoencoderDC(
        in_channels=3,
        latent_channels=32,
        attention_head_dim=16,
        encoder_block_types=BLOCKS,
        decoder_block_types=BLOCKS,
        encoder_block_out_channels=CHANNELS,
        decoder_block_out_channels=CHANNELS,
        encoder_layers_per_block=LAYERS,
        decoder_layers_per_block=LAYERS,
        encoder_qkv_multiscales=MULTISCALES,
        decoder_qkv_multiscales=MULTISCALES,
        upsample_block_type="interpolate",
        downsample_block_type="Conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )


def to_pixels(images: np.ndarray) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> float [B, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(images).movedim(-1, 1).float() / 127.5 - 1


def draw_batch(rng: random.Random, count: int, crop: int) -> torch.Tensor:
    """Random training scenes, each cut to a random `crop` x `crop` window."""
    train, _ = combinations()
    images = []
    for _ in range(count):
        y, x = rng.randint(0, PIXELS - crop), rng.randint(0, PIXELS - crop)
        images.append(draw_scene(random_scene(rng, rng.choice(train)))[y : y + crop, x : x + crop])
    return to_pixels(np.stack(images))


def train(report: Callable[[int, float], None]) -> AutoencoderDC:
    """Train with an absolute plus squared pixel error; `report(step, loss)` is called every 20 steps."""
    torch.manual_seed(1)
    rng = random.Random(1)
    model = build().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.05)
    for step in range(STEPS):
        whole = step >= STEPS - WHOLE_STEPS
        pixels = draw_batch(rng, WHOLE_BATCH, PIXELS) if whole else draw_batch(rng, CROP_BATCH, CROP)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            error = model.decode(model.encode(pixels).latent).sample.float() - pixels
        loss = error.abs().mean() + error.square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            report(step, loss.item())
    return model.train(False)


@torch.no_grad()
def psnr(model: AutoencoderDC, count: int = 32) -> float:
    """Peak signal-to-noise ratio in dB over whole pictures that training did not see."""
    pixels = draw_batch(random.Random(2), count, PIXELS)
    squared = [
        (model.decode(model.encode(p[None]).latent).sample.clamp(-1, 1) - p).square().mean().item() for p in pixels
    ]
    return -10 * float(np.log10(np.mean(squared) / 4))
