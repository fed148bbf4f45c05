"""Paintings as a data set of this pack's trainer: pictures, and a metadata.jsonl with what belongs to each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

# what is painted, of whichever world
Scene = TypeVar("Scene")


def write_dataset(
    folder: Path,
    scenes: Iterable[Scene],
    rng: random.Random,
    painted: Callable[[Scene], np.ndarray],
    caption: Callable[[random.Random, Scene], str],
    control: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Paint `scenes` into `folder`, on from those that are there, each with what `control` makes of it; the list is
    written last."""
    listed = folder / "metadata.jsonl"
    if listed.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, scene in enumerate(scenes):
        picture, beside = folder / f"{number:06d}.png", folder / f"{number:06d}-control.png"
        if not picture.is_file():
            pixels = painted(scene)
            if control is not None:
                save(control(pixels), beside)
            save(pixels, picture)
        rest = {} if control is None else {"control": beside.name}
        lines.append({"file_name": picture.name, "text": caption(rng, scene), **rest})
    part = listed.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part.replace(listed)


def save(pixels: np.ndarray, file: Path) -> None:
    part = file.with_suffix(".part")
    Image.fromarray(pixels).save(part, "PNG")
    part.replace(file)
