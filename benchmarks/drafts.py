"""What choosing among drafts is worth: `python benchmarks/drafts.py` adds to drafts.json, prompt by prompt.

Held-out combinations on the demo model, in few steps, so that there are errors to choose against. The scorer of
demo/scenes/scorer.py, a CLIP that saw paintings and captions, chooses; the judge, another network, says what is right.
Random choice is the share of all drafts that are right. Of times only ratios mean anything. "early" is the choice among
all drafts by an early look after so many steps, of which two are drawn to the end, with its share of the steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
from demo.scenes.captions import prompt  # noqa: E402
from demo.scenes.judge import load, score  # noqa: E402
from demo.scenes.world import combinations  # noqa: E402
from sana_core import generate, load_scorer  # noqa: E402
from sana_core.batch.best import FINISHED  # noqa: E402
from sana_core.runtime.image_files import levels  # noqa: E402

OUT = Path(__file__).with_suffix(".json")
DRAFTS, STEPS, SIDE = 8, 5, 256
COUNTS = (1, 2, 4, 8)
EARLY = (1, 2)


def main(prompts: int) -> None:
    _, held_out = combinations()
    judge, scorer = load(), load_scorer(ROOT / "demo/sana-scenes-scorer")
    right, scores, drawing, scoring = [], [], 0.0, 0.0
    early: dict[int, list[float]] = {after: [] for after in EARLY}
    for number, wanted in enumerate(held_out[:prompts]):
        started = time.perf_counter()
        how = {"seed": 1000 * number, "count": DRAFTS, "steps": STEPS, "width": SIDE, "height": SIDE}
        images = generate([prompt(wanted)], ROOT / "demo/sana-scenes", **how)
        drawn = time.perf_counter()
        scores.append(scorer.score(images, prompt(wanted)))
        scoring, drawing = scoring + time.perf_counter() - drawn, drawing + drawn - started
        pictures = [np.asarray(levels(image))[None] for image in images]
        right.append(torch.tensor([score(judge, each, [wanted])["all"] for each in pictures]))
        for after, found in early.items():
            looks = generate([prompt(wanted)], ROOT / "demo/sana-scenes", **how, stop_after=after)
            better = scorer.score(looks, prompt(wanted)).argsort(descending=True)[:FINISHED]
            found.append(right[-1][better[scores[-1][better].argmax()]].item())
        ours, theirs = torch.stack(right), torch.stack(scores)
        chosen = {
            str(count): round(ours.gather(1, theirs[:, :count].argmax(1, True)).mean().item(), 4) for count in COUNTS
        }
        possible = {str(count): round(ours[:, :count].amax(1).mean().item(), 4) for count in COUNTS}
        report = {"prompts": number + 1, "steps": STEPS, "random": round(ours.mean().item(), 4)}
        report["early"] = {
            str(after): {
                "right": round(sum(found) / len(found), 4),
                "steps": round((DRAFTS * after + FINISHED * STEPS) / (DRAFTS * STEPS), 3),
            }
            for after, found in early.items()
        }
        report |= {"right by drafts": chosen, "at best possible": possible}
        report["scoring, of drawing and decoding"] = round(scoring / drawing, 4)
        OUT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 96)
