"""Stage 4: the score of the finished checkpoint on what training never saw, and the report beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

import sana_core
from sana_core.runtime.image_files import levels

from .judge import Verdict, judge
from .pictures import COLOURS, PIXELS, combinations, prompt

GUIDANCES = (1.0, 2.0, 4.5, 7.0)
GUIDANCE = 4.5


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


def contact_sheet(pictures: np.ndarray, columns: int = 8, side: int = 128) -> Image.Image:
    small = [np.asarray(Image.fromarray(p).resize((side, side), Image.Resampling.LANCZOS)) for p in pictures]
    rows = [np.concatenate(small[i : i + columns], 1) for i in range(0, len(small), columns)]
    return Image.fromarray(np.concatenate(rows, 0))


def evaluate(checkpoint: Path, report: Path, psnr: float) -> dict:
    """Score `checkpoint` on the held-out combinations, draw the contact sheets, write score.json; return the score."""
    _, held_out = combinations()
    prompts = [prompt(*combination) for combination in held_out]
    result: dict = {"prompts": len(prompts), "psnr_db": round(psnr, 2), "guidance": {}}
    plain = None
    for guidance in GUIDANCES:
        pictures = draw(checkpoint, prompts, guidance)
        plain = pictures if plain is None else plain
        change = np.abs(pictures.astype(int) - plain.astype(int)).mean()
        result["guidance"][str(guidance)] = score(pictures, held_out) | {"mean_change_from_1": round(change, 2)}
        if guidance == GUIDANCE:
            contact_sheet(pictures).save(report / "held_out.jpg", quality=88)
    empty = draw(checkpoint, [""], 1.0, count=len(held_out))
    contact_sheet(empty).save(report / "empty_prompt.jpg", quality=88)
    result["empty_prompt"] = score(empty, held_out)
    result["chance"] = {"colour": 1 / len(COLOURS), "shape": 1 / 4, "background": 1 / len(COLOURS), "all": 1 / 224}
    (report / "score.json").write_text(json.dumps(result, indent=2) + "\n")
    return result
