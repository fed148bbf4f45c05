"""The exponential moving average of the trained parameters: kept in fp32, and put in their place for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ..errors import InputError

Tensors = Mapping[str, torch.Tensor]


def start_average(parameters: Tensors) -> dict[str, torch.Tensor]:
    """Return the average of `parameters` before the first step: copies in fp32, by name."""
    return {name: parameter.detach().float().clone() for name, parameter in parameters.items()}


def average_decay(decay: float, step: int) -> float:
    """Return how much of the average the step with number `step`, from 0 on, keeps.

    min(decay, (1 + step) / (10 + step)), so that the average of a short run is not that of its start (TensorFlow's
    ExponentialMovingAverage, diffusers' EMAModel).
    """
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(average: Tensors, parameters: Tensors, decay: float) -> None:
    """Move `average` to decay * average + (1 - decay) * parameters, in place; after each step of the optimizer."""
    for name, parameter in parameters.items():
        average[name].lerp_(parameter.detach().float(), 1.0 - decay)


@torch.no_grad()
def restore_average(average: Tensors, saved: Tensors) -> None:
    """Write the values of `saved`, an average as it was written, into `average`. Raises InputError where they differ
    in names or shapes."""
    for name in average.keys() | saved.keys():
        if name not in saved or name not in average or saved[name].shape != average[name].shape:
            raise InputError(
                f"ema: got an average of other weights, first {name:.80}, expected one of the trained ones; resume "
                "with the settings that it was saved with"
            )
    for name, values in saved.items():
        average[name].copy_(values)


@contextmanager
def averaged_weights(parameters: Tensors, average: Tensors) -> Iterator[None]:
    """Hold the average in `parameters`, in their dtype, and put the trained weights back after, bit for bit."""
    with kept_weights(parameters.values()):
        write(parameters, average)
        yield


@contextmanager
def kept_weights(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give `parameters` back the values that they have now, bit for bit; they lie in the CPU's memory meanwhile."""
    parameters = list(parameters)
    kept = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    try:
        yield
    finally:
        write(dict(enumerate(parameters)), dict(enumerate(kept)))


@torch.no_grad()
def write(targets: Mapping, values: Mapping) -> None:
    for name, target in targets.items():
        target.copy_(values[name])
