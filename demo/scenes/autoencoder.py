"""An AutoencoderDC with the proportions of SANA's, x32 and 32 channels, trained on painted scenes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderDC

from ..autoencoder import build, to_pixels
from ..step import take_step
from .painting import paint
from .world import PIXELS, training_scenes

CHANNELS = (16, 16, 32, 128, 128, 256)
# as in the first DC-AE, nothing runs at the size of the picture itself
LAYERS = (0, 1, 1, 1, 1, 1)
NOTE_EVERY = 20
# scenes that are painted once, 0.2 MB each: a batch of as many scenes as windows has a quieter gradient
POOL = 8000


class Phase(NamedTuple):
    """A stretch of training on `crop` x `crop` windows of scenes."""

    steps: int
    crop: int
    batch: int


# Crops cost a quarter and show as many edges; whole scenes follow, since the attention's sums run over all positions.
PHASES = (Phase(7_000, PIXELS // 2, 8), Phase(600, PIXELS, 3))
# Highest change in a step, as a share of a weight matrix' entries (root mean square), and of vectors at once.
CHANGE, VECTOR_RATE = 0.02, 0.006


def paint_scenes(seed: str, count: int) -> np.ndarray:
    """Return training scenes, uint8 [count, 256, 256, 3]."""
    return np.stack([paint(scene) for scene in training_scenes(random.Random(seed), count)])


def windows(pictures: np.ndarray, rng: random.Random, phase: Phase) -> torch.Tensor:
    """Return a batch [batch, 3, crop, crop] in [-1, 1], each cut from another of `pictures`."""
    cut = []
    for index in rng.sample(range(len(pictures)), phase.batch):
        y, x = (rng.randint(0, PIXELS - phase.crop) for _ in range(2))
        cut.append(pictures[index, y : y + phase.crop, x : x + phase.crop])
    return to_pixels(np.stack(cut))


def plan_steps() -> tuple[list[Phase], list[float]]:
    """Return phase and share of the learning rate of each step: it rises for a twentieth, and falls to nothing."""
    order = [phase for phase in PHASES for _ in range(phase.steps)]
    shares = [(index + 1) / len(order) for index in range(len(order))]
    # the schedule asks for the rate after the last step too
    return order, [min(20 * share, (1 + cos(pi * share)) / 2) for share in shares] + [0.0]


def train(file: Path, device: torch.device, report: Callable[[int, float], None]) -> AutoencoderDC:
    """Train with an absolute plus squared pixel error, on from where `file` was left, which is kept up to date.

    The squared one weighs ten times as much: by then both pull about as strongly, and the score is a squared error.

    Weight matrices keep the norms that they began with, and their learning rates are shares of them (Karras et al.,
    "Analyzing and Improving the Training Dynamics of Diffusion Models", 2024, section 2.3). The decoder's last norm
    makes its output free of the scale of all maps before it; left alone they grow from stage to stage, beyond float16
    and until the blocks, whose own norms bound what they add, add nothing.
    """
    torch.manual_seed(1)
    model = build(CHANNELS, LAYERS).to(device, memory_format=torch.channels_last)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [matrix.detach().norm() for matrix in matrices]
    groups = [
        {"params": [matrix], "lr": CHANGE * norm.item() / matrix.numel() ** 0.5}
        for matrix, norm in zip(matrices, norms, strict=True)
    ]
    groups.append({"params": [vector for vector in model.parameters() if vector.ndim == 1], "lr": VECTOR_RATE})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    first = 0
    if file.is_file():
        state = torch.load(file, map_location=device, weights_only=True)
        first = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    order, rates = plan_steps()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: rates[first + index])
    pictures = paint_scenes("training", POOL)
    for step in range(first, len(order)):
        pixels = windows(pictures, random.Random(step), order[step]).to(device, memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            error = model.decode(model.encode(pixels).latent).sample.float() - pixels
        loss = error.abs().mean() + 10 * error.square().mean()
        take_step(model, optimizer, schedule, loss)
        with torch.no_grad():
            for matrix, norm in zip(matrices, norms, strict=True):
                matrix.mul_(norm / matrix.norm())
        if (step + 1) % NOTE_EVERY == 0:
            report(step + 1, loss.item())
            part = file.with_suffix(".part")
            torch.save({"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
            part.replace(file)
    return model.train(False)


@torch.no_grad()
def latent_scale(model: AutoencoderDC, count: int = 128) -> float:
    """Return 1 / standard deviation of the latents of training scenes, rounded as SANA's 0.41407 is."""
    pixels = to_pixels(paint_scenes("scale", count))
    return round(1 / torch.cat([model.encode(part).latent for part in pixels.split(8)]).std().item(), 5)


@torch.no_grad()
def fits_half(model: AutoencoderDC) -> bool:
    """Whether `model` gives scenes back in float16: maps that grew beyond 65504 would be black pictures there."""
    half = copy.deepcopy(model).half()
    pixels = to_pixels(paint_scenes("half", 4)).half()
    return bool(half.decode(half.encode(pixels).latent).sample.isfinite().all())
