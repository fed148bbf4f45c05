"""Folders like the bundled checkpoint, with another kind of transformer of random weights in it."""

import shutil

import torch
from diffusers import SanaTransformer2DModel

SPRINT = {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}
SANA_1_5 = {"qk_norm": "rms_norm_across_heads"}


def make_variant(checkpoint, folder, **changes):
    """Write the folder; return it."""
    shutil.copytree(checkpoint, folder)
    shutil.rmtree(folder / "transformer")
    config = SanaTransformer2DModel.load_config(checkpoint / "transformer")
    torch.manual_seed(0)
    SanaTransformer2DModel.from_config({**config, **changes}).save_pretrained(folder / "transformer")
    return folder
