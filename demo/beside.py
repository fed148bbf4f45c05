"""Edges for a ControlNet, and blue for a LoRA."""

from __future__ import annotations

import numpy as np
import torch
from kornia.filters import canny

# of the edges, low and high, as the template sets them on that node: nights have weak ones
THRESHOLDS = 0.1, 0.2
INK, SHEET = (16, 52, 110), (236, 242, 246)


def find_edges(picture: np.ndarray) -> np.ndarray:
    """Return the edges that ComfyUI's Canny node finds, white on black, uint8 [H, W, 3]."""
    levels = torch.from_numpy(picture / np.float32(255)).movedim(-1, 0)[None]
    _, edges = canny(levels, *THRESHOLDS)
    return np.repeat(edges[0, 0].mul(255).byte().numpy()[..., None], 3, axis=2)


def in_blue(picture: np.ndarray) -> np.ndarray:
    """Return `picture` [H, W, 3] in shades of blue alone, uint8."""
    light = picture.mean(-1, keepdims=True) / 255
    return np.round(light * np.array(SHEET) + (1 - light) * np.array(INK)).astype(np.uint8)
