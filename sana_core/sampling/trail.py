"""The steps of images so far, by which their sampling goes on: what each step has predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..model.forward import Capture

if TYPE_CHECKING:
    from .samplers import Denoiser


class Trail:
    """The x0 [B, 32, h, w] of each step of a batch so far, of which there are `until` in all.

    A sampler that begins again and is told these is where it was, to the bit, with all that it remembers: DPM-Solver
    its past, SCM its noise. So nothing but them has to be kept, and no sampler has to know of it. `capture` looks at
    the hidden states of the last step.
    """

    def __init__(self, until: int, x0s: Sequence[torch.Tensor] = (), capture: Capture | None = None) -> None:
        self.until, self.x0s, self.capture = until, list(x0s), capture

    def follow(self, model: Denoiser) -> Denoiser:
        """Return `model` for one sampling; it is only called for the steps that are new, which are noted."""
        told = iter(self.x0s[:])

        def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            known = next(told, None)
            if known is not None:
                return known.to(x.device)
            self.x0s.append(model(x, sigma))
            return self.x0s[-1]

        return denoise


class Round(NamedTuple):
    """Which steps of drafts are taken: up to the step `until`, None for the last, on from those whose x0
    [k, 32, h, w] are in `past`, by the number of the image."""

    until: int | None = None
    past: Mapping[int, torch.Tensor] = MappingProxyType({})

    def trail(self, numbers: Sequence[int], steps: int, block: int | None) -> Trail:
        """Return the steps so far of a batch of images by their `numbers`, of `steps` in all. The last one of a round
        that ends before is watched behind the `block` that a verifier reads."""
        past = [self.past[number] for number in numbers] if self.past else []
        capture = Capture(block) if block is not None and self.until else None
        return Trail(self.until or steps, list(torch.stack(past, 1)) if past else [], capture)


WHOLE = Round()


class Draft(NamedTuple):
    """An image up to some step: its `x0s` [k, 32, h, w], and the last of them as `pixels` [3, H, W]
    in [-1, 1]; in their place the `score` of a verifier, which needs none."""

    x0s: torch.Tensor
    pixels: Any
    score: float | None = None
