"""The optimizer's step and the log of losses that every stage of the recipe uses."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def take_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    loss: torch.Tensor,
) -> None:
    """Follow the gradient of `loss`, its norm clipped to 1, and move the learning rate on."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()


def log_losses(file: Path) -> Callable[[int, float], None]:
    """Return report(step, loss), which adds to the curve in `file` and shows it on standard error."""
    started = time.monotonic()

    def report(step: int, loss: float) -> None:
        line = {"step": step, "loss": round(loss, 5), "seconds": round(time.monotonic() - started, 1)}
        with file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        sys.stderr.write(f"{file.stem} {line}\n")

    return report
