"""What says which time, place, style, subject and colour a picture shows: a small network that only saw paintings.

`python -m demo.scenes.judge` trains it, before the model that it judges, and writes judge.safetensors and judge.json,
its score on paintings that it never saw. `python -m demo.scenes.judge judge_wide` does so with another one, which also
knows what a LoRA learns.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from ..step import take_step
from .painting import paint
from .world import (
    ALL_COLOURS,
    ALL_KINDS,
    COLOURS,
    KINDS,
    PIXELS,
    PLACES,
    STYLES,
    TIMES,
    Combination,
    Scene,
    all_combinations,
    scene_of,
)

HERE = Path(__file__).parent
JUDGE, WIDE = "judge", "judge_wide"
SIDE = 128  # it looks at pictures made this small
WIDTHS = (24, 48, 96, 160)
POOL, STEPS, BATCH, LEARNING_RATE = 12_000, 3000, 32, 3e-3
TESTED = 1000


class Known(NamedTuple):
    """The subjects and colours that a judge tells apart."""

    kinds: tuple[str, ...]
    colours: tuple[str, ...]


KNOWN = {JUDGE: Known(KINDS, tuple(COLOURS)), WIDE: Known(ALL_KINDS, tuple(ALL_COLOURS))}


class Judge(nn.Module):
    """For pictures [B, 3, 128, 128] in [0, 1]: logits of time, place and style, of each kind, and of its colour."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self.known = known
        layers: list[nn.Module] = []
        for before, width in zip((3, *WIDTHS[:-1]), WIDTHS, strict=True):
            layers += [nn.Conv2d(before, width, 3, 2, 1), nn.GroupNorm(8, width), nn.SiLU(), Residual(width)]
        self.features = nn.Sequential(*layers)
        width = WIDTHS[-1]
        self.whole = nn.Linear(2 * width, len(TIMES) + len(PLACES) + len(STYLES))
        self.kinds = nn.Conv2d(width, len(known.kinds), 1)
        self.colours = nn.Linear(width, len(known.kinds) * len(known.colours))

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [B, 12] of the whole, [B, K] of the kinds, and [B, K, C] of their colours."""
        features = self.features(pictures * 2 - 1).flatten(2)
        maps = self.kinds(features[..., None])[..., 0]
        # a kind's colour is looked up where the kind is
        where = maps.softmax(-1)
        at = torch.einsum("bkp,bcp->bkc", where, features)
        weight = self.colours.weight.view(len(self.known.kinds), len(self.known.colours), -1)
        colours = torch.einsum("bkc,knc->bkn", at, weight) + self.colours.bias.view(len(self.known.kinds), -1)
        whole = self.whole(torch.cat([features.mean(-1), features.amax(-1)], 1))
        return whole, maps.amax(-1), colours


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, 1, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def shrink(pictures: np.ndarray) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> float [B, 3, 128, 128] in [0, 1]."""
    pixels = torch.from_numpy(pictures).movedim(-1, 1).float() / 255
    return functional.interpolate(pixels, (SIDE, SIDE), mode="area")


