"""SANA's samplers in the style of k-diffusion, and the table SAMPLERS.

x_sigma = (1 - sigma) x0 + sigma noise, so alpha = 1 - sigma. A sampler calls model(x, sigma) once or twice per step.
The model returns x0. Sigmas are Python numbers, read once before the first step, so no step waits for the device.
`callback` receives a StepState once per step, before x changes. If it raises, the sampling ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypedDict

import torch

from ..errors import InputError
from ..model.known_models import DMD, IMAGES, SPRINT, VIDEOS, TransformerConfig, model_of
from ..model.reference import DIFFUSERS, RULES, Reference
from ..runtime.checks import check_name
from .schedules import descending, flow_dpm_sigmas, flow_euler_sigmas, scm_sigmas

# model(x, sigma) -> x0
Denoiser = Callable[[torch.Tensor, float], torch.Tensor]


class StepState(TypedDict):
    """The argument of a callback, with k-diffusion's names."""

    # Number of the step.
    i: int
    # Latents before the step.
    x: torch.Tensor
    sigma: float
    # The model's x0.
    denoised: torch.Tensor


Callback = Callable[[StepState], object]

# DPM-Solver++ lowers its order at the end of schedules with fewer steps than this.
FEW_STEPS = 15


def sample_flow_euler(
    model: Denoiser, x: torch.Tensor, sigmas: torch.Tensor, callback: Callback | None = None
) -> torch.Tensor:
    """Euler steps along the velocity (x - x0) / sigma.

    Returns x at the last sigma. Raises InputError for sigmas that do not descend.
    """
    sigma = descending(sigmas)
    for i in range(len(sigma) - 1):
        denoised = model(x, sigma[i])
        if callback is not None:
            callback({"i": i, "x": x, "sigma": sigma[i], "denoised": denoised})
        x = torch.lerp(x, denoised, 1 - sigma[i + 1] / sigma[i])
    return x


def sample_flow_heun(
    model: Denoiser, x: torch.Tensor, sigmas: torch.Tensor, callback: Callback | None = None
) -> torch.Tensor:
    """Heun's method: the mean of the velocities (x - x0) / sigma at both ends of a step.

    It calls the model twice per step, and once in a step to sigma 0, like diffusers' FlowMatchHeunDiscreteScheduler.
    Returns x at the last sigma. Raises InputError for sigmas that do not descend.
    """
    sigma = descending(sigmas)
    for i in range(len(sigma) - 1):
        denoised = model(x, sigma[i])
        if callback is not None:
            callback({"i": i, "x": x, "sigma": sigma[i], "denoised": denoised})
        velocity, dt = (x - denoised) / sigma[i], sigma[i + 1] - sigma[i]
        euler = x + velocity * dt
        if sigma[i + 1] == 0:
            x = euler
        else:
            next_velocity = (euler - model(euler, sigma[i + 1])) / sigma[i + 1]
            x = x + 0.5 * (velocity + next_velocity) * dt
    return x


def sample_flow_dpmpp(
    model: Denoiser,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    callback: Callback | None = None,
    always_lower_order: bool = False,
    order: int = 2,
) -> torch.Tensor:
    """Multistep DPM-Solver++ (Lu et al. 2022), with lambda = log((1 - sigma) / sigma).

    Order 1 is DDIM. Order 2 is algorithm 2 with the midpoint rule. Order 3 is in appendix B.

    The first steps use a lower order because fewer x0 exist. The last step to sigma 0 has order 1, because lambda is
    infinite there. The step before it has at most order 2 if the schedule has fewer than 15 steps, as in diffusers, or
    with `always_lower_order`, as in NVIDIA's code. Returns x at the last sigma.
    """
    sigma = descending(sigmas)
    steps = len(sigma) - 1
    # On the CPU, because some accelerators have no float64.
    sigmas64 = sigmas.cpu().double()
    lambdas = torch.log((1 - sigmas64) / sigmas64).tolist()
    x0s: list[torch.Tensor] = []
    for i in range(steps):
        denoised = model(x, sigma[i])
        if callback is not None:
            callback({"i": i, "x": x, "sigma": sigma[i], "denoised": denoised})
        x0s = [denoised, *x0s[: order - 1]]
        remaining = steps - i
        lowers_order = sigma[-1] == 0 and (remaining == 1 or steps < FEW_STEPS or always_lower_order)
        weights = dpmpp_weights(lambdas[: i + 2], min(len(x0s), remaining) if lowers_order else len(x0s))
        x = sigma[i + 1] / sigma[i] * x
        for weight, x0 in zip(weights, x0s, strict=False):
            x = x.add(x0, alpha=(1 - sigma[i + 1]) * weight)
    return x


