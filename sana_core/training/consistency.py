"""SANA-Sprint's loss: continuous-time consistency, along the data's own trajectory or a teacher's.

In TrigFlow x = cos(t) x0 + sin(t) noise at the angle t from 0 to pi / 2, and a model F gives x0 as cos(t) x - sin(t) F.
That x0 is to stay the same along the trajectory, whose velocity dx/dt is cos(t) noise - sin(t) x0, or what a teacher
says it is. So the loss needs how F changes along the trajectory: a derivative in one direction, found in one forward.

Sources: SANA-Sprint (arXiv 2503.09641), section 3; sCM (arXiv 2410.11081), sections 3 and 4; the arithmetic and its
constants as in train_scripts/train_scm_ladd.py and configs/sana_sprint_config of NVlabs/Sana, and in diffusers'
examples/research_projects/sana/train_sana_sprint_diffusers.py. Of theirs, what learns the weight of each time and the
adversarial loss (LADD) are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..model.reference import model_timestep, reference_of
from .loss import drop_captions, mean_error

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

# sigma_data: how large NVIDIA scales latents, which are about 1 here; it sets the scale of the tangent and of the times
DATA_STD = 0.5
# of the logarithm of DATA_STD tan(t)
ANGLE_MEAN, ANGLE_STD = 0.2, 1.6
# the teacher guides with one of these, and the model is told which
GUIDANCES = (4.0, 4.5, 5.0)
# what is added to the tangent's norm before it divides the tangent
SMALLEST_NORM = 0.1


class Prompt(NamedTuple):
    """What a batch of pictures is asked to show."""

    embeds: torch.Tensor  # [B, T, C] in the forward's dtype
    mask: torch.Tensor  # [B, T]
    guidance: torch.Tensor  # [B], before the model's own scale


class Point(NamedTuple):
    """Where a batch is on its trajectories."""

    x: torch.Tensor  # [B, 32, h, w]
    angle: torch.Tensor  # [B]
    velocity: torch.Tensor  # dx/dt, as x


def training_angles(times: torch.Tensor) -> torch.Tensor:
    """Return the angles that SANA-Sprint is trained at for uniform `times` in (0, 1)."""
    normal = torch.special.ndtri(times.clamp(1e-6, 1 - 1e-6))
    return torch.atan(torch.exp(ANGLE_MEAN + ANGLE_STD * normal) / DATA_STD)


def training_guidance(choices: torch.Tensor) -> torch.Tensor:
    """Return one of GUIDANCES for each of the uniform `choices` in [0, 1)."""
    return torch.tensor(GUIDANCES)[(choices * len(GUIDANCES)).long()]


def data_point(x0: torch.Tensor, noise: torch.Tensor, angle: torch.Tensor) -> Point:
    """Return the point at `angle` [B] between latents and noise [B, 32, h, w], with the velocity of just these."""
    cos, sin = parts_of(angle)
    return Point(cos * x0 + sin * noise, angle, cos * noise - sin * x0)


def parts_of(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of `angle` [B] as [B, 1, 1, 1]."""
    return torch.cos(angle).view(-1, 1, 1, 1), torch.sin(angle).view(-1, 1, 1, 1)


def trigflow_velocity(
    transformer: SanaTransformer2DModel, x: torch.Tensor, angle: torch.Tensor, prompt: Prompt
) -> torch.Tensor:
    """Return TrigFlow's F [B, 32, h, w] of a model that predicts flow's noise - x0, in the dtype of `x`.

    Without training: flow's latents are x / (cos(t) + sin(t)) at sigma = sin(t) / (cos(t) + sin(t)) (SANA-Sprint,
    section 3.1). The model is told the guidance if it was distilled for that.
    """
    cos, sin = parts_of(angle)
    total = cos + sin
    sigma = (sin / total).flatten()
    config, guidance = transformer.config, None
    if config.guidance_embeds:
        guidance = prompt.guidance * config.guidance_embeds_scale
    flow = transformer(
        (x / total).to(prompt.embeds.dtype),
        prompt.embeds,
        model_timestep(transformer, sigma * 1000),
        guidance=guidance,
        encoder_attention_mask=prompt.mask,
        return_dict=False,
    )[0]
    return ((cos - sin) * x + flow.to(x.dtype)) / total


@torch.no_grad()
def taught(point: Point, teacher: SanaTransformer2DModel, prompt: Prompt, empty: Mapping[str, torch.Tensor]) -> Point:
    """Return `point` with the velocity that `teacher` predicts there with the guidance of `prompt`.

    `empty` is the prompt to guide away from, as in `drop_captions`, masked as the teacher draws.
    """
    every = torch.ones_like(prompt.mask[:, 0], dtype=torch.bool)
    embeds, mask = drop_captions(prompt.embeds, prompt.mask, every, empty, reference_of(teacher).shared_mask)
    both = Prompt(torch.cat([embeds, prompt.embeds]), torch.cat([mask, prompt.mask]), prompt.guidance.repeat(2))
    found = trigflow_velocity(teacher, point.x.repeat(2, 1, 1, 1), point.angle.repeat(2), both)
    unguided, guided = found.chunk(2)
    return point._replace(velocity=unguided + prompt.guidance.view(-1, 1, 1, 1) * (guided - unguided))


@torch.no_grad()
def tangent(transformer: SanaTransformer2DModel, point: Point, prompt: Prompt, ramp: float = 1.0) -> torch.Tensor:
    """Return how x0 changes along the trajectory at `point`, as cos(t) dx0/dt [B, 32, h, w].

    `ramp` is the share, from 0 to 1, of what makes young models unstable: the model's own derivative with what belongs
    to it (sCM, section 4.1, tangent warmup).
    """
    cos, sin = parts_of(point.angle)
    # the fused kernels of attention have no derivative in a direction
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        # times cos(t) sin(t), so that it stays small at either end (sCM, section 4.1, JVP rearrangement)
        x = forward_ad.make_dual(point.x, cos * sin * point.velocity)
        angle = forward_ad.make_dual(point.angle, (cos * sin).flatten())
        own, change = forward_ad.unpack_dual(trigflow_velocity(transformer, x, angle, prompt))
    assert change is not None
    return cos.square() * (point.velocity - own) - ramp * (cos * sin * point.x + change)


def consistency_loss(
    transformer: SanaTransformer2DModel,
    point: Point,
    prompt: Prompt,
    ramp: float,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the loss [B] whose gradient moves F against its normalised tangent; `weight` is as in `flow_loss`.

    Its value says little: it is the length that the tangent was normalised to, over the size of the latents.
    """
    step = DATA_STD * tangent(transformer, point, prompt, ramp)
    step = step / (torch.linalg.vector_norm(step, dim=(1, 2, 3), keepdim=True) + SMALLEST_NORM)
    own = trigflow_velocity(transformer, point.x, point.angle, prompt)
    return mean_error(own - own.detach() - step, weight) / (DATA_STD * torch.tan(point.angle))


def consistency_error(
    transformer: SanaTransformer2DModel, point: Point, prompt: Prompt, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the squared tangent [B]: 0 for a model that gives the same x0 all along the trajectory."""
    return mean_error(tangent(transformer, point, prompt), weight)
