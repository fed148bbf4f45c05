"""The step of the optimizer that all three stages take."""

from __future__ import annotations

import torch


def take_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    loss: torch.Tensor,
) -> None:
    """Follow the gradient of `loss`, its norm clipped to 1, and move the learning rate on."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
