"""Trains the judge, a small network that recognises time, place, style, kinds, numbers and colours in an image.

It is trained only on paintings. `python -m demo.judge` writes judge.safetensors and judge.json. The latter contains the
judge's score on paintings that training did not show, and the distance between two sets of them in its features. Train
the judge before the model that it judges.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from .layout import Placed, boxes_of
from .painting import paint, paint_placed
from .steps import take_step
from .world import (
    ALL_COLOURS,
    ALL_KINDS,
    GROUPINGS,
    PLACES,
    SIZES,
    STYLES,
    TIMES,
    Scene,
    all_combinations,
    scene_of,
)

FILE = Path(__file__).parent / "judge.safetensors"
COLOURS = tuple(ALL_COLOURS)
# The judge receives images that are this many times smaller.
SMALLER = 4
WIDTHS = (24, 48, 96, 160)
# Pixels of the original image per position of the last map.
CELL = SMALLER * 2 ** len(WIDTHS)
POOL, STEPS, BATCH, LEARNING_RATE = 4000, 2500, 32, 3e-3
TESTED = 1024


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, 1, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Judge(nn.Module):
    """Returns logits for images [B, 3, H / 4, W / 4] in [0, 1].

    The logits are for time, place and style, for the centres of subjects of each kind in cells of 64 pixels, and for
    the colour of each kind.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip((3, *WIDTHS[:-1]), WIDTHS, strict=True):
            layers += [nn.Conv2d(before, width, 3, 2, 1), nn.GroupNorm(8, width), nn.SiLU(), Residual(width)]
        self.features = nn.Sequential(*layers)
        width = WIDTHS[-1]
        # The name is in the saved file.
        self.whole = nn.Linear(2 * width, len(TIMES) + len(PLACES) + len(STYLES))
        self.middles = nn.Conv2d(width, len(ALL_KINDS), 1)
        # Few cells contain a centre.
        nn.init.constant_(self.middles.bias, -5.0)
        self.colours = nn.Linear(width, len(ALL_KINDS) * len(COLOURS))

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logits [B, 12] of the scene, [B, K, h, w] of centres per kind, and [B, K, C] of their colours."""
        maps = self.features(pictures * 2 - 1)
        middles, features = self.middles(maps), maps.flatten(2)
        # The colour of a kind is computed from the features at its centres.
        share = middles.sigmoid().flatten(2)
        at = torch.einsum("bkp,bcp->bkc", share / (share.sum(-1, keepdim=True) + 1e-6), features)
        weight = self.colours.weight.view(len(ALL_KINDS), len(COLOURS), -1)
        colours = torch.einsum("bkc,knc->bkn", at, weight) + self.colours.bias.view(len(ALL_KINDS), -1)
        scene = self.whole(torch.cat([features.mean(-1), features.amax(-1)], 1))
        return scene, middles, colours


def shrink(pictures: np.ndarray) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> float [B, 3, H / 4, W / 4] in [0, 1]."""
    return functional.avg_pool2d(torch.from_numpy(pictures).movedim(-1, 1).float() / 255, SMALLER)


def shrunk(pictures: np.ndarray) -> Iterator[torch.Tensor]:
    """Yield shrunk images, 64 at a time, because thousands of images in float would need many GB."""
    yield from (shrink(pictures[start : start + 64]) for start in range(0, len(pictures), 64))


