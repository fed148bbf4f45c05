"""The same prompts and seeds drawn as NVIDIA's code draws them and as diffusers does.

`python -m demo.references` writes report/references.json, and the image of docs/reference.md, docs/references.jpg.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from sana_core.model.reference import DIFFUSERS, NVIDIA

from .evaluate import GUIDANCE, draw, score
from .pictures import combinations, prompt

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
SEEDS = (0, 1000, 2000, 3000)
SHOWN = 6


def main() -> None:
    """Draw the held-out prompts with both references, score them, and write the two files."""
    wanted = combinations()[1]
    prompts = [prompt(*combination) for combination in wanted]
    drawn = {
        name: [draw(CHECKPOINT, prompts, GUIDANCE, seed=seed, reference=name) for seed in SEEDS]
        for name in (NVIDIA, DIFFUSERS)
    }
    levels = np.abs(np.concatenate(drawn[NVIDIA]).astype(int) - np.concatenate(drawn[DIFFUSERS]).astype(int))
    report = {
        "guidance": GUIDANCE,
        "steps": 20,
        "seeds": SEEDS,
        "all_right": {name: [score(pictures, wanted)["all"] for pictures in each] for name, each in drawn.items()},
        "mean_difference_in_levels": round(float(levels.mean()), 2),
        "pictures_that_differ_by_over_8_levels_in_the_mean": float((levels.mean((1, 2, 3)) > 8).mean()),
    }
    (ROOT / "demo" / "report" / "references.json").write_text(json.dumps(report, indent=2) + "\n")
    rows = [np.concatenate(drawn[name][0][:SHOWN], 1) for name in (NVIDIA, DIFFUSERS)]
    Image.fromarray(np.concatenate(rows)).save(ROOT / "docs" / "references.jpg", quality=88)


if __name__ == "__main__":
    main()