def targets(scenes: list[Scene], known: Known) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [N, 3] of time, place and style, [N, K] of the kinds that are there, and [N, K] of their colours."""
    whole = [[TIMES.index(s.time), PLACES.index(s.place), STYLES.index(s.style)] for s in scenes]
    there, colours = torch.zeros(len(scenes), len(known.kinds)), torch.full((len(scenes), len(known.kinds)), -100)
    for i, scene in enumerate(scenes):
        for what in scene.subjects:
            there[i, known.kinds.index(what.kind)] = 1
            colours[i, known.kinds.index(what.kind)] = known.colours.index(what.colour)
    return torch.tensor(whole), there, colours


def judge_loss(model: Judge, pictures: torch.Tensor, wanted: tuple[torch.Tensor, ...]) -> torch.Tensor:
    whole, kinds, colours = model(pictures)
    parts = whole.split([len(TIMES), len(PLACES), len(STYLES)], 1)
    loss = sum(functional.cross_entropy(part, wanted[0][:, i]) for i, part in enumerate(parts))
    loss = loss + len(model.known.kinds) * functional.binary_cross_entropy_with_logits(kinds, wanted[1])
    return loss + functional.cross_entropy(colours.flatten(0, 1), wanted[2].flatten())


def soften(pictures: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Blur, move the brightness and add noise, as a model's pictures may have them and paintings have not."""
    if rng.random() < 0.6:
        side = rng.randint(SIDE * 3 // 8, SIDE)
        small = functional.interpolate(pictures, (side, side), mode="area")
        pictures = functional.interpolate(small, (SIDE, SIDE), mode="bilinear")
    return pictures * rng.uniform(0.94, 1.06) + rng.uniform(0, 0.03) * torch.randn_like(pictures)


def scenes_to_judge(rng: random.Random, count: int, subjects: tuple[int, ...], known: Known) -> list[Scene]:
    """Return scenes of all combinations: what the model must not see in training, its judge must know."""
    every = all_combinations(*known)
    return [scene_of(rng, rng.choice(every), rng.choice(subjects), *known) for _ in range(count)]


def train(known: Known, report: Callable[[int, float], None]) -> Judge:
    """Train on paintings of one to three subjects; `report(step, loss)` is called every 20 steps."""
    torch.manual_seed(7)
    rng, model = random.Random(7), Judge(known)
    scenes = scenes_to_judge(rng, POOL, (1, 1, 2, 3), known)
    pool = torch.cat([(shrink(paint(scene)[None]) * 255).round().byte() for scene in scenes])
    wanted = targets(scenes, known)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        pick = torch.randint(POOL, (BATCH,))
        loss = judge_loss(model, soften(pool[pick].float() / 255, rng), tuple(t[pick] for t in wanted))
        take_step(model, optimizer, schedule, loss)
        if step % 20 == 0:
            report(step, loss.item())
    return model.train(False)


def load(name: str = JUDGE) -> Judge:
    """Return the judge of that name."""
    model, tensors = Judge(KNOWN[name]), load_file(HERE / f"{name}.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.train(False)


@torch.no_grad()
def score(model: Judge, pictures: np.ndarray, wanted: list[Combination]) -> dict[str, float]:
    """Return the share of `pictures`, uint8 [N, H, W, 3], with the right time, place, style, subject and colour.

    `scene` is the share with time, place, style and subject right together, `all` that with its colour too.
    """
    whole, kinds, colours = (torch.cat(part) for part in zip(*map(model, shrink(pictures).split(64)), strict=True))
    time, place, style = (part.argmax(1) for part in whole.split([len(TIMES), len(PLACES), len(STYLES)], 1))
    rows = torch.arange(len(wanted))
    kind = torch.tensor([model.known.kinds.index(c.kind) for c in wanted])
    right = {
        "time": time == torch.tensor([TIMES.index(c.time) for c in wanted]),
        "place": place == torch.tensor([PLACES.index(c.place) for c in wanted]),
        "style": style == torch.tensor([STYLES.index(c.style) for c in wanted]),
        "subject": kinds[rows, kind] > 0,
        "colour": colours[rows, kind].argmax(1) == torch.tensor([model.known.colours.index(c.colour) for c in wanted]),
    }
    right["scene"] = right["time"] & right["place"] & right["style"] & right["subject"]
    right["all"] = right["scene"] & right["colour"]
    return {name: round(share.float().mean().item(), 4) for name, share in right.items()}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else JUDGE
    known = KNOWN[name]
    model = train(known, lambda step, loss: sys.stderr.write(f"{name} {step} loss {loss:.4f}\n"))
    model.half().float()  # as it is kept
    scenes = scenes_to_judge(random.Random("held out"), TESTED, (1,), known)
    wanted = [Combination(s.time, s.place, s.style, s.subjects[0].kind, s.subjects[0].colour) for s in scenes]
    pictures = np.stack([paint(scene, PIXELS) for scene in scenes])
    result = {"paintings": TESTED, **score(model, pictures, wanted)}
    # a subject that is not there must not be seen either
    rng = random.Random(8)
    others = [each._replace(kind=rng.choice([kind for kind in known.kinds if kind != each.kind])) for each in wanted]
    result["another subject seen"] = score(model, pictures, others)["subject"]
    tensors = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, HERE / f"{name}.safetensors")
    (HERE / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stderr.write(f"{result}\n")


if __name__ == "__main__":
    main()
