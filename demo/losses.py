"""The curves of a recipe's stages: lines of JSON beside what they make, shown on standard error, drawn in the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np


def log_losses(file: Path) -> Callable[[int, float], None]:
    """Return report(step, loss), which adds to the curve in `file` and shows it on standard error."""
    started = time.monotonic()

    def report(step: int, loss: float) -> None:
        line = {"step": step, "loss": round(loss, 5), "seconds": round(time.monotonic() - started, 1)}
        with file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        sys.stderr.write(f"{file.stem} {line}\n")

    return report


def plot_losses(files: list[Path], report: Path) -> None:
    """Draw the curve of each file into losses.png, of one with a loss at each step means over 20."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(files), figsize=(4 * len(files), 3.2), layout="constrained", squeeze=False)
    for file, panel in zip(files, panels[0], strict=True):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        steps, losses = zip(*((line["step"], line["loss"]) for line in lines if "loss" in line), strict=True)
        width = max(20 // (steps[1] - steps[0]), 1)
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
