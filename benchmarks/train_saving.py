"""The cost of saving for a training that saves every 100 steps: `python -m benchmarks.train_saving`.

It writes benchmarks/train_saving.json. For a LoRA of the demo model and for all of its weights, it contains the size of
a state, the seconds for which saving interrupts training, and their share in the time of 100 steps. "behind" saves in
the background as the trainer does. "at_once" waits until the state is complete and on the disk.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.machine import write
from sana_core.training import states
from sana_core.training.settings import Method, Validation, read_settings
from sana_core.training.trainer import train

# Steps of the measured run, its steps between two states, and the steps between two states for the computed share.
STEPS, EVERY, TOLD = 60, 10, 100


def figures_of(method: Method, cache: str) -> dict[str, Any]:
    """Train the bundled recipe with `method`. Returns the cost of saving in the background and of saving at once."""
    settings = read_settings(ROOT / "recipes" / "lora_bundled.toml")
    phase = replace(settings.phase[0], steps=STEPS)
    settings = replace(settings, phase=(phase,), method=method, validation=Validation(), save_every=EVERY, keep=1)
    begin = states.Saver.begin

    def at_once(saver: states.Saver, *values: Any) -> None:
        begin(saver, *values)
        saver.wait()

    figures: dict[str, Any] = {}
    for way, function in (("behind", begin), ("at_once", at_once)):
        states.Saver.begin = function  # type: ignore[method-assign]
        times: list[float] = []
        steps: list[float] = []

        def report(line: Any) -> None:
            times.append(time.perf_counter())  # noqa: B023
            steps.append(line["seconds"])  # noqa: B023

        try:
            with tempfile.TemporaryDirectory() as folder:
                train(replace(settings, out=folder, cache=cache), report)
                size = sum(file.stat().st_size for file in Path(folder, "steps").rglob("*") if file.is_file())
        finally:
            states.Saver.begin = begin  # type: ignore[method-assign]
        # Seconds between two steps. The minimum with and without a state, because other programs use the machine too.
        between = [after - before - step for (before, after), step in zip(pairwise(times), steps[1:], strict=True)]
        saving = min(between[number - 1] for number in range(EVERY, STEPS, EVERY)) - min(between)
        figures["state_megabytes"] = round(size / 1e6, 1)
        figures[way] = {"seconds": round(saving, 3), "share": round(saving / (saving + TOLD * min(steps)), 4)}
    return figures


def main() -> None:
    methods = {"lora": Method(rank=8, targets="both"), "full": Method("full")}
    with tempfile.TemporaryDirectory() as cache:
        figures = {name: figures_of(method, cache) for name, method in methods.items()}
    write(__file__, {"steps": STEPS, "save_every": TOLD, **figures})


if __name__ == "__main__":
    main()
