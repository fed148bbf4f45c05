"""Scores the model of posters with the judge, on combinations that training never showed, and makes contact sheets.

`python -m demo.evaluate CHECKPOINT REPORT SEEDS` writes both into the folder REPORT.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import sana_core
from sana_core.model.latents import latent_shape, noise_stream
from sana_core.runtime.image_files import levels

from .captions import prompt
from .judge import Judge, distance, features, load, score
from .painting import paint
from .world import SIZES, Scene, combinations, combinations_of, scene_of

GUIDANCE, STEPS, SEEDS = 4.5, 20, 4
# Held-out combinations that are tried in the other sizes.
TRIED = 64


def held_out_scenes(seed: int) -> list[Scene]:
    """Return a scene of each held-out combination, with one, two and three subjects in turn."""
    rng = random.Random(f"held out {seed}")
    return [scene_of(rng, combination, (1 + index % 3,)) for index, combination in enumerate(combinations()[1])]


def prompt_of(scene: Scene) -> str:
    (combination,), (group,) = combinations_of(scene), scene.groups
    return prompt(combination, group.count)


def draw(
    checkpoint: Path, prompts: list[str], seed: int = 0, size: tuple[int, int] = SIZES[0], **options
) -> np.ndarray:
    """Generate an image of each prompt, uint8 [N, H, W, 3]. Prompt k has seed + k."""
    width, height = size
    # `generate` uses the same noise for every prompt, so its images would not be independent samples.
    noise = next(noise_stream(torch.empty(latent_shape(width, height, len(prompts))), seed))
    images = sana_core.generate(prompts, checkpoint, latents=noise, steps=STEPS, width=width, height=height, **options)
    return np.stack([levels(image) for image in images])


def contact_sheet(pictures: np.ndarray, columns: int = 8, side: int = 128) -> Image.Image:
    small = [np.asarray(Image.fromarray(p).resize((side, side), Image.Resampling.LANCZOS)) for p in pictures]
    rows = [np.concatenate(small[i : i + columns], 1) for i in range(0, len(small), columns)]
    return Image.fromarray(np.concatenate(rows, 0))


def mean_score(scores: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(float(np.mean([values[name] for values in scores])), 4) for name in scores[0]}


def evaluate(checkpoint: Path, report: Path, seeds: int = SEEDS) -> dict:
    """Score `checkpoint` on the held-out combinations with several seeds, in the other sizes, and on the empty prompt.

    Writes score.json and the contact sheets, and returns the scores.
    """
    report.mkdir(parents=True, exist_ok=True)
    scenes, judge = held_out_scenes(0), load()
    prompts = [prompt_of(scene) for scene in scenes]
    scores, seed_features = [], []
    for seed in range(seeds):
        pictures = draw(checkpoint, prompts, 1000 * seed, guidance=GUIDANCE)
        scores.append(score(judge, pictures, scenes))
        seed_features.append(features(judge, pictures))
        if seed == 0:
            contact_sheet(pictures[:64], side=256).save(report / "held_out.jpg", quality=88)
    result = {"prompts": len(prompts), "guidance": GUIDANCE, "steps": STEPS}
    result |= {"mean": mean_score(scores), "seeds": scores}
    empty = draw(checkpoint, [""] * TRIED, guidance=1.0)
    contact_sheet(empty, side=256).save(report / "empty_prompt.jpg", quality=88)
    result["empty_prompt"] = score(judge, empty, scenes[:TRIED])
    for width, height in SIZES[1:]:
        pictures = draw(checkpoint, prompts[:TRIED], size=(width, height), guidance=GUIDANCE)
        result[f"{width}x{height}"] = score(judge, pictures, scenes[:TRIED])
        contact_sheet(pictures[:16], columns=4, side=256).save(report / f"{width}x{height}.jpg", quality=88)
    result["distance"] = distances(judge, np.concatenate(seed_features), seeds)
    (report / "score.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def distances(judge: Judge, drawn: np.ndarray, seeds: int) -> dict[str, float]:
    """Return the distance of images from paintings of the same scenes, and the distance of two sets of paintings.

    The distances are between features. `drawn`: features of the images.
    """
    paintings, other_paintings = (
        np.concatenate([features(judge, np.stack([paint(s) for s in held_out_scenes(seed)])) for seed in part])
        for part in (range(seeds), range(seeds, 2 * seeds))
    )
    return {
        "pictures": round(distance(paintings, drawn), 5),
        "paintings": round(distance(paintings, other_paintings), 5),
    }


if __name__ == "__main__":
    evaluate(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
