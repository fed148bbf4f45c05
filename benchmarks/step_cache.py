"""What `--step-cache` costs: how far images are from those of all steps, beside images of as few steps.

The demo model on the CPU in fp32, its own 20 steps. Writes benchmarks/step_cache.json: by the share, of all steps the
part that was computed whole, and the mean difference in levels of 255; and that of images drawn in as many steps.
"""

from __future__ import annotations

import sys
from unittest import mock

import torch

from benchmarks import ROOT
from benchmarks.machine import write
from sana_core import generate
from sana_core.batch import pipeline
from sana_core.model.step_cache import StepCache

PROMPTS = [
    "a flat drawing of a red boat on the sea at dusk",
    "a flat drawing of a blue house in the snow at night",
    "a flat drawing of a green tree among green hills at noon",
]
SHARES = (0.05, 0.1, 0.15, 0.2, 0.3)
STEPS = 20


def images(steps: int = STEPS, share: float = 0.0) -> torch.Tensor:
    size = {"width": 512, "height": 512}
    return generate(PROMPTS, ROOT / "demo" / "sana-posters", devices=["cpu"], steps=steps, step_cache=share, **size)


def away(got: torch.Tensor, expected: torch.Tensor) -> float:
    return round(float(127.5 * (got - expected).abs().mean()), 2)


def main() -> None:
    expected, found = images(), {}
    for share in SHARES:
        caches: list[StepCache] = []

        def noted(share: float, caches: list[StepCache] = caches) -> StepCache:
            caches.append(StepCache(share))
            return caches[-1]

        with mock.patch.object(pipeline, "StepCache", noted):
            got = images(share=share)
        computed = sum(cache.steps - cache.reused for cache in caches) / len(PROMPTS)
        found[str(share)] = {
            "steps_computed": round(computed, 1),
            "levels_away": away(got, expected),
            "levels_away_of_as_few_steps": away(images(round(computed)), expected),
        }
        sys.stderr.write(f"{share}: {found[str(share)]}\n")
    write(__file__, {"steps": STEPS, "shares": found})


if __name__ == "__main__":
    main()
