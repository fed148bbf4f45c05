"""The log of a run, with a line of JSON for each step and validation, and the texts that show it to the user."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TypedDict

from ..runtime.atomic_files import patiently, reason_of
from .states import LOG, find_states

logger = logging.getLogger(__name__)


class Line(TypedDict, total=False):
    """A line of the log. A line of a validation has only `step` and `validation_loss`."""

    step: int
    phase: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    # Number of images in the step.
    images: int
    seconds: float
    validation_loss: float
    # Only in reported lines: the number of steps of the whole run.
    steps: int
    # Only in the last reported line: the first validation loss of the phase.
    first: float


class RunLog:
    """The log of the run in `out`. A log that cannot be written does not end the run: its lines wait in memory."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.waiting: list[Line] = []
        self.has_warned = False

    def add(self, line: Line) -> None:
        """Add `line`, after the lines that wait."""
        self.waiting.append(line)
        try:
            append_log(self.out, *self.waiting)
        except OSError as error:
            if not self.has_warned:
                logger.warning("%s cannot be written now (%s); its lines will be added later", LOG, reason_of(error))
            self.has_warned = True
        else:
            self.waiting = []

    def close(self) -> None:
        """Add the lines that wait. Logs a warning if it is still impossible."""
        if not self.waiting:
            return
        try:
            patiently(lambda: append_log(self.out, *self.waiting))
        except OSError as error:
            steps = self.waiting[0]["step"], self.waiting[-1]["step"]
            logger.warning(
                "%s cannot be written (%s), so it lacks steps %d to %d; the states have them",
                LOG,
                reason_of(error),
                *steps,
            )


def append_log(out: Path, *lines: Line) -> None:
    """Add `lines` to the run's log, all of them or none. Raises OSError."""
    with (out / LOG).open("ab+", buffering=0) as stream:
        end = stream.seek(0, 2)
        stream.seek(max(0, end - 1))
        # A power cut may have left half a line.
        data = b"\n"[: stream.read(1) not in (b"", b"\n")]
        data += b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        try:
            while data:
                data = data[stream.write(data) :]
        except OSError:
            stream.truncate(end)
            raise


def read_log(out: Path) -> list[Line]:
    """Return the lines of the run's log in the order of their steps, without broken lines.

    A killed run resumes from its last state and repeats the steps after that. The later lines of a step count.
    """
    file, lines = out / LOG, list[Line]()
    for text in patiently(file.read_bytes).split(b"\n") if file.exists() else ():
        try:
            line = json.loads(text)
            losses = [line[name] for name in ("loss", "validation_loss") if name in line]
            is_line = type(line["step"]) is int and [type(loss_value) for loss_value in losses] == [float]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if is_line:
            while lines and order(lines[-1]) >= order(line):
                lines.pop()
            lines.append(line)
    return lines


def order(line: Line) -> tuple[int, bool]:
    """Return the sort key of a line: the step, with the validation after the loss."""
    return line["step"], "loss" not in line


def read_losses(out: Path) -> list[float]:
    """Return the loss of each step up to the newest state in `out`, from which the run resumes."""
    newest = max((step for step, _ in find_states(out)), default=0)
    return [line["loss"] for line in read_log(out) if "loss" in line and line["step"] <= newest]


class Eta:
    """Measures the time since training began or resumed, and estimates the remaining time."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first: int | None = None

    def restart(self) -> None:
        """Start again, because the time of the preparation does not count."""
        self.began = time.monotonic()

    def describe(self, line: Line) -> str:
        """Return a step's reported line as text: step, loss, rate, speed and remaining time."""
        self.first = line["step"] - 1 if self.first is None else self.first
        seconds_left = (time.monotonic() - self.began) / (line["step"] - self.first) * (line["steps"] - line["step"])
        speed = line["images"] / max(line["seconds"], 1e-9)
        text = f"step {line['step']} of {line['steps']}, loss {line['loss']:.4f}, rate {line['learning_rate']:.2g}"
        return f"{text}, {speed:.2f} images a second, {clock(seconds_left)} left"


def describe_validation(line: Line) -> str:
    """Return a validation's line as text. A line with "first" is of the best validation, and is compared with it."""
    line_text = f"step {line['step']}: validation loss {line['validation_loss']:.4f}"
    if "first" not in line:
        return line_text
    if line["validation_loss"] < line["first"]:
        return f"the best is of {line_text}, from {line['first']:.4f}"
    return f"the best is of {line_text}, which was {line['first']:.4f} at first: lower the learning rate"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
