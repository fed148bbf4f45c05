"""What saving costs a run that saves every 100 steps: `python benchmarks/train_saving.py`.

It writes benchmarks/train_saving.json: for a LoRA of the demo model and for all of its weights, the seconds of one
state, the bytes of it, and its share of the time of the run.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import ROOT, write

from sana_core.training import loop
from sana_core.training.settings import Method, Validation
from sana_core.training.settings_file import read_settings
from sana_core.training.train import train

STEPS, EVERY = 200, 100


def figures_of(method: Method) -> dict[str, Any]:
    """Train by the bundled recipe with `method`, and return what its states take."""
    settings = read_settings(ROOT / "recipes" / "lora_bundled.toml")
    phase = replace(settings.phase[0], steps=STEPS)
    settings = replace(settings, phase=(phase,), method=method, validation=Validation(), save_every=EVERY, keep=1)
    saved: list[float] = []
    steps: list[float] = []
    write_state = loop.write_state

    def timed(*arguments: Any) -> None:
        began = time.perf_counter()
        write_state(*arguments)
        saved.append(time.perf_counter() - began)

    loop.write_state = timed
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(replace(settings, out=folder, cache=""), lambda line: steps.append(line.get("seconds", 0.0)))
            size = sum(file.stat().st_size for file in Path(folder, "steps").rglob("*") if file.is_file())
    finally:
        loop.write_state = write_state
    assert len(saved) == STEPS // EVERY
    return {
        "state_megabytes": round(size / 1e6, 1),
        "seconds_of_a_state": round(min(saved), 3),
        "share_of_the_run": round(sum(saved) / (sum(saved) + sum(steps)), 4),
    }


def main() -> None:
    figures = {"lora": figures_of(Method(rank=8, targets="both")), "full": figures_of(Method("full"))}
    write(__file__, {"steps": STEPS, "save_every": EVERY, **figures})


if __name__ == "__main__":
    main()
