"""Steps that use again what the blocks made in an earlier step, where the first block says that little has changed.

Inexact. It is ParaAttention's first-block cache (github.com/chengzeyi/ParaAttention), as diffusers' FirstBlockCache has
it: the first block always runs; where its update differs from that of the last step that was computed by less than a
share, the update of all other blocks is that step's.
"""

from __future__ import annotations

import torch


class StepCache:
    """What the last computed step of a sampling left. `share` is the largest change at which it is used again."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.update = torch.empty(0)  # the first block's [B, N, D], of the last step that was computed
        self.rest = torch.empty(0)  # that of all other blocks
        self.hidden = torch.empty(0)  # what the first block gets in this step, then what it returns
        self.steps = self.reused = 0

    def begin(self, hidden: torch.Tensor) -> None:
        """Take what the first block gets; a copy, for kernels add in place."""
        self.hidden = hidden.clone()
        self.steps += 1

    def find(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return what the last block would return, nearly, where the first returns `hidden`; None to compute it."""
        update = hidden - self.hidden
        # of another batch, as where guidance begins
        is_near = self.update.shape == update.shape and self.change(update) <= self.share
        if is_near:
            self.reused += 1
            return hidden + self.rest
        self.update, self.hidden = update, hidden.clone()
        return None

    def change(self, update: torch.Tensor) -> float:
        return float((update - self.update).abs().mean() / self.update.abs().mean())

    def end(self, hidden: torch.Tensor) -> None:
        """Take what the last block returns."""
        self.rest = hidden - self.hidden
