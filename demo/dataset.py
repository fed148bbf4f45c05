"""Writes paintings as a data set for this pack's trainer: images, and a metadata.jsonl with their captions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

# The description of an image. Callers have different types.
Scene = TypeVar("Scene")


def write_dataset(
    folder: Path,
    scenes: Iterable[Scene],
    rng: random.Random,
    painted: Callable[[Scene], np.ndarray],
    caption: Callable[[random.Random, Scene], str],
    control: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Paint `scenes` into `folder`, and resume after an interruption.

    With `control`, each image also gets a control image. metadata.jsonl is written last.
    """
    metadata = folder / "metadata.jsonl"
    if metadata.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, scene in enumerate(scenes):
        image_file, control_file = folder / f"{number:06d}.png", folder / f"{number:06d}-control.png"
        if not image_file.is_file():
            pixels = painted(scene)
            if control is not None:
                save(control(pixels), control_file)
            save(pixels, image_file)
        control_fields = {} if control is None else {"control": control_file.name}
        lines.append({"file_name": image_file.name, "text": caption(rng, scene), **control_fields})
    part = metadata.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part.replace(metadata)


def save(pixels: np.ndarray, file: Path) -> None:
    part = file.with_suffix(".part")
    Image.fromarray(pixels).save(part, "PNG")
    part.replace(file)
