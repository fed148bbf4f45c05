"""The colours that a latent stands for, so that the host can show a preview at every step."""

from __future__ import annotations

import random

import numpy as np
import torch
from diffusers import AutoencoderDC

from .autoencoder import to_pixels
from .pictures import combinations, draw_scene, random_scene
from .transformer import cache_latents


def fit_colours(autoencoder: AutoencoderDC) -> dict[str, list]:
    """Return the linear map from scaled latents to the mean RGB in [0, 1] of their 32 x 32 pixels, least squares."""
    rng = random.Random(11)
    scenes = [random_scene(rng, combination) for combination in combinations()[0] * 2]
    latents = cache_latents(autoencoder, scenes) * autoencoder.config.scaling_factor
    colours = torch.nn.functional.avg_pool2d(to_pixels(np.stack([draw_scene(s) for s in scenes])), 32) / 2 + 0.5
    cells, wanted = (t.movedim(1, -1).flatten(0, 2) for t in (latents, colours))
    ones = torch.ones(len(cells), 1)
    solution = torch.linalg.lstsq(torch.cat([cells, ones], dim=1), wanted).solution
    *factors, bias = [[round(value, 4) for value in row] for row in solution.tolist()]
    return {"rgb_factors": factors, "rgb_bias": bias}
