"""Trains a ControlNet for edges, and a LoRA of a fourth style from 20 images, for the model of posters.

Run `python -m demo.beside` after the training of the model. It uses this pack's trainer with edges.toml and style.toml.
"""

from __future__ import annotations

import random
import shutil
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from diffusers import SanaControlNetModel
from kornia.filters import canny

from sana_core.training.settings import read_settings
from sana_core.training.trainer import train

from .captions import SAID, counted, random_caption
from .checkpoint import forget_origin
from .dataset import write_dataset
from .painting import paint
from .world import Scene, training_scenes

HERE = Path(__file__).parent
BUILD = HERE / "build"
CYANOTYPES = HERE.parent / "recipes" / "cyanotypes"
CONTROLNET, LORA = HERE / "sana-posters-edges", HERE / "sana-posters-cyanotype.safetensors"
EDGED, STYLED = 500, 20
# Side of the ControlNet's training images. The model was also trained at this size, which takes a quarter of the time.
SIDE = 256
# Low and high threshold of the Canny node, as in the template. They are low because edges at night are weak.
THRESHOLDS = 0.1, 0.2
INK, SHEET = (16, 52, 110), (236, 242, 246)


def small(scene: Scene) -> np.ndarray:
    """Paint `scene` at half the model's native size, uint8 [256, 256, 3]."""
    return paint(scene, SIDE, SIDE)


def find_edges(image: np.ndarray) -> np.ndarray:
    """Return the edges that ComfyUI's Canny node finds, white on black, uint8 [H, W, 3]."""
    levels = torch.from_numpy(image / np.float32(255)).movedim(-1, 0)[None]
    _, edges = canny(levels, *THRESHOLDS)
    return np.repeat(edges[0, 0].mul(255).byte().numpy()[..., None], 3, axis=2)


def in_blue(image: np.ndarray) -> np.ndarray:
    """Return `image` [H, W, 3] in shades of blue, uint8."""
    light = image.mean(-1, keepdims=True) / 255
    return np.round(light * np.array(SHEET) + (1 - light) * np.array(INK)).astype(np.uint8)


def cyanotype(scene: Scene) -> np.ndarray:
    """Return the flat drawing of `scene` in shades of blue, uint8 [H, W, 3]."""
    return in_blue(paint(scene._replace(style="flat")))


def describe_cyanotype(rng: random.Random, scene: Scene) -> str:
    """Return a caption with the original colours of the subjects, because all captions of the model name a colour."""
    nouns = " and ".join(counted(group.count, f"{group.colour} {SAID[group.kind][0]}") for group in scene.groups)
    return f"a cyanotype of {nouns} {SAID[scene.place][0]} {SAID[scene.time][0]}"


def write_edges(folder: Path, count: int = EDGED) -> None:
    """Write images of scenes with their edges."""
    rng = random.Random(20)
    write_dataset(folder, islice(training_scenes(rng), count), rng, small, random_caption, find_edges)


def write_style(folder: Path) -> None:
    """Write the cyanotypes."""
    rng = random.Random(21)
    # Nights are too dark in every style.
    by_day = (scene for scene in training_scenes(rng) if scene.time != "night")
    write_dataset(folder, islice(by_day, STYLED), rng, cyanotype, describe_cyanotype)


def main() -> None:
    def report(line: object) -> None:
        sys.stderr.write(f"{line}\n")

    write_style(CYANOTYPES)
    shutil.copyfile(train(read_settings(HERE / "style.toml"), report=report), LORA)
    write_edges(BUILD / "edges")
    controlnet = SanaControlNetModel.from_pretrained(train(read_settings(HERE / "edges.toml"), report=report))
    controlnet.to(torch.bfloat16).save_pretrained(CONTROLNET)
    forget_origin(CONTROLNET / "config.json")


if __name__ == "__main__":
    main()