sample_flow_dpmpp_1 = partial(sample_flow_dpmpp, order=1)
sample_flow_dpmpp_2m = partial(sample_flow_dpmpp, order=2)
sample_flow_dpmpp_3m = partial(sample_flow_dpmpp, order=3)


def dpmpp_weights(lambdas: list[float], order: int) -> list[float]:
    """Return the weights of the last `order` x0, newest first. The step goes from lambdas[-2] to lambdas[-1].

    x_t = (sigma_t / sigma_s) x + alpha_t sum_k weights[k] x0[k]. Lu et al. 2022 write the sum as phi_1 = 1 - e^-h times
    D0, plus multiples of the divided differences D1 and D2 for orders 2 and 3. Here it is sorted by x0. At sigma 1
    lambda is -infinity, and the weight of that x0's difference becomes 0.
    """
    h = lambdas[-1] - lambdas[-2]
    phi_1 = -math.expm1(-h)
    if order == 1:
        return [phi_1]
    # D1_0 = (m0 - m1) / r0
    r0 = (lambdas[-2] - lambdas[-3]) / h
    if order == 2:
        return [phi_1 + phi_1 / (2 * r0), -phi_1 / (2 * r0)]
    # D1_1 = (m1 - m2) / r1, D1 = D1_0 + r0 / (r0 + r1) (D1_0 - D1_1), D2 = (D1_0 - D1_1) / (r0 + r1)
    r1 = (lambdas[-3] - lambdas[-4]) / h
    phi_2 = 1 - phi_1 / h
    phi_3 = 0.5 - (h - phi_1) / h**2
    d2 = (r0 * phi_2 + phi_3) / (r0 + r1)
    newer, older = (phi_2 + d2) / r0, d2 / r1
    return [phi_1 + newer, -newer - older, older]


