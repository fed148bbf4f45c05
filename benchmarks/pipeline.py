"""The difference of `generate` from diffusers' SanaPipeline over 50 prompts. Writes pipeline.json.

Both generate with demo/sana-posters in fp32 on the CPU. The pipeline has its default settings except for size, steps
and seed. This includes its instruction, its handling of prompts, and its resolution binning.
"""

from __future__ import annotations

import random
import sys
from itertools import islice

import torch
from diffusers import SanaPipeline

import sana_core
from benchmarks import ROOT
from benchmarks.machine import write
from demo.captions import prompt, random_caption
from demo.world import combinations, training_scenes

MODEL, SIDE, STEPS = ROOT / "demo" / "sana-posters", 512, 4
# Prompts unlike the captions in training: capitals, punctuation, other scripts, unknown words, none, too many.
OTHERS = [
    "",
    " \n",
    "A Watercolour Of A RED BOAT",
    "  a blue house in the snow  ",
    "a green tree --ar 16:9",
    "a (red:1.4) [car] | a windmill",
    "\u96ea\u306e\u5c71 \U0001f3d4",
    "\u00c9toiles au-dessus d'une MAISON",
    'the words "Open 24 HOURS" on a car',
    "a white lighthouse by the sea " * 80,
]


def prompts() -> list[str]:
    """Return 20 captions of held-out combinations, 20 captions like in training, and OTHERS."""
    rng = random.Random(32)
    held_out = [prompt(combination) for combination in rng.sample(combinations()[1], 20)]
    written = [random_caption(rng, scene) for scene in islice(training_scenes(rng), 20)]
    return [*held_out, *written, *OTHERS]


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    pipeline = SanaPipeline.from_pretrained(MODEL, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    for seed, text in enumerate(prompts()):
        theirs = pipeline(
            text,
            height=SIDE,
            width=SIDE,
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(seed),
            output_type="pt",
        ).images
        ours = sana_core.generate(
            [text], MODEL, seed, width=SIDE, height=SIDE, steps=STEPS, reference="diffusers", devices=["cpu"]
        )
        levels = 255 * ((ours + 1) / 2 - theirs).abs()
        rows.append({"prompt": text[:60], "largest": float(levels.max()), "mean": float(levels.mean())})
        sys.stderr.write(f"{len(rows)}: {rows[-1]}\n")
    report = {
        "pixels": SIDE,
        "steps": STEPS,
        "prompts": len(rows),
        "largest_levels": round(max(row["largest"] for row in rows), 5),
        "mean_levels": round(sum(row["mean"] for row in rows) / len(rows), 7),
        "largest_by_prompt": {row["prompt"]: round(row["largest"], 5) for row in rows},
    }
    write(__file__, report)


if __name__ == "__main__":
    main()
