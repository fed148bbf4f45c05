"""Trainers with a model and data of the caller, for tests and benchmarks of single steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch

from sana_core.model.reference import reference_of
from sana_core.training.loader import Loader
from sana_core.training.ranks import ALONE, Ranks
from sana_core.training.schedule import TrainProgress
from sana_core.training.settings import TrainingSettings
from sana_core.training.trainer import Trainer


def make_trainer(
    transformer: Any,
    shift: float,
    settings: TrainingSettings,
    device: torch.device | None = None,
    ranks: Ranks = ALONE,
) -> Trainer:
    """Return a trainer of `transformer` before its first step."""
    trainer = Trainer(settings, ranks=ranks)
    trainer.set_up(transformer, shift, device)
    return trainer


def take_step(
    trainer: Trainer, data: Any, group: Sequence[Sequence[int]], progress: TrainProgress, rate: float
) -> tuple[float, float]:
    """Learn the batches `group` of `data` in one step. Returns the mean loss and the norm of the gradients."""
    trainer.data, trainer.progress = [data], progress
    loader = Loader(trainer.settings, trainer.ranks, [data], reference_of(trainer.transformer).shared_mask)
    with closing(loader):
        step = loader.finish(progress, loader.read(progress, list(map(list, group))))
    mean, norm = trainer.compute_gradients(*step)
    trainer.apply_gradients(rate)
    return mean, norm


def validation_loss(trainer: Trainer, data: Any) -> float:
    trainer.data, trainer.progress = [data], TrainProgress()
    return trainer.validation_loss()


def weights_of(models: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return copies of the trained weights of `Trainer.gather_models` on the CPU; nothing without models."""
    named = [named for model in models[-1:] for named in model.named_parameters()]
    return {name: weight.detach().cpu().clone() for name, weight in named if weight.requires_grad}
