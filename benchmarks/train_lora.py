"""What a LoRA of the demo model learns, a subject and a colour that it has never seen, and what it forgets by that.

`python -m benchmarks.train_lora FOLDER` writes benchmarks/train_lora.json: the shares of images of held-out
combinations that the judge in demo/ accepts, of new combinations (windmills, turquoise things) and of
old ones, before and after, means of four seeds: "beside" regularisation images that show what the model knows, and
"alone", without them, in the steps that show as many new paintings. It works in FOLDER, and resumes there.
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
HELD_OUT = 96  # combinations that are drawn and judged, of new ones and of old ones
PAINTINGS = {"new": 900, "old": 300}  # what the LoRA learns
STEPS = {"beside": 2100, "alone": 1050}  # half of what is learned beside is old
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
    """Return (train, held out) of all that is a windmill or turquoise."""
    every = [
        each for each in all_combinations(ALL_KINDS, ALL_COLOURS) if each.kind == NEW_KIND or each.colour == NEW_COLOUR
    ]
    random.Random(21).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def write_paintings(folder: Path) -> None:
    """Paint what the LoRA is trained on, and beside."""
    rng = random.Random(22)
    scenes = [scene_of(rng, rng.choice(new_combinations()[0])) for _ in range(PAINTINGS["new"])]
    write_dataset(folder / "new", scenes, rng, small, random_caption)
    write_dataset(folder / "old", islice(training_scenes(rng), PAINTINGS["old"]), rng, small, random_caption)


def with_lora(lora: Path, folder: Path) -> Path:
    """Return a copy of the checkpoint in `folder` with the LoRA in its weights, by diffusers' own loader."""
    from diffusers import SanaTransformer2DModel
    from safetensors.torch import load_file

    shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
    transformer = SanaTransformer2DModel.from_pretrained(CHECKPOINT / "transformer", torch_dtype=torch.float32)
    transformer.load_lora_adapter(load_file(lora), prefix="transformer")
    transformer.fuse_lora()
    transformer.unload_lora()
    transformer.save_pretrained(folder / "transformer")
    return folder


def right(wanted: list[Scene], checkpoint: Path) -> dict[str, float]:
    """Return the shares of `wanted` that are drawn right, means of SEEDS seeds."""
    judge, prompts = load(), [prompt_of(each) for each in wanted]
    drawn = (draw(checkpoint, prompts, guidance=GUIDANCE, seed=1000 * seed) for seed in range(SEEDS))
    return mean_score([score(judge, pictures, wanted) for pictures in drawn])


def main() -> None:
    from sana_core.training.settings_file import read_settings
    from sana_core.training.trainer import train

    folder = Path(sys.argv[1])
    if not (folder / "old").exists():
        write_paintings(folder)
    rng = random.Random(23)
    held_out = {"new": new_combinations()[1], "old": combinations()[1][:HELD_OUT]}
    asked = {which: [scene_of(rng, each) for each in wanted] for which, wanted in held_out.items()}
    kept = folder / "train_lora.json"
    document: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}

    def judge(name: str, checkpoint: Path) -> None:
        """Put the scores of both into the document, where they are not there yet."""
        if name not in document:
            document[name] = {which: right(wanted, checkpoint) for which, wanted in asked.items()}
            kept.write_text(json.dumps(document))

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
