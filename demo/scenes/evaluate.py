"""The score of the model of scenes on what training never showed, by the judge, and contact sheets of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

import sana_core
from sana_core.runtime.image_files import levels

from ..evaluate import contact_sheet
from .captions import prompt
from .judge import load, score
from .world import PIXELS, combinations

GUIDANCE, STEPS, SEEDS = 4.5, 20, 4
# width, height besides the native one, and on how many of the held-out combinations they are tried
SIZES, TRIED = ((384, 256), (512, 512)), 64


def draw(checkpoint: Path, prompts: list[str], **options) -> np.ndarray:
    """Draw the prompts, uint8 [N, H, W, 3]."""
    size = {"width": PIXELS, "height": PIXELS}
    images = sana_core.generate(prompts, checkpoint, steps=STEPS, **size | options)
    return np.stack([levels(image) for image in images])


def draw_seeds(checkpoint: Path, prompts: list[str]) -> Iterator[np.ndarray]:
    """Yield the prompts drawn with each of SEEDS seeds, as `draw` does; no noise comes twice."""
    for seed in range(SEEDS):
        # the picture of a prompt has the seed and the prompt's place
        yield draw(checkpoint, prompts, guidance=GUIDANCE, seed=1000 * seed)


def mean_score(scores: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(float(np.mean([each[name] for each in scores])), 4) for name in scores[0]}


def evaluate(checkpoint: Path, report: Path, psnr: float) -> dict:
    """Score `checkpoint` on the held-out combinations with several seeds, and on the empty prompt; draw the contact
    sheets, write score.json; return the score."""
    report.mkdir(exist_ok=True)
    _, held_out = combinations()
    prompts, judge = [prompt(each) for each in held_out], load()
    scores = []
    for seed, pictures in enumerate(draw_seeds(checkpoint, prompts)):
        scores.append(score(judge, pictures, held_out))
        if seed == 0:
            contact_sheet(pictures[:64]).save(report / "held_out.jpg", quality=88)
            contact_sheet(pictures[:16]).save(report / "first.jpg", quality=90)
    empty = draw(checkpoint, [""], guidance=1.0, count=64)
    contact_sheet(empty).save(report / "empty_prompt.jpg", quality=88)
    result = {"prompts": len(prompts), "psnr_db": round(psnr, 2), "guidance": GUIDANCE, "steps": STEPS}
    result |= {"mean": mean_score(scores), "seeds": scores, "empty_prompt": score(judge, empty, held_out[:64])}
    result["sizes"] = {}
    for width, height in SIZES:
        pictures = draw(checkpoint, prompts[:TRIED], guidance=GUIDANCE, width=width, height=height)
        result["sizes"][f"{width}x{height}"] = score(judge, pictures, held_out[:TRIED])
        row = np.concatenate(list(pictures[:4]), 1)
        Image.fromarray(row).resize((256 * row.shape[1] // height, 256)).save(
            report / f"{width}x{height}.jpg", quality=88
        )
    (report / "score.json").write_text(json.dumps(result, indent=1) + "\n")
    return result