def sample_scm(
    model: Denoiser,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    callback: Callback | None = None,
    noise: Iterator[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Multistep consistency sampling (Song et al. 2023, algorithm 1), as SANA-Sprint's sCM samples.

    After each step, add noise up to the next sigma. The noise comes from `noise`, or from torch's generator if it is
    None. This is the TrigFlow step of Lu and Song 2025 in the variables of flow matching: with sigma =
    sin t / (sin t + cos t), TrigFlow's cos(t) x - sin(t) F is x - sigma velocity.

    Returns x at the last sigma. Raises InputError for sigmas that do not descend.
    """
    sigma = descending(sigmas)
    for i in range(len(sigma) - 1):
        denoised = model(x, sigma[i])
        if callback is not None:
            callback({"i": i, "x": x, "sigma": sigma[i], "denoised": denoised})
        x = denoised
        if sigma[i + 1] > 0:
            fresh = torch.randn_like(x) if noise is None else next(noise).to(x)
            x = torch.lerp(x, fresh, sigma[i + 1])
    return x


class Sampler(NamedTuple):
    """A row of SAMPLERS: everything that distinguishes one sampler from another."""

    # (model, x, sigmas, callback, **options) -> latents
    sample: Callable[..., torch.Tensor]
    # (steps, shift, reference) -> the [steps + 1] sigmas that `reference` computes
    schedule: Callable[[int, float, Reference], torch.Tensor]
    # The diffusers scheduler that samples in this way: its class, and its solver_order if the class has several.
    scheduler: tuple[str, int | None] | None = None
    # SANA rounds the timesteps down to whole numbers with this sampler.
    whole_timesteps: bool = False
    # Whether `reference` uses guidance of at most 1, too. Otherwise, guidance is off at 1 and below.
    uses_low_guidance: Callable[[Reference], bool] = lambda reference: False
    # (reference, more noise of the same seed) -> keyword arguments of `sample`
    options: Callable[[Reference, Iterator[torch.Tensor]], dict[str, object]] = lambda reference, noise: {}

    def sigmas(self, steps: int, shift: float, reference: Reference = RULES[DIFFUSERS]) -> torch.Tensor:
        """Return the [steps + 1] sigmas as `reference` computes them."""
        return self.schedule(steps, shift, reference)

    def effective_guidance(self, reference: Reference, guidance: float) -> float:
        """Return `guidance`, or 1 (off) if `reference` does not guide at this value."""
        return guidance if guidance > 1 or self.uses_low_guidance(reference) else 1.0


def dpm_schedule(steps: int, shift: float, reference: Reference) -> torch.Tensor:
    return flow_dpm_sigmas(steps, shift, reference.float32_schedule)


def euler_schedule(steps: int, shift: float, reference: Reference) -> torch.Tensor:
    return flow_euler_sigmas(steps, shift)


# Only NVIDIA's DPM-Solver guides at all values but 1. Its FlowEuler and diffusers' pipelines guide above 1.
dpm_solver = partial(
    Sampler, schedule=dpm_schedule, whole_timesteps=True, uses_low_guidance=lambda reference: reference.guides_below_one
)
SAMPLERS = {
    "flow_dpmpp_2m": dpm_solver(sample_flow_dpmpp_2m, scheduler=("DPMSolverMultistepScheduler", 2)),
    "flow_euler": Sampler(sample_flow_euler, euler_schedule, ("FlowMatchEulerDiscreteScheduler", None)),
    "flow_heun": Sampler(sample_flow_heun, euler_schedule, ("FlowMatchHeunDiscreteScheduler", None)),
    "flow_dpmpp_3m": dpm_solver(
        sample_flow_dpmpp_3m,
        scheduler=("DPMSolverMultistepScheduler", 3),
        # With orders 1 and 2 always_lower_order changes nothing.
        options=lambda reference, noise: {"always_lower_order": reference.always_lowers_order},
    ),
    "flow_dpmpp_1": dpm_solver(sample_flow_dpmpp_1, scheduler=("DPMSolverMultistepScheduler", 1)),
    SPRINT: Sampler(
        sample_scm,
        # SANA-Sprint was distilled at its own angles. No shift changes them.
        lambda steps, shift, reference: scm_sigmas(steps),
        ("SCMScheduler", None),
        # The model receives the value as an embedding.
        uses_low_guidance=lambda reference: True,
        options=lambda reference, noise: {"noise": noise},
    ),
    # SANA-Video 2.0's preview takes the steps of scm at the sigmas of DPM-Solver. NVIDIA's class has this name.
    DMD: Sampler(
        sample_scm,
        dpm_schedule,
        ("FastVideoDMD4Step", None),
        whole_timesteps=True,
        options=lambda reference, noise: {"noise": noise},
    ),
}


# {sampler: a model that was distilled for it}
DISTILLED = {model.defaults.sampler: model for model in (*IMAGES.values(), *VIDEOS.values()) if model.fixed}


def by_scheduler(samplers: Mapping[str, Sampler]) -> dict[tuple[str, int | None], str]:
    """Return {scheduler: the name of its row}."""
    names: dict[tuple[str, int | None], str] = {}
    for name, row in samplers.items():
        if row.scheduler is not None and names.setdefault(row.scheduler, name) != name:
            raise InputError(f"{name}: got the scheduler of {names[row.scheduler]}, expected another; set it to None")
    return names


SCHEDULERS = by_scheduler(SAMPLERS)


def check_distilled(config: TransformerConfig, **settings: object) -> None:
    """Raise InputError unless `settings`, some of sampler, steps and guidance, fit the model with `config`.

    A distilled model has values of its own, and its sampler fits no other model.
    """
    model = model_of(config)
    expected = model.defaults._asdict()
    for field in model.fixed:
        if settings.get(field, expected[field]) != expected[field]:
            raise InputError(
                f"{field}: got {settings[field]} for {model.title}, expected {expected[field]}, for which it was "
                "distilled; choose that"
            )
    name = settings.get("sampler")
    if name in DISTILLED and name != model.defaults.sampler:
        raise InputError(
            f"sampler: got {name} for {model.title}, expected another, because {name} is for {DISTILLED[name].title}; "
            f"choose {model.defaults.sampler}"
        )


def find_sampler(name: str) -> Sampler:
    """Return the sampler of that name."""
    check_name("sampler", name, SAMPLERS)
    return SAMPLERS[name]


# Sampling that starts from the latents of an image, with or without a mask, as in ComfyUI.


class InitImage(NamedTuple):
    """The image that sampling starts from."""

    # [1, 32, h, w], in the model's scale.
    latents: torch.Tensor
    # Same shape: 1 where the latents are sampled again, 0 where they are preserved. None: sample everything again.
    mask: torch.Tensor | None


def start_from_image(
    init: InitImage, model: Denoiser, noise: torch.Tensor, sigma: float
) -> tuple[Denoiser, torch.Tensor]:
    """Wrap `model` to preserve the latents outside the mask. Returns it, and the noisy latents at `sigma`.

    It is bit-identical to KSamplerX0Inpaint in ComfyUI's comfy/samplers.py: the same operations in the same order.
    """
    latents = init.latents.to(noise)

    def noised(sigma: float) -> torch.Tensor:
        return sigma * noise + (1.0 - sigma) * latents

    if init.mask is None:
        return model, noised(sigma)
    mask = init.mask.to(noise)
    preserved = 1.0 - mask

    def masked(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return model(x * mask + noised(sigma) * preserved, sigma) * mask + latents * preserved

    return masked, noised(sigma)
