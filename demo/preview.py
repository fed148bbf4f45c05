"""The colours that a latent stands for, so that the host can show a preview at every step."""

from __future__ import annotations

import random

import numpy as np
import torch
from diffusers import AutoencoderDC

from .autoencoder import to_pixels
from .pictures import combinations, draw_scene, random_scene


def training_pictures() -> torch.Tensor:
    """Return two training scenes of each combination, [N, 3, H, W] in [-1, 1]."""
    rng = random.Random(11)
    return to_pixels(np.stack([draw_scene(random_scene(rng, each)) for each in combinations()[0] * 2]))


@torch.no_grad()
def fit_colours(autoencoder: AutoencoderDC, pixels: torch.Tensor) -> dict[str, list]:
    """Return the linear map from scaled latents to the mean RGB in [0, 1] of their 32 x 32 pixels, least squares over
    the pictures `pixels` [N, 3, H, W] in [-1, 1]."""
    latents = torch.cat([autoencoder.encode(part).latent for part in pixels.split(16)])
    latents = latents * autoencoder.config.scaling_factor
    colours = torch.nn.functional.avg_pool2d(pixels, 32) / 2 + 0.5
    cells, wanted = (t.movedim(1, -1).flatten(0, 2) for t in (latents, colours))
    ones = torch.ones(len(cells), 1)
    solution = torch.linalg.lstsq(torch.cat([cells, ones], dim=1), wanted).solution
    *factors, bias = [[round(value, 4) for value in row] for row in solution.tolist()]
    return {"rgb_factors": factors, "rgb_bias": bias}
