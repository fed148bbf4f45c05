"""Stage 1: a small AutoencoderDC with the proportions of SANA's, x32 and 32 channels, trained on drawn scenes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderDC

from .pictures import PIXELS, combinations, draw_scene, random_scene
from .step import take_step


class Phase(NamedTuple):
    """A stretch of training on `crop` x `crop` windows of scenes drawn at `pixels` x `pixels`."""

    steps: int
    pixels: int
    crop: int
    batch: int


# Each tuple is one learning rate cycle. Scenes at twice the size have simpler edges, and crops of them cost no more
# than small pictures; a few whole ones follow, since the attention's sums run over all positions. Last come pictures
# of the size that the transformer learns.
CYCLES = {
    2e-3: (Phase(1900, 2 * PIXELS, PIXELS, 16), Phase(300, 2 * PIXELS, 2 * PIXELS, 5)),
    1.5e-3: (Phase(700, PIXELS, PIXELS, 16),),
}

CHANNELS = (16, 32, 32, 64, 64, 128)
BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
MULTISCALES = ((), (), (), (5,), (5,), (5,))
LAYERS = (1,) * 6


def build(channels: tuple[int, ...] = CHANNELS, encoder_layers: tuple[int, ...] = LAYERS) -> AutoencoderDC:
    return AutoencoderDC(
        in_channels=3,
        latent_channels=32,
        attention_head_dim=16,
        encoder_block_types=BLOCKS,
        decoder_block_types=BLOCKS,
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        encoder_layers_per_block=encoder_layers,
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


def draw_batch(rng: random.Random, phase: Phase) -> torch.Tensor:
    """Random training scenes [batch, 3, crop, crop], each cut to a random window."""
    train, _ = combinations()
    images = []
    for _ in range(phase.batch):
        y, x = (rng.randint(0, phase.pixels - phase.crop) for _ in range(2))
        image = draw_scene(random_scene(rng, rng.choice(train)), phase.pixels)
        images.append(image[y : y + phase.crop, x : x + phase.crop])
    return to_pixels(np.stack(images))


def train(report: Callable[[int, float], None]) -> AutoencoderDC:
    """Train with an absolute plus squared pixel error; `report(step, loss)` is called every 20 steps."""
    torch.manual_seed(1)
    model = build().to(memory_format=torch.channels_last)
    step = 0
    for seed, (learning_rate, phases) in enumerate(CYCLES.items(), start=1):
        rng = random.Random(seed)
        steps = sum(phase.steps for phase in phases)
        optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.05)
        for phase in itertools.chain.from_iterable(itertools.repeat(phase, phase.steps) for phase in phases):
            pixels = draw_batch(rng, phase).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16):
                error = model.decode(model.encode(pixels).latent).sample.float() - pixels
            loss = error.abs().mean() + error.square().mean()
            take_step(model, optimizer, schedule, loss)
            if step % 20 == 0:
                report(step, loss.item())
            step += 1
    return model.train(False)


@torch.no_grad()
def psnr(model: AutoencoderDC, pixels: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB over the pictures `pixels` [N, 3, H, W] in [-1, 1]."""
    squared = [
        (model.decode(model.encode(p[None]).latent).sample.clamp(-1, 1) - p).square().mean().item() for p in pixels
    ]
    return -10 * float(np.log10(np.mean(squared) / 4))
