"""What foresees by the hidden states of a scene's first steps whether it will show its prompt.

`python -m demo.scenes.verifier 4000` gathers so many drafts, on from those that are there, and trains
sana-scenes-verifier/ on them. The wide judge teaches it; the other judge, which it never meets, measures what it is
worth. The prompts are those of the model's training.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np

from ..losses import log_losses
from ..verifier import Drafts, gather, save, train
from .captions import prompt
from .judge import WIDE, load, score
from .recipe import BUILD, CHECKPOINT
from .world import PIXELS, combinations

FOLDER = Path(__file__).parents[1] / "sana-scenes-verifier"
BLOCK = 3
SAID = ("time", "place", "style", "subject", "colour")
# no seed of theirs is drawn elsewhere
FIRST_SEED = 500_000


def main(count: int) -> None:
    drafts, judge, rng = Drafts(CHECKPOINT, PIXELS, BLOCK), load(WIDE), random.Random(41)
    known, _ = combinations()
    for number in range(count):
        wanted = rng.choice(known)

        def judged(picture: np.ndarray, wanted=wanted) -> list[bool]:
            said = score(judge, picture[None], [wanted])
            return [said[name] == 1 for name in SAID]

        gather(drafts, BUILD / "drafts", FIRST_SEED + number, prompt(wanted), judged)
    verifier, found = train(BUILD / "drafts", drafts.encode, BLOCK, log_losses(BUILD / "verifier.jsonl"))
    save(verifier, FOLDER)
    (Path(__file__).parent / "verifier.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.stderr.write(f"{found}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
