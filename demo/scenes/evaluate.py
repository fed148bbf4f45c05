"""The score of the model of scenes on what training never showed, by the judge, and contact sheets of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import sana_core
from sana_core.picture_files import levels

from ..evaluate import contact_sheet
from .captions import prompt
from .judge import load, score
from .world import PIXELS, combinations

GUIDANCE, STEPS, SEEDS = 4.5, 20, 4


def draw(checkpoint: Path, prompts: list[str], **options) -> np.ndarray:
    """Draw the prompts, uint8 [N, H, W, 3]."""
    images = sana_core.generate(prompts, checkpoint, width=PIXELS, height=PIXELS, steps=STEPS, **options)
    return np.stack([levels(image) for image in images])


def evaluate(checkpoint: Path, report: Path, psnr: float) -> dict:
    """Score `checkpoint` on the held-out combinations with several seeds, and on the empty prompt; draw the contact
    sheets, write score.json; return the score."""
    report.mkdir(exist_ok=True)
    _, held_out = combinations()
    prompts, judge = [prompt(each) for each in held_out], load()
    scores = []
    for seed in range(SEEDS):
        pictures = draw(checkpoint, prompts, guidance=GUIDANCE, seed=1000 * seed)
        scores.append(score(judge, pictures, held_out))
        if seed == 0:
            contact_sheet(pictures[:64]).save(report / "held_out.jpg", quality=88)
            contact_sheet(pictures[:16]).save(report / "first.jpg", quality=90)
    mean = {name: round(float(np.mean([each[name] for each in scores])), 4) for name in scores[0]}
    empty = draw(checkpoint, [""], guidance=1.0, count=64)
    contact_sheet(empty).save(report / "empty_prompt.jpg", quality=88)
    result = {"prompts": len(prompts), "psnr_db": round(psnr, 2), "guidance": GUIDANCE, "steps": STEPS}
    result |= {"mean": mean, "seeds": scores, "empty_prompt": score(judge, empty, held_out[:64])}
    (report / "score.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def plot_losses(files: list[Path], report: Path) -> None:
    """Draw the curve of each file of JSON lines into losses.png, of one with a loss at each step means over 20."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(files), figsize=(4 * len(files), 3.2), layout="constrained", squeeze=False)
    for file, panel in zip(files, panels[0], strict=True):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        steps, losses = zip(*((line["step"], line["loss"]) for line in lines if "loss" in line), strict=True)
        width = 20 // (steps[1] - steps[0])
        count = len(steps) // width * width
        steps, losses = (np.array(each[:count]).reshape(-1, width).mean(1) for each in (steps, losses))
        panel.semilogy(steps, losses, linewidth=1, label="training")
        held = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
        if held:
            panel.semilogy(*zip(*held, strict=True), marker=".", label="held out")
            panel.legend()
        panel.set(title=f"{file.parent.name}/{file.stem}", xlabel="step", ylabel="loss")
        panel.grid(alpha=0.3)
    figure.savefig(report / "losses.png", dpi=80)
