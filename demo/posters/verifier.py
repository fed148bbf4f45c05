"""What foresees by the hidden states of an image's first steps whether it will show its prompt.

`python -m demo.posters.verifier 4000` gathers so many drafts in demo/build/posters, on from those that are there, and
trains a verifier on them by what the judge says of each. The prompts are those of the model's training. None comes with
the pack: of 600 drafts it learnt to order 65 % of pairs rightly, of which chance orders 50 %.
"""

from __future__ import annotations

import random
import sys

import numpy as np

from ..losses import log_losses
from ..verifier import Drafts, gather, save, train
from .beside import BUILD
from .evaluate import prompt_of
from .judge import load, score
from .recipe import CHECKPOINT
from .world import SIZES, combinations, scene_of

FOLDER = BUILD / "verifier"
# more of them learn 600 drafts by heart
STEPS = 120
# of the 14, about as far in as the third of six
BLOCK = 6
SAID = ("time", "place", "style", "subject", "number", "colour")
# no seed of theirs is drawn elsewhere
FIRST_SEED = 500_000


def main(count: int) -> None:
    drafts, judge, rng = Drafts(CHECKPOINT, SIZES[0][0], BLOCK), load(), random.Random(41)
    known, _ = combinations()
    for number in range(count):
        wanted = scene_of(rng, rng.choice(known), (rng.randint(1, 3),))

        def judged(picture: np.ndarray, wanted=wanted) -> list[bool]:
            said = score(judge, picture[None], [wanted])
            return [said[name] == 1 for name in SAID]

        gather(drafts, BUILD / "drafts", FIRST_SEED + number, prompt_of(wanted), judged)
    verifier, found = train(BUILD / "drafts", drafts.encode, BLOCK, log_losses(BUILD / "verifier.jsonl"), STEPS)
    save(verifier, FOLDER)
    sys.stderr.write(f"{found}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
