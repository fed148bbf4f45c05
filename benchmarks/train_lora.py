"""A LoRA teaches the demo model a new subject and a new colour. How well does it learn, and how much does it forget?

`python -m benchmarks.train_lora FOLDER` writes benchmarks/train_lora.json. It contains the shares of images that the
judge in demo/ accepts, for held-out new combinations (windmills, turquoise subjects) and for old ones, before and after
the training, as means over four seeds. "beside" trains with regularisation images of old combinations. "alone" trains
without them, with the same number of new paintings. The benchmark works in FOLDER and resumes there.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.machine import write
from demo.beside import small
from demo.captions import random_caption
from demo.dataset import write_dataset
from demo.evaluate import GUIDANCE, SEEDS, draw, mean_score, prompt_of
from demo.judge import load, score
from demo.world import (
    ALL_COLOURS,
    ALL_KINDS,
    NEW_COLOUR,
    NEW_KIND,
    Combination,
    Scene,
    all_combinations,
    combinations,
    scene_of,
    training_scenes,
)

CHECKPOINT = ROOT / "demo" / "sana-posters"
# Number of new combinations and of old combinations that are judged.
HELD_OUT = 96
# Number of training images.
PAINTINGS = {"new": 900, "old": 300}
# Half of the images in the steps of "beside" are old.
STEPS = {"beside": 2100, "alone": 1050}
SETTINGS = """
model = "{model}"
out = "{out}"
name = "turquoise-windmills"
dtype = "bfloat16"
checkpoint_gradients = false
save_every = 100
keep = 1

[method]
kind = "lora"
rank = 32
targets = "both"

[optimizer]
clip = 1.0

[[phase]]
data = "{data}"
regularisation = {regularisation}
resolution = 256
batch = 16
steps = {steps}
learning_rate = 1.5e-3
schedule = "cosine"
warmup = 50
"""


def new_combinations() -> tuple[list[Combination], list[Combination]]:
    """Return (train, held out) of all combinations with windmills or turquoise."""
    new = [
        item for item in all_combinations(ALL_KINDS, ALL_COLOURS) if item.kind == NEW_KIND or item.colour == NEW_COLOUR
    ]
    random.Random(21).shuffle(new)
    return new[HELD_OUT:], new[:HELD_OUT]


def write_paintings(folder: Path) -> None:
    """Paint the training images and the regularisation images."""
    rng = random.Random(22)
    scenes = [scene_of(rng, rng.choice(new_combinations()[0])) for _ in range(PAINTINGS["new"])]
    write_dataset(folder / "new", scenes, rng, small, random_caption)
    write_dataset(folder / "old", islice(training_scenes(rng), PAINTINGS["old"]), rng, small, random_caption)


def with_lora(lora: Path, folder: Path) -> Path:
    """Copy the checkpoint to `folder` with the LoRA merged into its weights by diffusers. Returns `folder`."""
    from diffusers import SanaTransformer2DModel
    from safetensors.torch import load_file

    shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
    transformer = SanaTransformer2DModel.from_pretrained(CHECKPOINT / "transformer", torch_dtype=torch.float32)
    transformer.load_lora_adapter(load_file(lora), prefix="transformer")
    transformer.fuse_lora()
    transformer.unload_lora()
    transformer.save_pretrained(folder / "transformer")
    return folder


def right(scenes: list[Scene], checkpoint: Path) -> dict[str, float]:
    """Return the shares of `scenes` whose images are right, as means over SEEDS seeds."""
    judge, prompts = load(), [prompt_of(scene) for scene in scenes]
    batches = (draw(checkpoint, prompts, guidance=GUIDANCE, seed=1000 * seed) for seed in range(SEEDS))
    return mean_score([score(judge, images, scenes) for images in batches])


def main() -> None:
    from sana_core.training.settings import read_settings
    from sana_core.training.trainer import train

    folder = Path(sys.argv[1])
    if not (folder / "old").exists():
        write_paintings(folder)
    rng = random.Random(23)
    held_out = {"new": new_combinations()[1], "old": combinations()[1][:HELD_OUT]}
    scenes = {age: [scene_of(rng, item) for item in items] for age, items in held_out.items()}
    progress = folder / "train_lora.json"
    document: dict[str, Any] = json.loads(progress.read_text()) if progress.exists() else {}

    def judge(name: str, checkpoint: Path) -> None:
        """Score `checkpoint` on new and old scenes, unless the document already contains the scores."""
        if name not in document:
            document[name] = {age: right(age_scenes, checkpoint) for age, age_scenes in scenes.items()}
            progress.write_text(json.dumps(document))

    for way, regularisation in (("beside", [str(folder / "old")]), ("alone", [])):
        text = SETTINGS.format(
            model=CHECKPOINT, out=folder / way, data=folder / "new", regularisation=regularisation, steps=STEPS[way]
        )
        (folder / f"{way}.toml").write_text(text)
        lora = train(read_settings(folder / f"{way}.toml"))
        judge(way, with_lora(lora, folder / f"{way} learnt"))
    judge("right_before", CHECKPOINT)
    facts = {"paintings": PAINTINGS, "steps": STEPS, "held_out": HELD_OUT, "seeds": SEEDS}
    write(__file__, {**facts, **document})


if __name__ == "__main__":
    main()
