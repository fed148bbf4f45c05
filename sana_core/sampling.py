"""Flow-matching schedules and samplers, one function each.

x_sigma = (1 - sigma) x0 + sigma noise, so alpha = 1 - sigma. A model is called as model(x, sigma) and returns x0.
`callback` gets {"i", "x", "sigma", "denoised"} once a step, before x changes; what it raises ends the sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Denoiser = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Callback = Callable[[dict], None]

# of SANA up to 2048 px
SHIFT = 3.0


def shift_sigmas(sigmas: torch.Tensor, shift: float) -> torch.Tensor:
    """Move the schedule towards noise, as larger pictures want (Esser et al. 2024, section 5.3.2)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def flow_euler_sigmas(steps: int, shift: float) -> torch.Tensor:
    """Return [steps + 1] sigmas from 1 to 0: those of diffusers' FlowMatchEulerDiscreteScheduler.

    It shifts twice: the smallest sigma of training, then the whole line between 1 and that.
    """
    smallest = shift_sigmas(torch.tensor(1 / 1000, dtype=torch.float64), shift)
    line = torch.linspace(1, smallest.item(), steps, dtype=torch.float64)
    return torch.cat([shift_sigmas(line, shift), torch.zeros(1)]).float()


def flow_dpm_sigmas(steps: int, shift: float) -> torch.Tensor:
    """Return [steps + 1] sigmas from just below 1 to 0: the flow sigmas of DPM-Solver in SANA and in diffusers."""
    line = torch.linspace(0.999, 0, steps + 1, dtype=torch.float64)
    return shift_sigmas(line, shift).float()


def sample_flow_euler(
    model: Denoiser, x: torch.Tensor, sigmas: torch.Tensor, callback: Callback | None = None
) -> torch.Tensor:
    """Euler steps along the velocity (x - x0) / sigma. Returns x at the last sigma."""
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i])
        if callback is not None:
            callback({"i": i, "x": x, "sigma": sigmas[i], "denoised": denoised})
        x = x + (sigmas[i + 1] - sigmas[i]) * (x - denoised) / sigmas[i]
    return x


def sample_flow_dpmpp_2m(
    model: Denoiser, x: torch.Tensor, sigmas: torch.Tensor, callback: Callback | None = None
) -> torch.Tensor:
    """DPM-Solver++(2M), midpoint form (Lu et al. 2022, algorithm 2), with lambda = log((1 - sigma) / sigma).

    The first step has order 1, and so has one to sigma 0, where h is infinite. Returns x at the last sigma.
    """
    lambdas = torch.log((1 - sigmas) / sigmas)
    previous = None
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i])
        if callback is not None:
            callback({"i": i, "x": x, "sigma": sigmas[i], "denoised": denoised})
        h = lambdas[i + 1] - lambdas[i]
        d = denoised
        if previous is not None and sigmas[i + 1] > 0:
            r = (lambdas[i] - lambdas[i - 1]) / h
            d = denoised + (denoised - previous) / (2 * r)
        x = sigmas[i + 1] / sigmas[i] * x - (1 - sigmas[i + 1]) * torch.expm1(-h) * d
        previous = denoised
    return x


class FlowSampler(NamedTuple):
    """A sampler, the schedule that belongs to it, and whether SANA gives the model whole timesteps with it."""

    sample: Callable[..., torch.Tensor]
    sigmas: Callable[[int, float], torch.Tensor]
    whole_timesteps: bool


SAMPLERS = {
    "flow_dpmpp_2m": FlowSampler(sample_flow_dpmpp_2m, flow_dpm_sigmas, True),
    "flow_euler": FlowSampler(sample_flow_euler, flow_euler_sigmas, False),
}


def find_sampler(name: str) -> FlowSampler:
    """Return the sampler of that name. Raises ValueError for a name that is not in SAMPLERS."""
    if name not in SAMPLERS:
        raise ValueError(f"sampler: got {name!r}, expected one of {', '.join(SAMPLERS)}")
    return SAMPLERS[name]
