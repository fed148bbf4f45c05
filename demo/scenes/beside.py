"""Beside the model of scenes: a ControlNet that follows edges, and a LoRA of a fourth style from 20 pictures.

`python -m demo.scenes.beside` trains both by this pack's trainer, after the model, with edges.toml and style.toml.
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
from PIL import Image, ImageFilter

from sana_core.training.settings import read_settings
from sana_core.training.train import train

from .captions import SAID, article
from .dataset import write_dataset
from .painting import paint
from .world import Scene, training_scenes

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "scenes"
CONTROLNET, LORA = HERE.parent / "sana-scenes-edges", HERE.parent / "sana-scenes-blueprint.safetensors"
EDGED, STYLED = 3000, 20
# levels between neighbouring pixels that make an edge
CONTRAST = 14
BOARD, LINES = (30, 74, 148), (232, 240, 250)


def find_edges(picture: np.ndarray) -> np.ndarray:
    """Return white edges on black, of two pixels, uint8 [H, W, 3]."""
    levels = picture.astype(int)
    across, down = (abs(np.diff(levels, axis=axis)).max(-1) > CONTRAST for axis in (1, 0))
    found = np.zeros(picture.shape[:2], bool)
    found[:, :-1] |= across
    found[:-1] |= down
    wide = Image.fromarray(found.astype(np.uint8) * 255).filter(ImageFilter.MaxFilter(3))
    return np.repeat(np.asarray(wide)[..., None], 3, axis=2)


def blueprint(scene: Scene) -> np.ndarray:
    """Return the line drawing of `scene` in white on blue, uint8 [H, W, 3]."""
    light = paint(scene._replace(style="line drawing")).mean(-1, keepdims=True) / 255
    return np.round(light * np.array(BOARD) + (1 - light) * np.array(LINES)).astype(np.uint8)


def describe_blueprint(rng: random.Random, scene: Scene) -> str:
    """Return a caption without the colours that a blueprint does not show."""
    nouns = " and ".join(article(SAID[what.kind][0]) for what in scene.subjects)
    return f"a blueprint of {nouns} {SAID[scene.place][0]} {SAID[scene.time][0]}"


def write_edges(folder: Path, pictures: int = EDGED) -> None:
    """Write pictures of scenes with their edges."""
    rng = random.Random(20)
    write_dataset(folder, training_scenes(rng, pictures), rng, control=find_edges)


def write_style(folder: Path) -> None:
    """Write the blueprints."""
    rng = random.Random(21)
    # drawings of nights are dark
    by_day = (scene for scene in training_scenes(rng, 2 * STYLED) if scene.time != "night")
    write_dataset(folder, islice(by_day, STYLED), rng, painted=blueprint, caption=describe_blueprint)


def main() -> None:
    write_edges(BUILD / "edges")
    write_style(BUILD / "style")

    def report(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    controlnet = SanaControlNetModel.from_pretrained(train(read_settings(HERE / "edges.toml"), report=report))
    controlnet.to(torch.bfloat16).save_pretrained(CONTROLNET)
    shutil.copyfile(train(read_settings(HERE / "style.toml"), report=report), LORA)


if __name__ == "__main__":
    main()
