"""What a LoRA of the bundled model learns: a colour and a shape that it has never seen, and what it forgets by that.

`python benchmarks/train_lora.py [STEPS]` writes benchmarks/train_lora.json: the share of pictures of held-out
combinations that the fixed rule of demo/judge.py finds right in colour, shape and background, of new combinations
(pink, stars) and of old ones, before and after, and how long the training took on all cores. Half of the pictures that
the LoRA is trained on show what the model knows: without them it forgets that. "right_through_autoencoder" is the share
of true pictures that the rule still finds right once the model's autoencoder has encoded and decoded them: no LoRA of
the transformer can draw what that cannot.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import description  # noqa: E402
from demo.evaluate import GUIDANCE, draw  # noqa: E402
from demo.judge import judge  # noqa: E402
from demo.pictures import (  # noqa: E402
    COLOURS,
    NEW_COLOUR,
    NEW_COLOUR_RGB,
    NEW_SHAPE,
    SHAPES,
    combinations,
    draw_scene,
    prompt,
    random_caption,
    random_scene,
)

CHECKPOINT = ROOT / "demo" / "sana-tiny"
FILE = ROOT / "benchmarks" / "train_lora.json"
ALL_COLOURS, ALL_SHAPES = {**COLOURS, NEW_COLOUR: NEW_COLOUR_RGB}, (*SHAPES, NEW_SHAPE)
HELD_OUT = 32
STEPS = 800
SETTINGS = """
model = "{model}"
out = "{out}"
name = "pink-stars"
dtype = "float32"
checkpoint_gradients = false
save_every = 500

[method]
kind = "lora"
rank = 32
targets = "both"

[[phase]]
data = "{data}"
resolution = 128
batch = 32
steps = {steps}
learning_rate = 2e-3
schedule = "cosine"
warmup = 50
"""


def new_combinations() -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return (train, held_out) of all that is pink or a star on a background that the model knows."""
    every = [
        (colour, shape, background)
        for colour, shape, background in itertools.product(ALL_COLOURS, ALL_SHAPES, COLOURS)
        if colour != background and (colour == NEW_COLOUR or shape == NEW_SHAPE)
    ]
    random.Random(21).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def write_pictures(folder: Path) -> int:
    """Draw the pictures that the LoRA is trained on, with captions; return how many."""
    rng = random.Random(22)
    scenes = [random_scene(rng, each) for each in new_combinations()[0] for _ in range(6)]
    scenes += [random_scene(rng, rng.choice(combinations()[0])) for _ in scenes]
    for number, scene in enumerate(scenes):
        Image.fromarray(draw_scene(scene)).save(folder / f"{number:04d}.png")
        (folder / f"{number:04d}.txt").write_text(random_caption(rng, scene))
    return len(scenes)


def with_lora(lora: Path, folder: Path) -> Path:
    """Return a copy of the checkpoint in `folder` with the LoRA in its weights, by diffusers' own loader."""
    from diffusers import SanaTransformer2DModel
    from safetensors.torch import load_file

    shutil.copytree(CHECKPOINT, folder)
    transformer = SanaTransformer2DModel.from_pretrained(CHECKPOINT / "transformer", torch_dtype=torch.float32)
    transformer.load_lora_adapter(load_file(lora), prefix="transformer")
    transformer.fuse_lora()
    transformer.unload_lora()
    transformer.save_pretrained(folder / "transformer")
    return folder


def right(wanted: list[tuple[str, str, str]], checkpoint: Path) -> float:
    """Return the share of `wanted` that is drawn right in all three."""
    pictures = draw(checkpoint, [prompt(*each) for each in wanted], GUIDANCE)
    seen = [tuple(judge(picture, ALL_COLOURS, ALL_SHAPES)) for picture in pictures]
    return sum(one == each for one, each in zip(seen, wanted, strict=True)) / len(wanted)


def through_autoencoder(wanted: list[tuple[str, str, str]]) -> float:
    """Return the share of true pictures of `wanted` that is right after the autoencoder."""
    from sana_core.checkpoints import load_autoencoder
    from sana_core.decode import decode_latents, encode_images
    from sana_core.picture_files import levels

    autoencoder, rng, found = load_autoencoder(CHECKPOINT, torch.device("cpu"), torch.float32), random.Random(23), 0
    for each in wanted:
        pixels = torch.tensor(draw_scene(random_scene(rng, each))).movedim(-1, 0)[None] / 127.5 - 1
        picture = levels(decode_latents(autoencoder, encode_images(autoencoder, pixels))[0])
        found += tuple(judge(picture, ALL_COLOURS, ALL_SHAPES)) == each
    return found / len(wanted)


def main() -> None:
    from sana_core.training.settings import read_settings
    from sana_core.training.train import train

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    torch.set_num_threads(os.cpu_count() or 1)
    new, old = new_combinations()[1], combinations()[1]
    before = {"new": right(new, CHECKPOINT), "old": right(old, CHECKPOINT)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        pictures = write_pictures(folder / "data")
        text = SETTINGS.format(model=CHECKPOINT, out=folder / "out", data=folder / "data", steps=steps)
        (folder / "settings.toml").write_text(text)
        began = time.monotonic()
        lora = train(read_settings(folder / "settings.toml"))
        seconds = time.monotonic() - began
        learnt = with_lora(lora, folder / "learnt")
        after = {"new": right(new, learnt), "old": right(old, learnt)}
    result = {
        **description(),
        "pictures": pictures,
        "steps": steps,
        "training_seconds": round(seconds, 1),
        "held_out": {"new": len(new), "old": len(old)},
        "right_through_autoencoder": {"new": through_autoencoder(new), "old": through_autoencoder(old)},
        "right_before": before,
        "right_after": after,
    }
    FILE.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(FILE.read_text())


if __name__ == "__main__":
    main()
