"""Checks the values that arrive over the links of a graph."""

from __future__ import annotations

import comfy.model_patcher
import comfy.sd
import torch

from ...sana_core.errors import InputError
from .loading.scorer import HostScorer
from .training.fields import RunSettings
from .training.view import Dataset

SOCKETS: dict[str, tuple[str, type]] = {
    "model": ("MODEL", comfy.model_patcher.ModelPatcher),
    "clip": ("CLIP", comfy.sd.CLIP),
    "vae": ("VAE", comfy.sd.VAE),
    "positive": ("CONDITIONING", list),
    "negative": ("CONDITIONING", list),
    "latent_image": ("LATENT", dict),
    "samples": ("LATENT", dict),
    "first_image": ("IMAGE", torch.Tensor),
    "image": ("IMAGE", torch.Tensor),
    "dataset": ("SANA_DATASET", Dataset),
    "regularisation": ("SANA_DATASET", Dataset),
    "settings": ("SANA_TRAIN_SETTINGS", RunSettings),
    "scorer": ("SANA_SCORER", HostScorer),
}


def check_links(**inputs: object) -> None:
    """Raise InputError for the first input with the wrong type. Keys are the names of sockets.

    ComfyUI checks the types of links, but accepts a plain value instead of a link, and links of type *.
    """
    for field, value in inputs.items():
        name, expected = SOCKETS[field]
        fits = isinstance(value, expected)
        if fits and name == "LATENT":
            fits = isinstance(value.get("samples"), torch.Tensor)
        if not fits:
            got = repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
            raise InputError(f"{field}: got {got:.40}, expected a {name}; connect an output of that type")
