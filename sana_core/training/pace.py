"""How fast a run goes, in words for whoever watches it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Pace:
    """The time since training began, or went on, for what is left of it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first: int | None = None

    def restart(self) -> None:
        """Forget what was before: the preparation takes its own time."""
        self.began = time.monotonic()

    def describe(self, line: Mapping[str, Any]) -> str:
        """Return a step's line of the log, with its "steps" in all, as words: step, loss, rate, speed and time left."""
        self.first = line["step"] - 1 if self.first is None else self.first
        left = (time.monotonic() - self.began) / (line["step"] - self.first) * (line["steps"] - line["step"])
        speed = line["pictures"] / max(line["seconds"], 1e-9)
        text = f"step {line['step']} of {line['steps']}, loss {line['loss']:.4f}, rate {line['learning_rate']:.2g}"
        return f"{text}, {speed:.2f} images a second, {clock(left)} left"


def describe_validation(line: Mapping[str, Any]) -> str:
    """Return a validation's line of the log as words; of the best one, which has the "first", how far it has come."""
    found = f"step {line['step']}: validation loss {line['validation_loss']:.4f}"
    if "first" not in line:
        return found
    if line["validation_loss"] < line["first"]:
        return f"the best is of {found}, from {line['first']:.4f}"
    return f"the best is of {found}, which was {line['first']:.4f} at first: lower the learning rate"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
