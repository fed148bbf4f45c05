"""What choosing among drafts is worth: `python -m benchmarks.drafts 288` adds to drafts.json, prompt by prompt.

Held-out combinations on the demo model at its own size, in few steps, so that there are errors to choose against. Each
draft is drawn once, and seen after the first, second and third of five steps and whole: by the scorer of
demo/posters/scorer.py, a CLIP that saw paintings and captions, and by the verifier of demo/posters/verifier.py, which
was taught by the judge, on other prompts. The judge says what is right. From that follows what each way of choosing
would have kept (that a draft which goes on is the same bits is for tests/unit/test_best.py), and from the shortest
times of a step, a decode and each look in this process what it costs, of drawing, decoding and scoring all. What was
seen of a prompt stays in .cache/drafts.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from demo.posters import verifier as recipe
from demo.posters.evaluate import held_out_scenes, prompt_of
from demo.posters.judge import load, score
from demo.posters.world import SIZES, Scene
from demo.verifier import DRAWN, Drafts
from sana_core import load_scorer
from sana_core.batch.best import FINISHED, looks_every
from sana_core.batch.pipeline import decode
from sana_core.batch.verifier import load_verifier

OUT, KEPT = Path(__file__).with_suffix(".json"), ROOT / ".cache" / "drafts"
DRAFTS, LOOKS = 8, (1, 2, 3)
COUNTS = (1, 2, 4, 8, 16)


class Clock:
    """The shortest processor time of each kind of work: others use the machine too."""

    def __init__(self) -> None:
        self.shortest: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        self.shortest[name] = min(self.shortest.get(name, math.inf), time.process_time() - started)
        return result


def see(drafts: Drafts, wanted: Scene, seeds: range, clock: Clock) -> dict[str, Any]:
    """Return of each draft of a prompt whether it is right, and its scores: of the CLIP after each look and whole, and
    of the verifier after each look."""
    judge, clip, verifier = load(), load_scorer(ROOT / "demo/sana-posters-scorer"), load_verifier(recipe.FOLDER)
    said, text, seen = prompt_of(wanted), drafts.encode(prompt_of(wanted)), []
    for seed in seeds:
        trails, picture = clock.time("whole", lambda seed=seed: drafts.draw(text, seed))
        row: dict[str, Any] = {"right": score(judge, picture[None], [wanted])["all"]}
        x0s = [trail.x0s[-1] for trail in trails]
        shown = [clock.time("decode", lambda x0=x0: decode(drafts.models.autoencoder, x0)[0]) for x0 in x0s]
        shown.append(torch.from_numpy(picture).movedim(-1, 0) / 127.5 - 1)
        row["clip"] = [clock.time("clip", lambda each=each: clip.score(each[None], said).item()) for each in shown]
        states = [trail.capture.states for trail in trails]
        row["verifier"] = [
            clock.time("verifier", lambda each=each: verifier.score(each, *text).item()) for each in states
        ]
        seen.append(row)
    return {"prompt": said, "drafts": seen}


def choose(rows: list[dict[str, Any]], looks: list[tuple[int, int]], by: str) -> float:
    """Return whether the draft that rounds of `looks` keep is right; the scorer chooses among those that are whole."""
    left, seen = rows, [0.0] * len(LOOKS)
    for step, kept in looks:
        # the looks so far: a verifier's scores are added up
        seen[step - 1] = 1.0
        weights = seen if by == "verifier" else [0.0] * (step - 1) + [1.0]
        left = sorted(left, key=lambda row: -sum(w * s for w, s in zip(weights, row[by], strict=False) if w))[:kept]
    return left[0]["right"] if len(left) == 1 else max(left, key=lambda row: row["clip"][-1])["right"]


def cost(times: dict[str, float], count: int, looks: list[tuple[int, int]], by: str, scored: bool) -> float:
    """Return the seconds of drawing `count` drafts in rounds, and of what looks at them."""
    step = (times["whole"] - times["decode"]) / DRAWN
    look = times[by] + (times["decode"] if by == "clip" else 0)
    total, left, done = 0.0, count, 0
    for after, kept in looks:
        total, left, done = total + left * ((after - done) * step + look), kept, after
    return total + left * ((DRAWN - done) * step + times["decode"] + (times["clip"] if scored else 0))


def report(prompts: list[list[dict[str, Any]]], times: dict[str, float]) -> dict[str, Any]:
    """Return what each way keeps and costs, of drawing, decoding and scoring as many drafts whole."""
    last, known = DRAWN - 1, load_verifier(recipe.FOLDER).last_look(DRAWN)
    found: dict[str, Any] = {}
    for count in (count for count in COUNTS if count <= len(prompts[0])):
        rows = [rows[:count] for rows in prompts]
        whole = cost(times, count, [], "clip", True)
        ways = {
            "all drawn, by the scorer": ([], "clip", True),
            "rounds, by the scorer": (looks_every(1, last, count, min(count, FINISHED)), "clip", True),
            "rounds, by the verifier": (looks_every(1, known, count, 1), "verifier", False),
        }
        found[str(count)] = {"some right": mean([max(row["right"] for row in each) for each in rows])}
        for name, (looks, by, scored) in ways.items():
            found[str(count)][name] = {
                "right": mean([choose(each, looks, by) for each in rows]),
                "cost": round(cost(times, count, looks, by, scored) / whole, 3),
            }
    return found


def mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4)


def main(prompts: int, count: int) -> None:
    held_out = held_out_scenes(0)
    torch.set_num_threads(1)
    drafts, clock = Drafts(recipe.CHECKPOINT, SIZES[0][0], recipe.BLOCK, LOOKS), Clock()
    KEPT.mkdir(parents=True, exist_ok=True)
    seen: list[list[dict[str, Any]]] = []
    for number, wanted in enumerate(held_out[:prompts]):
        file = KEPT / f"{number:03d}.json"
        if not file.is_file():
            found = see(drafts, wanted, range(1000 * number, 1000 * number + count), clock)
            file.write_text(json.dumps(found))
        seen.append(json.loads(file.read_text())["drafts"])
    if not clock.shortest:
        for number in range(4):
            see(drafts, held_out[number], range(2), clock)
    random = mean([row["right"] for rows in seen for row in rows])
    result = {"prompts": len(seen), "drafts of each": count, "steps": DRAWN, "random": random}
    result["milliseconds"] = {name: round(1000 * seconds, 1) for name, seconds in clock.shortest.items()}
    result["by drafts"] = report(seen, clock.shortest)
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else DRAFTS)
