"""SANA's schedules: descending flow sigmas from noise to image.

sigma is the share of noise: x_sigma = (1 - sigma) x0 + sigma noise. Schedules are [steps + 1] float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..errors import InputError
from ..model.known_models import INTERMEDIATE_TIMESTEP, MAX_TIMESTEP
from ..runtime.checks import check_number, check_whole

# The number of timesteps in SANA's training.
LARGEST_STEPS = 1000


def check_steps(steps: int) -> None:
    """Raise InputError unless `steps` is a whole number from 1 to 1000."""
    check_whole("steps", steps, 1, LARGEST_STEPS)


def shift_sigmas(sigmas: torch.Tensor, shift: float) -> torch.Tensor:
    """Move the schedule towards noise, which larger images need (Esser et al. 2024, section 5.3.2)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def flow_euler_sigmas(steps: int, shift: float) -> torch.Tensor:
    """Return the [steps + 1] sigmas of diffusers' FlowMatchEulerDiscreteScheduler, from 1 to 0.

    It shifts twice: first the smallest sigma of training, then all sigmas between 1 and this one. Raises InputError
    unless `steps` is a whole number from 1 to 1000.
    """
    check_steps(steps)
    smallest = shift_sigmas(torch.tensor(1 / 1000, dtype=torch.float64), shift)
    line = torch.linspace(1, smallest.item(), int(steps), dtype=torch.float64)
    return torch.cat([shift_sigmas(line, shift), torch.zeros(1)]).float()


def flow_dpm_sigmas(steps: int, shift: float, float32: bool = False) -> torch.Tensor:
    """Return [steps + 1] sigmas from just below 1 to 0: the flow sigmas of DPM-Solver in SANA and in diffusers.

    NVIDIA computes them in float32, diffusers in float64. Where 1000 sigma is almost whole, they round to different
    timesteps. `float32`: compute them as NVIDIA does. Raises InputError unless `steps` is a whole number from 1 to
    1000.
    """
    check_steps(steps)
    if float32:
        return shift_sigmas(1 - torch.linspace(1, 1 / 1000, int(steps) + 1), shift).flip(0)
    exact = shift_sigmas(1 - torch.from_numpy(np.linspace(1, 1 / 1000, int(steps) + 1)), shift).flip(0)
    sigmas, timesteps = exact.float(), (1000 * exact).floor()
    # The rounding to float32 and the rounding of the product may each cross a whole timestep. Correct the sigmas by up
    # to two steps of float32, so that 1000 sigma has the timestep of float64.
    for _ in range(2):
        rounded = (1000 * sigmas).floor()
        sigmas = torch.where(rounded == timesteps, sigmas, sigmas.nextafter(torch.where(rounded > timesteps, 0.0, 1.0)))
    return sigmas


def scm_timesteps(
    steps: int, max_timestep: float = MAX_TIMESTEP, intermediate_timestep: float = INTERMEDIATE_TIMESTEP
) -> torch.Tensor:
    """Return [steps + 1] float64 angles of TrigFlow from `max_timestep` to 0 (SANA-Sprint, section 4).

    With two steps, the second one begins at `intermediate_timestep`. With other numbers of steps, the angles are evenly
    spaced and `intermediate_timestep` is not used.
    """
    check_steps(steps)
    if not 0 < max_timestep <= MAX_TIMESTEP:
        raise InputError(f"max_timestep: got {max_timestep!r:.40}, expected a number above 0 and up to {MAX_TIMESTEP}")
    if steps != 2:
        return torch.linspace(max_timestep, 0, int(steps) + 1, dtype=torch.float64)
    if not 0 < intermediate_timestep < max_timestep:
        raise InputError(
            f"intermediate_timestep: got {intermediate_timestep!r:.40}, expected a number between 0 and max_timestep, "
            f"which is {max_timestep}"
        )
    return torch.tensor([max_timestep, intermediate_timestep, 0], dtype=torch.float64)


def scm_sigmas(
    steps: int, max_timestep: float = MAX_TIMESTEP, intermediate_timestep: float = INTERMEDIATE_TIMESTEP
) -> torch.Tensor:
    """Return the angles of `scm_timesteps` as [steps + 1] flow sigmas, sin t / (sin t + cos t).

    Raises InputError for steps that are not a whole number from 1 to 1000, and for angles that are not
    0 < intermediate < max <= 1.5708.
    """
    angles = scm_timesteps(steps, max_timestep, intermediate_timestep)
    sigmas = torch.sin(angles) / (torch.sin(angles) + torch.cos(angles))
    # 1.57080 is 4e-6 larger than pi / 2, so the first sigma would exceed 1.
    return sigmas.clamp(max=1).float()


def trim_schedule(schedule: Callable[[int], torch.Tensor], steps: int, denoise: float) -> torch.Tensor:
    """Return the last `steps` steps of a schedule with `steps` / `denoise` steps, for image to image.

    The result is empty if `denoise` is 0.
    """
    check_steps(steps)
    check_number("denoise", denoise, 0, 1)
    if denoise == 0:
        return torch.empty(0)
    # More steps than the training has timesteps would repeat sigmas.
    all_steps = int(min(steps / denoise, LARGEST_STEPS))
    return schedule(all_steps)[-(int(steps) + 1) :]


def last_steps(sigmas: torch.Tensor, strength: float) -> torch.Tensor:
    """Return the last `strength` * steps steps of `sigmas`, rounded up, as SANA-Sprint does image to image.

    The result is empty if `strength` is 0.
    """
    check_number("strength", strength, 0, 1)
    steps = len(sigmas) - 1
    first = int(max(steps - min(steps * strength, steps), 0))
    return sigmas[first:] if first < steps else torch.empty(0)


def descending(sigmas: torch.Tensor) -> list[float]:
    """Return `sigmas` as Python numbers. They are read once, so that no step waits for the device."""
    line = sigmas.tolist()
    falls = all(high > low for high, low in zip(line, line[1:], strict=False))
    if len(line) < 2 or not falls or not (line[0] <= 1 and line[-1] >= 0):
        shown = ", ".join(f"{value:.4g}" for value in line[:4]) + (", ..." if len(line) > 4 else "")
        raise InputError(
            f"sigmas: got [{shown}], expected at least two numbers that fall from at most 1 to at least 0; "
            "use SANA Scheduler"
        )
    return line
