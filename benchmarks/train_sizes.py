"""Several resolutions mixed in one phase against phases one after another, at the same number of steps.

`python -m benchmarks.train_sizes` writes benchmarks/train_sizes.json: a LoRA of the demo model on paintings in blue
alone, which it does not know, at 256 px, at 384 px, first at the one and then at the other, and at both in one phase;
the loss before, and of each, on held-out paintings of either size, the mean of SEEDS runs.
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


def phase(resolution: int, steps: int, rate: float = RATE, **own: Any) -> Phase:
    return Phase(("",), resolution, batch=4, steps=steps, learning_rate=rate, schedule="cosine", warmup=10, **own)


WAYS: dict[str, tuple[Phase, ...]] = {
    "before": (),
    "small": (phase(SMALL, STEPS),),
    "large": (phase(LARGE, STEPS),),
    "phases": (phase(SMALL, STEPS // 2), phase(LARGE, STEPS // 2)),
    "mixed": (phase(LARGE, STEPS, resolutions=(SMALL,)),),
}


def cyanotype(scene: Scene) -> np.ndarray:
    return in_blue(paint(scene, LARGE, LARGE))


def settings_of(folder: Path, name: str, phases: tuple[Phase, ...], seed: int, **own: Any) -> TrainingSettings:
    phases = tuple(replace(each, data=(str(folder / "paintings"),)) for each in phases)
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
        **own,
    )


def loss_at(resolution: int, folder: Path, name: str, seed: int, lora: str) -> float:
    """Return the loss of the held-out paintings at `resolution`, of a run that goes on from `lora` at rate 0."""
    lines: list[Any] = []
    method = Method(rank=8, targets="both", start=lora)
    own = settings_of(
        folder,
        f"{name} at {resolution}",
        (phase(resolution, 1, 0.0),),
        seed,
        method=method,
        validation=Validation(1, 0.2),
    )
    train(own, lines.append)
    return next(line["validation_loss"] for line in lines if "validation_loss" in line)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), random.Random("sizes")
        scenes = islice(training_scenes(rng), PAINTINGS)
        write_dataset(folder / "paintings", scenes, rng, cyanotype, random_caption)
        found: dict[str, dict[str, float]] = {}
        for way, phases in WAYS.items():
            losses = []
            for seed in range(SEEDS):
                method, held_out = Method(rank=8, targets="both"), Validation(0, 0.2)
                own = settings_of(folder, way, phases, seed, method=method, validation=held_out)
                lora = str(train(own)) if phases else ""
                losses.append([loss_at(each, folder, way, seed, lora) for each in (SMALL, LARGE)])
            means = [round(sum(each) / SEEDS, 4) for each in zip(*losses, strict=True)]
            found[way] = dict(zip((f"loss at {SMALL}", f"loss at {LARGE}"), means, strict=True))
            sys.stderr.write(f"{way}: {found[way]}\n")
    write(__file__, {"steps": STEPS, "seeds": SEEDS, "ways": found})


if __name__ == "__main__":
    main()
