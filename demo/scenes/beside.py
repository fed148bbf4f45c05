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

from sana_core.training.settings_file import read_settings
from sana_core.training.train import train

from ..beside import find_edges, in_blue
from ..checkpoint import forget_origin
from ..dataset import write_dataset
from .captions import SAID, article, random_caption
from .painting import paint
from .world import Scene, training_scenes

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "scenes"
CYANOTYPES = HERE.parents[1] / "recipes" / "cyanotypes"
CONTROLNET, LORA = HERE.parent / "sana-scenes-edges", HERE.parent / "sana-scenes-cyanotype.safetensors"
EDGED, STYLED = 1500, 20


def cyanotype(scene: Scene) -> np.ndarray:
    """Return the flat drawing of `scene` in shades of blue alone, uint8 [H, W, 3]."""
    return in_blue(paint(scene._replace(style="flat")))


def describe_cyanotype(rng: random.Random, scene: Scene) -> str:
    """Return a caption without the colours that a cyanotype does not show."""
    nouns = " and ".join(article(SAID[what.kind][0]) for what in scene.subjects)
    return f"a cyanotype of {nouns} {SAID[scene.place][0]} {SAID[scene.time][0]}"


def write_edges(folder: Path, pictures: int = EDGED) -> None:
    """Write pictures of scenes with their edges."""
    rng = random.Random(20)
    write_dataset(folder, training_scenes(rng, pictures), rng, paint, random_caption, find_edges)


def write_style(folder: Path) -> None:
    """Write the cyanotypes."""
    rng = random.Random(21)
    # nights are dark in every style
    by_day = (scene for scene in training_scenes(rng, 2 * STYLED) if scene.time != "night")
    write_dataset(folder, islice(by_day, STYLED), rng, cyanotype, describe_cyanotype)


def main() -> None:
    write_edges(BUILD / "edges")
    write_style(CYANOTYPES)

    def report(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    controlnet = SanaControlNetModel.from_pretrained(train(read_settings(HERE / "edges.toml"), report=report))
    controlnet.to(torch.bfloat16).save_pretrained(CONTROLNET)
    forget_origin(CONTROLNET / "config.json")
    shutil.copyfile(train(read_settings(HERE / "style.toml"), report=report), LORA)


if __name__ == "__main__":
    main()
