"""What says which time, place, style, and how many subjects of which kind and colour a picture shows: a small network
that only saw paintings.

`python -m demo.judge` trains it, before the model that it judges, and writes judge.safetensors and judge.json,
its score on paintings that it never saw, and how far two sets of these lie apart in its features.
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
# a picture is looked at this many times smaller
SMALLER = 4
WIDTHS = (24, 48, 96, 160)
# pixels of the whole picture, of one position of the last map
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
    """For pictures [B, 3, H / 4, W / 4] in [0, 1]: logits of time, place and style, of where the middles of subjects of
    each kind are, in cells of 64 pixels, and of their colour."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip((3, *WIDTHS[:-1]), WIDTHS, strict=True):
            layers += [nn.Conv2d(before, width, 3, 2, 1), nn.GroupNorm(8, width), nn.SiLU(), Residual(width)]
        self.features = nn.Sequential(*layers)
        width = WIDTHS[-1]
        self.whole = nn.Linear(2 * width, len(TIMES) + len(PLACES) + len(STYLES))
        self.middles = nn.Conv2d(width, len(ALL_KINDS), 1)
        # few cells hold one
        nn.init.constant_(self.middles.bias, -5.0)
        self.colours = nn.Linear(width, len(ALL_KINDS) * len(COLOURS))

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [B, 12] of the whole, [B, K, h, w] of the middles of each kind, and [B, K, C] of its colour."""
        maps = self.features(pictures * 2 - 1)
        middles, features = self.middles(maps), maps.flatten(2)
        # a kind's colour is looked up where the kind is
        share = middles.sigmoid().flatten(2)
        at = torch.einsum("bkp,bcp->bkc", share / (share.sum(-1, keepdim=True) + 1e-6), features)
        weight = self.colours.weight.view(len(ALL_KINDS), len(COLOURS), -1)
        colours = torch.einsum("bkc,knc->bkn", at, weight) + self.colours.bias.view(len(ALL_KINDS), -1)
        whole = self.whole(torch.cat([features.mean(-1), features.amax(-1)], 1))
        return whole, middles, colours


def shrink(pictures: np.ndarray) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> float [B, 3, H / 4, W / 4] in [0, 1]."""
    return functional.avg_pool2d(torch.from_numpy(pictures).movedim(-1, 1).float() / 255, SMALLER)


def shrunk(pictures: np.ndarray) -> Iterator[torch.Tensor]:
    """Yield `pictures` made small, 64 at a time: thousands as floats would be many GB."""
    yield from (shrink(pictures[start : start + 64]) for start in range(0, len(pictures), 64))


def targets(scenes: list[Scene]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [N, 3] of time, place and style, [N, K] of the number of each kind, and [N, K] of their colours, -100 for
    kinds that are not there."""
    whole = [[TIMES.index(s.time), PLACES.index(s.place), STYLES.index(s.style)] for s in scenes]
    shape = (len(scenes), len(ALL_KINDS))
    numbers, colours = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    for i, scene in enumerate(scenes):
        for group in scene.groups:
            kind = ALL_KINDS.index(group.kind)
            numbers[i, kind], colours[i, kind] = group.count, COLOURS.index(group.colour)
    return torch.tensor(whole), numbers, colours


def cells(things: list[Placed], width: int, height: int) -> torch.Tensor:
    """Return [K, height / 64, width / 64], 1 where a subject of the kind has its middle in a picture of that size."""
    found = torch.zeros(len(ALL_KINDS), height // CELL, width // CELL)
    for what in things:
        lefts, tops, rights, bottoms = zip(*boxes_of(what), strict=True)
        x, y = (min(lefts) + max(rights)) / 2, (min(tops) + max(bottoms)) / 2
        found[ALL_KINDS.index(what.kind), int(y * height) // CELL, int(x * height) // CELL] = 1
    return found


def judge_loss(model: Judge, pictures: torch.Tensor, wanted: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the loss for what `targets` and `cells` say of the pictures: numbers are learnt by where things stand."""
    whole, middles, colours = model(pictures)
    parts = whole.split([len(TIMES), len(PLACES), len(STYLES)], 1)
    loss = sum(functional.cross_entropy(part, wanted[0][:, i]) for i, part in enumerate(parts))
    loss = loss + functional.binary_cross_entropy_with_logits(middles, wanted[3], reduction="sum") / len(pictures)
    return loss + functional.cross_entropy(colours.flatten(0, 1), wanted[2].flatten())


def soften(pictures: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Blur, move the brightness and add noise, as a model's pictures may have them and paintings have not."""
    if rng.random() < 0.6:
        size, share = pictures.shape[-2:], rng.uniform(0.4, 1.0)
        small = functional.interpolate(pictures, [round(share * side) for side in size], mode="area")
        pictures = functional.interpolate(small, size, mode="bilinear")
    return pictures * rng.uniform(0.94, 1.06) + rng.uniform(0, 0.03) * torch.randn_like(pictures)


def scenes_to_judge(rng: random.Random) -> Iterator[Scene]:
    """Yield scenes of all combinations for ever: what the model must not see in training, its judge must know."""
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
        pool, wanted = rng.choice(pools)
        pick = torch.randint(POOL, (BATCH,))
        loss = judge_loss(model, soften(pool[pick].float() / 255, rng), tuple(part[pick] for part in wanted))
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
    """Return the share of `pictures`, uint8 [N, H, W, 3], that show what each of `scenes` says.

    `subject`: all its kinds are there; `number`: as many of each as wanted, and no other; `colour`: all have theirs.
    `scene` is the share with time, place, style and subject right together, `all` that with number and colour too.
    """
    judged = zip(*map(model, shrunk(pictures)), strict=True)
    whole, middles, colours = (torch.cat(part) for part in judged)
    wanted, count, colour = targets(scenes)
    parts = whole.split([len(TIMES), len(PLACES), len(STYLES)], 1)
    right = {
        name: part.argmax(1) == wanted[:, i]
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
    """Return [N, 160] of `pictures`, uint8 [N, H, W, 3]."""
    return torch.cat([model.features(part * 2 - 1).mean((2, 3)) for part in shrunk(pictures)]).numpy()


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Frechet distance between two sets of features (Heusel et al., 2017, "GANs Trained by a Two Time-Scale
    Update Rule Converge to a Local Nash Equilibrium"), over the mean variance, so that no scale matters."""
    a, b = (np.cov(each, rowvar=False) for each in (one, other))
    # the trace of the root of a b, whose eigenvalues are real and not below 0
    root = np.sqrt(np.linalg.eigvals(a @ b).real.clip(0)).sum()
    apart = np.square(one.mean(0) - other.mean(0)).sum() + np.trace(a) + np.trace(b) - 2 * root
    return float(apart / np.trace(a))


def main() -> None:
    model = train().half().float()  # as it is kept
    save_file({name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}, FILE)
    scenes = list(islice(scenes_to_judge(random.Random("held out")), 2 * TESTED))
    paintings = np.stack([paint(scene) for scene in scenes])
    result = {"paintings": len(scenes), **score(model, paintings, scenes)}
    for width, height in SIZES[1:]:
        pictures = np.stack([paint(scene, width, height) for scene in scenes[:TESTED]])
        result[f"{width}x{height}"] = score(model, pictures, scenes[:TESTED])
    found = features(model, paintings)
    result["distance of two sets"] = round(distance(found[:TESTED], found[TESTED:]), 5)
    FILE.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stderr.write(f"{result}\n")


if __name__ == "__main__":
    main()
