"""Several resolutions mixed in one phase, compared with one phase per resolution, with the same number of steps.

`python -m benchmarks.train_sizes` writes benchmarks/train_sizes.json. It trains a LoRA of the demo model on blue
paintings, which are new to the model. WAYS are the compared schedules: 256 px, 384 px, both one after another, and both
in one phase. The figures are the losses on held-out paintings of both sizes before and after training, as means over
SEEDS runs.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.machine import write
from demo.beside import in_blue
from demo.captions import random_caption
from demo.dataset import write_dataset
from demo.painting import paint
from demo.world import Scene, training_scenes
from sana_core.training.settings import Method, Optimizer, Phase, TrainingSettings, Validation
from sana_core.training.trainer import train

SMALL, LARGE = 256, 384
STEPS, PAINTINGS, SEEDS = 200, 100, 3
RATE = 1e-3


def phase(resolution: int, steps: int, rate: float = RATE, **options: Any) -> Phase:
    return Phase(("",), resolution, batch=4, steps=steps, learning_rate=rate, schedule="cosine", warmup=10, **options)


WAYS: dict[str, tuple[Phase, ...]] = {
    "before": (),
    "small": (phase(SMALL, STEPS),),
    "large": (phase(LARGE, STEPS),),
    "phases": (phase(SMALL, STEPS // 2), phase(LARGE, STEPS // 2)),
    "mixed": (phase(LARGE, STEPS, resolutions=(SMALL,)),),
}


def cyanotype(scene: Scene) -> np.ndarray:
    return in_blue(paint(scene, LARGE, LARGE))


def settings_of(folder: Path, name: str, phases: tuple[Phase, ...], seed: int, **options: Any) -> TrainingSettings:
    phases = tuple(replace(item, data=(str(folder / "paintings"),)) for item in phases)
    return TrainingSettings(
        str(ROOT / "demo" / "sana-posters"),
        str(folder / f"{name} {seed}"),
        phases,
        name="sizes",
        seed=seed,
        dtype="float32",
        cache=str(folder / "cache"),
        checkpoint_gradients=False,
        optimizer=Optimizer(clip=1.0),
        **options,
    )


def loss_at(resolution: int, folder: Path, name: str, seed: int, lora: str) -> float:
    """Return the loss on the held-out paintings at `resolution`. It trains `lora` for one step at rate 0."""
    lines: list[Any] = []
    method = Method(rank=8, targets="both", start=lora)
    settings = settings_of(
        folder,
        f"{name} at {resolution}",
        (phase(resolution, 1, 0.0),),
        seed,
        method=method,
        validation=Validation(1, 0.2),
    )
    train(settings, lines.append)
    return next(line["validation_loss"] for line in lines if "validation_loss" in line)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), random.Random("sizes")
        scenes = islice(training_scenes(rng), PAINTINGS)
        write_dataset(folder / "paintings", scenes, rng, cyanotype, random_caption)
        figures: dict[str, dict[str, float]] = {}
        for way, phases in WAYS.items():
            losses = []
            for seed in range(SEEDS):
                method, held_out = Method(rank=8, targets="both"), Validation(0, 0.2)
                settings = settings_of(folder, way, phases, seed, method=method, validation=held_out)
                lora = str(train(settings)) if phases else ""
                losses.append([loss_at(resolution, folder, way, seed, lora) for resolution in (SMALL, LARGE)])
            means = [round(sum(seed_losses) / SEEDS, 4) for seed_losses in zip(*losses, strict=True)]
            figures[way] = dict(zip((f"loss at {SMALL}", f"loss at {LARGE}"), means, strict=True))
            sys.stderr.write(f"{way}: {figures[way]}\n")
    write(__file__, {"steps": STEPS, "seeds": SEEDS, "ways": figures})


if __name__ == "__main__":
    main()
