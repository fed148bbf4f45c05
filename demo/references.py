"""The same prompts and seed drawn as NVIDIA's code draws them and as diffusers does: `python -m demo.references`.

Writes the image of docs/reference.md, docs/references.jpg.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from sana_core.model.reference import DIFFUSERS, NVIDIA

from .evaluate import GUIDANCE, draw
from .pictures import combinations, prompt

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
SHOWN = 6


def main() -> None:
    prompts = [prompt(*combination) for combination in combinations()[1][:SHOWN]]
    rows = [np.concatenate(draw(CHECKPOINT, prompts, GUIDANCE, reference=name), 1) for name in (NVIDIA, DIFFUSERS)]
    Image.fromarray(np.concatenate(rows)).save(ROOT / "docs" / "references.jpg", quality=88)


if __name__ == "__main__":
    main()
