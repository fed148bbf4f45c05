"""A fixed rule that recognises shape and colours in an image of sana-tiny, without reading the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage
from shapes import COLOURS, PIXELS, SHAPES, draw_shape

import sana_core
from sana_core.runtime.image_files import levels

# The best template must overlap this much with the patch (intersection over union). On perfect drawings the right
# template reaches 0.99, the best wrong one 0.78 on circles and squares, 0.69 on crosses and 0.51 on triangles.
SMALLEST_IOU = 0.75
SMALLEST_AREA = 0.01


class Verdict(NamedTuple):
    """What a picture shows; None where the rule cannot tell."""

    colour: str | None
    shape: str | None
    background: str


def judge(image: np.ndarray) -> Verdict:
    """Return colour, shape and background of `image`, uint8 [H, W, 3].

    Each pixel takes the nearest palette colour. The most frequent colour along the border is the background. The most
    frequent other colour is the colour of the shape, if it covers 1 % of the image. The shape is the template with the
    largest intersection over union with the largest patch whose pixels are closer to that colour than to the
    background.
    """
    palette = np.array(list(COLOURS.values()), dtype=np.float32)
    names = list(COLOURS)
    pixels = image.astype(np.float32)
    nearest = np.linalg.norm(pixels[:, :, None] - palette, axis=-1).argmin(-1)

    margin = max(1, min(image.shape[:2]) // 32)
    inside = np.zeros(nearest.shape, bool)
    inside[margin:-margin, margin:-margin] = True
    background = np.bincount(nearest[~inside], minlength=len(names)).argmax()
    counts = np.bincount(nearest.ravel(), minlength=len(names))
    counts[background] = 0
    colour = counts.argmax()
    if counts[colour] < SMALLEST_AREA * nearest.size:
        return Verdict(None, None, names[background])

    to_colour = np.linalg.norm(pixels - palette[colour], axis=-1)
    to_background = np.linalg.norm(pixels - palette[background], axis=-1)
    patches, _ = ndimage.label(to_colour < to_background)
    sizes = np.bincount(patches.ravel())
    sizes[0] = 0
    mask = patches == sizes.argmax()
    scores = {shape: overlap(mask, shape) for shape in SHAPES}
    best = max(scores, key=scores.__getitem__)
    return Verdict(names[colour], best if scores[best] >= SMALLEST_IOU else None, names[background])


def overlap(mask: np.ndarray, shape: str) -> float:
    """Intersection over union of `mask` and `shape` stretched to the bounding box of `mask`."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = (columns[0], rows[0], columns[-1], rows[-1])
    template = Image.new("1", mask.shape[::-1])
    draw_shape(ImageDraw.Draw(template), shape, box, 1)
    drawn = np.asarray(template)
    return float((mask & drawn).sum() / (mask | drawn).sum())


def draw(checkpoint: Path, prompts: list[str], guidance: float, **options) -> np.ndarray:
    """Draw the prompts, uint8 [N, H, W, 3]."""
    images = sana_core.generate(prompts, checkpoint, guidance=guidance, width=PIXELS, height=PIXELS, **options)
    return np.stack([levels(image) for image in images])


def score(pictures: np.ndarray, wanted: list[tuple[str, str, str]]) -> dict[str, float]:
    """Return the share of `pictures` with the right colour, shape, background, and with all three."""
    seen = [judge(picture) for picture in pictures]
    right = [
        [getattr(v, f) == w for f, w in zip(Verdict._fields, c, strict=True)] for v, c in zip(seen, wanted, strict=True)
    ]
    shares = np.mean(right, axis=0).tolist()
    return dict(zip(Verdict._fields, shares, strict=True)) | {"all": float(np.mean([all(r) for r in right]))}
