"""The cases in which one file is drawn in every way that there is, and the ways that need no ComfyUI.

Each way is compared with SANA Sampler on the canvas, `batch` and a cluster with `generate`, three parts of a picture
with two. Printed is the largest difference of images in [0, 1], which benchmarks/ways.py writes down.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from setup import ROOT

import sana_core
from sana_core.__main__ import main

# the least width at which the parts of a shared picture have equal bits
WIDTH, HEIGHT, SEED = 512, 128, 3
# Ways that round differently. All other ways give equal bits.
NEAR = ("KSampler", "generate --split")
BOUND = 1e-4
PROMPT = "a flat drawing of a blue house in the Snow at night, --ar 2:1"
POSTERS = ROOT / "demo" / "sana-posters"
REFERENCES = ("diffusers", "nvidia")


class Case(NamedTuple):
    """Settings of one image. A way without one of these settings returns None."""

    name: str
    prompt: str = PROMPT
    negative: str = ""
    sampler: str = "flow_dpmpp_2m"
    steps: int = 4
    pag: float = 0.0
    sprint: bool = False
    control: bool = False


CASES = [
    Case("a prompt"),
    Case("a prompt, flow_euler", sampler="flow_euler"),
    Case("an empty prompt, flow_euler", "", sampler="flow_euler"),
    Case("a prompt of 500 words, flow_euler", "a small Red boat " * 125, sampler="flow_euler"),
    Case("a negative prompt, flow_euler", negative=" Blurry, many boats ", sampler="flow_euler"),
    Case("perturbed attention, flow_euler", pag=2.0, sampler="flow_euler"),
    Case("SANA-Sprint, scm", sampler="scm", steps=2, sprint=True),
    Case("a ControlNet, flow_euler", sampler="flow_euler", control=True),
]


def options(case: Case, reference: str) -> dict[str, Any]:
    """Options of `sana_core.generate` in addition to prompts and checkpoint."""
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "steps": case.steps,
        "guidance": 4.5,
        "negative_prompt": case.negative,
        "sampler": case.sampler,
        "pag_scale": case.pag,
        "reference": reference,
        "seed": SEED,
    }


def check(way: str, case: Case, reference: str, image: Any, expected: Any) -> None:
    """Print how far the image is from the expected one. Raises AssertionError where the way promises less."""
    difference = float(abs(image - expected).max())
    sys.stdout.write(f"\n{way} | {case.name} | {reference}: {difference:.1e}\n")
    assert difference <= (BOUND if way in NEAR else 0.0)


def generated(case: Case, reference: str, checkpoint: Path, **where) -> torch.Tensor:
    """The image [3, H, W] in [-1, 1] of `generate`, which has no ControlNet."""
    return sana_core.generate([case.prompt], checkpoint, **options(case, reference), **where)[0]


def as_image(picture: torch.Tensor) -> torch.Tensor:
    """[3, H, W] in [-1, 1] as the canvas has it, [H, W, 3] in [0, 1]."""
    return (picture.movedim(0, -1) + 1) / 2


def batched(case: Case, reference: str, checkpoint: Path, folder: Path) -> np.ndarray:
    """The levels [H, W, 3] in the file of the command `batch`, whose prompts are not empty."""
    folder.mkdir()
    file = folder / "prompts.txt"
    file.write_text(case.prompt)
    words = {name.replace("_", "-"): value for name, value in options(case, reference).items() if value != ""}
    main(
        ["batch", str(file), "--checkpoint", str(checkpoint), "--out", str(folder / "out")]
        + [f"--{name}={value}" for name, value in words.items()]
    )
    (png,) = (folder / "out").glob("*.png")
    return np.asarray(Image.open(png))