def targets(scenes: list[Scene]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return indices [N, 3] of time, place and style, and [N, K] the number and the colour of each kind.

    The colour of an absent kind is -100, which cross_entropy ignores.
    """
    attributes = [[TIMES.index(s.time), PLACES.index(s.place), STYLES.index(s.style)] for s in scenes]
    shape = (len(scenes), len(ALL_KINDS))
    numbers, colours = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    for i, scene in enumerate(scenes):
        for group in scene.groups:
            kind = ALL_KINDS.index(group.kind)
            numbers[i, kind], colours[i, kind] = group.count, COLOURS.index(group.colour)
    return torch.tensor(attributes), numbers, colours


def cells(things: list[Placed], width: int, height: int) -> torch.Tensor:
    """Return [K, height / 64, width / 64], which is 1 in the cells with the centre of a subject of the kind."""
    centres = torch.zeros(len(ALL_KINDS), height // CELL, width // CELL)
    for subject in things:
        lefts, tops, rights, bottoms = zip(*boxes_of(subject), strict=True)
        x, y = (min(lefts) + max(rights)) / 2, (min(tops) + max(bottoms)) / 2
        centres[ALL_KINDS.index(subject.kind), int(y * height) // CELL, int(x * height) // CELL] = 1
    return centres


def judge_loss(model: Judge, pictures: torch.Tensor, labels: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the loss. `labels` are the results of `targets` and of `cells`.

    Numbers have no loss term. The judge counts the centres.
    """
    scene, middles, colours = model(pictures)
    parts = scene.split([len(TIMES), len(PLACES), len(STYLES)], 1)
    loss = sum(functional.cross_entropy(part, labels[0][:, i]) for i, part in enumerate(parts))
    loss = loss + functional.binary_cross_entropy_with_logits(middles, labels[3], reduction="sum") / len(pictures)
    return loss + functional.cross_entropy(colours.flatten(0, 1), labels[2].flatten())


def soften(pictures: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Blur, change the brightness and add noise, because a model's images may differ from paintings in this way."""
    if rng.random() < 0.6:
        size, share = pictures.shape[-2:], rng.uniform(0.4, 1.0)
        small = functional.interpolate(pictures, [round(share * side) for side in size], mode="area")
        pictures = functional.interpolate(small, size, mode="bilinear")
    return pictures * rng.uniform(0.94, 1.06) + rng.uniform(0, 0.03) * torch.randn_like(pictures)


def scenes_to_judge(rng: random.Random) -> Iterator[Scene]:
    """Yield an endless sequence of scenes of all combinations, including those that the model is never trained on."""
    every, groupings = all_combinations(ALL_KINDS, ALL_COLOURS), list(GROUPINGS)
    while True:
        counts = rng.choices(groupings, list(GROUPINGS.values()))[0]
        yield scene_of(rng, rng.choice(every), counts, ALL_KINDS, COLOURS)


def train() -> Judge:
    """Train on paintings of all sizes."""
    torch.manual_seed(7)
    rng, model = random.Random(7), Judge()
    pools = []
    for size in SIZES:
        scenes = list(islice(scenes_to_judge(rng), POOL))
        painted = [paint_placed(scene, *size) for scene in scenes]
        small = torch.cat([(shrink(picture[None]) * 255).round().byte() for picture, _ in painted])
        pools.append((small, (*targets(scenes), torch.stack([cells(things, *size) for _, things in painted]))))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        pool, labels = rng.choice(pools)
        pick = torch.randint(POOL, (BATCH,))
        loss = judge_loss(model, soften(pool[pick].float() / 255, rng), tuple(part[pick] for part in labels))
        take_step(model, optimizer, schedule, loss)
        if step % 20 == 0:
            sys.stderr.write(f"judge {step} loss {loss.item():.4f}\n")
    return model.train(False)


def load() -> Judge:
    model = Judge()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(FILE).items()})
    return model.train(False)


@torch.no_grad()
def score(model: Judge, pictures: np.ndarray, scenes: list[Scene]) -> dict[str, float]:
    """Return the share of `pictures`, uint8 [N, H, W, 3], that are right about each property of their scenes.

    `subject`: all kinds are present. `number`: the number of each kind is right, and there are no other kinds.
    `colour`: the colours of all kinds are right. `scene`: time, place, style and subject are right. `all`: everything
    is right.
    """
    judged = zip(*map(model, shrunk(pictures)), strict=True)
    scene, middles, colours = (torch.cat(part) for part in judged)
    labels, count, colour = targets(scenes)
    parts = scene.split([len(TIMES), len(PLACES), len(STYLES)], 1)
    right = {
        name: part.argmax(1) == labels[:, i]
        for i, (name, part) in enumerate(zip(("time", "place", "style"), parts, strict=True))
    }
    seen, absent = middles.sigmoid().sum((2, 3)).round(), count == 0
    right["subject"] = ((seen > 0) | absent).all(1)
    right["number"] = (seen == count).all(1)
    right["colour"] = ((colours.argmax(-1) == colour) | absent).all(1)
    right["scene"] = right["time"] & right["place"] & right["style"] & right["subject"]
    right["all"] = right["scene"] & right["number"] & right["colour"]
    return {name: round(share.float().mean().item(), 4) for name, share in right.items()}


@torch.no_grad()
def features(model: Judge, pictures: np.ndarray) -> np.ndarray:
    """Return the features [N, 160] of `pictures`, uint8 [N, H, W, 3]."""
    return torch.cat([model.features(part * 2 - 1).mean((2, 3)) for part in shrunk(pictures)]).numpy()


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Frechet distance between two sets of features, divided by the variance of the first set.

    Heusel et al., 2017, "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium".
    """
    a, b = (np.cov(values, rowvar=False) for values in (one, other))
    # The trace of the square root of a b. The eigenvalues of a b are real and not negative.
    root = np.sqrt(np.linalg.eigvals(a @ b).real.clip(0)).sum()
    apart = np.square(one.mean(0) - other.mean(0)).sum() + np.trace(a) + np.trace(b) - 2 * root
    return float(apart / np.trace(a))


def main() -> None:
    # Round the weights as in the saved file.
    model = train().half().float()
    save_file({name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}, FILE)
    scenes = list(islice(scenes_to_judge(random.Random("held out")), 2 * TESTED))
    paintings = np.stack([paint(scene) for scene in scenes])
    result = {"paintings": len(scenes), **score(model, paintings, scenes)}
    for width, height in SIZES[1:]:
        pictures = np.stack([paint(scene, width, height) for scene in scenes[:TESTED]])
        result[f"{width}x{height}"] = score(model, pictures, scenes[:TESTED])
    painting_features = features(model, paintings)
    two_sets = painting_features[:TESTED], painting_features[TESTED:]
    result["distance of two sets"] = round(distance(*two_sets), 5)
    FILE.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stderr.write(f"{result}\n")


if __name__ == "__main__":
    main()
