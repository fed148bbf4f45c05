"""The losses: SANA's flow matching, and SANA-Sprint's continuous-time consistency.

Flow matching uses logit-normal times unless others are set, with the model's shift. For consistency, in TrigFlow,
x = cos(t) x0 + sin(t) noise at the angle t from 0 to pi / 2, and a model F gives x0 as cos(t) x - sin(t) F. This x0
should stay the same along the trajectory, whose velocity dx/dt is cos(t) noise - sin(t) x0. So the loss needs the
derivative of F along the trajectory (JVP), which one forward computes.

Sources: SANA-Sprint (arXiv 2503.09641), section 3; sCM (arXiv 2410.11081), sections 3 and 4; the arithmetic and its
constants as in train_scripts/train_scm_ladd.py and configs/sana_sprint_config of NVlabs/Sana, and in diffusers'
examples/research_projects/sana/train_sana_sprint_diffusers.py. Their learned weight of each time and their adversarial
loss (LADD) are not implemented.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..model.controlnet import Control
from ..model.known_models import GUIDANCE
from ..model.reference import model_timestep
from ..runtime.accelerator import current_device
from ..sampling.schedules import shift_sigmas
from .settings import MODE, UNIFORM, Loss
from .trained_model import steered, steering_residuals

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

# Numbers of independent random streams.
TRAINING, VALIDATION, DROPOUT, CHOICE = range(4)
# sigma_data, the standard deviation to which NVIDIA scales latents. Here it is about 1. It scales tangent and times.
DATA_STD = 0.5
# Mean and standard deviation of the logarithm of DATA_STD tan(t).
ANGLE_MEAN, ANGLE_STD = 0.2, 1.6
# The guidance that the model receives during training.
GUIDANCES = (4.0, 4.5, 5.0)
# Added to the tangent's norm before the tangent is divided by it.
SMALLEST_NORM = 0.1


class Draw(NamedTuple):
    """The random values of a batch. The values of an image depend on the image, not on its batch."""

    # [B, 32, h, w], standard normal.
    noise: torch.Tensor
    # [B], uniform in (0, 1), before the logit-normal distribution.
    times: torch.Tensor
    # bool [B], whether the caption is replaced by the empty one.
    dropped: torch.Tensor
    # [B], uniform in [0, 1). The guidance is chosen with it.
    choices: torch.Tensor


def draw_training(shape: Sequence[int], keys: Sequence[Sequence[int]], dropout: float) -> Draw:
    """Return the random values of images whose latents have `shape` [32, h, w], float32 on the CPU.

    Each key has whole numbers, such as seed, epoch and image. The values of an image depend only on its key, not on the
    batch, the process or earlier values. So a run that is resumed or divided among devices has the same values.
    """
    noise, times, dropped, choices = [], [], [], []
    for key in keys:
        rng = generator(TRAINING, key)
        noise.append(torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32)))
        times.append(rng.random())
        dropped.append(rng.random() < dropout)
        choices.append(rng.random())
    return Draw(torch.stack(noise), torch.tensor(times), torch.tensor(dropped), torch.tensor(choices))


def generator(stream: int, key: Sequence[int]) -> np.random.Generator:
    """Return the random generator of a `stream` and a `key`, which begins with the seed."""
    # The spawn key is separate from the seed, so a long seed cannot equal a shorter seed with more numbers.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key[0], spawn_key=(stream, *key[1:]))))


@contextmanager
def seeded_dropout(device: torch.device, key: Sequence[int]) -> Iterator[None]:
    """Seed torch's generator with `key`, such as seed, step and rank, before the dropout of an adapter.

    Afterwards the generators have their earlier states again.
    """
    seed = int(generator(DROPOUT, key).integers(2**63))
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        # torch.manual_seed would seed the generators of all GPUs, of which only this one's is restored.
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            with current_device(device):
                torch.get_device_module(device).manual_seed(seed)
        yield


def logit_normal(times: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """Return sigmoid(z) of the normal quantiles z at `times`."""
    return torch.sigmoid(mean + std * torch.special.ndtri(times.clamp(1e-6, 1 - 1e-6)))


def drop_captions(
    embeds: torch.Tensor, mask: torch.Tensor, dropped: torch.Tensor, empty: Mapping[str, torch.Tensor], shared: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `embeds` [B, T, C] and `mask` [B, T] with the `empty` prompt's for the captions that are dropped.

    `empty` has embeds [300, C] and mask [300]. Guidance compares with the prediction for the empty prompt, so it is
    learned with the mask that sampling uses. With `shared` this is the caption's mask, as in NVIDIA's code
    (CaptionEmbedder.token_drop in diffusion/model/nets/sana_blocks.py replaces only the embeddings). Otherwise it is
    the mask of the empty prompt, as in diffusers.
    """
    width = embeds.shape[1]
    embeds = torch.where(dropped[:, None, None], empty["embeds"][None, :width].to(embeds), embeds)
    if not shared:
        mask = torch.where(dropped[:, None], empty["mask"][None, :width].to(mask), mask)
    return embeds, mask


def flow_loss(
    transformer: SanaTransformer2DModel,
    x0: torch.Tensor,
    captions: tuple[torch.Tensor, torch.Tensor],
    noise: torch.Tensor,
    sigma: torch.Tensor,
    weight: torch.Tensor | None = None,
    control: Control | None = None,
) -> torch.Tensor:
    """Return the squared error [B] of the velocity noise - x0 for latents `x0` [B, 32, h, w], in the noise's dtype.

    x = (1 - sigma) x0 + sigma noise, sigma [B] (SANA paper, section 2.3). `captions` are embeds [B, T, C] and mask
    [B, T]. `weight` [B, 1, h, w], from 0 to 1, weights the mean. `control` steers the model, with a latent for each
    image.

    The loss of an untrained model is 1 + the variance of x0, about 2. A trained model has about 0.7 at 1024 px, which
    cannot be reduced.
    """
    embeds, mask = captions
    s = sigma.view(-1, 1, 1, 1)
    x = torch.lerp(x0, noise, s)
    timestep = model_timestep(transformer, sigma * 1000)
    guidance = None
    if transformer.config.guidance_embeds:
        guidance = torch.full_like(sigma, GUIDANCE * transformer.config.guidance_embeds_scale)
    x = x.to(embeds.dtype)
    residuals: Sequence[torch.Tensor | None] = ()
    if control is not None:
        residuals = steering_residuals(control, x, embeds, timestep, mask)
    with steered(transformer, residuals) as samples:
        predicted = transformer(
            x,
            embeds,
            timestep,
            guidance=guidance,
            encoder_attention_mask=mask,
            controlnet_block_samples=samples,
            return_dict=False,
        )[0]
    return mean_error(predicted.to(noise.dtype) - (noise - x0), weight)


def mean_error(difference: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the mean square [B] of `difference` [B, 32, h, w], weighted with `weight` [B, 1, h, w]."""
    error = difference.square()
    if weight is None:
        return error.mean(dim=(1, 2, 3))
    return (error * weight).sum(dim=(1, 2, 3)) / (weight.sum(dim=(1, 2, 3)) * error.shape[1]).clamp(min=1e-6)


def training_sigmas(times: torch.Tensor, shift: float, loss: Loss | None = None) -> torch.Tensor:
    """Return the shifted sigmas of training for uniform `times`. The default is logit-normal (0, 1), as for SANA.

    "mode" is equation 20 of arXiv 2403.03206.
    """
    loss = loss or Loss()
    if loss.times == UNIFORM:
        return shift_sigmas(times, shift)
    if loss.times == MODE:
        bend = torch.cos(torch.pi / 2 * times).square() - 1 + times
        return shift_sigmas(1 - times - loss.mode_scale * bend, shift)
    return shift_sigmas(logit_normal(times, loss.logit_mean, loss.logit_std), shift)


def validation_times(count: int) -> torch.Tensor:
    """Return the middles of `count` equal parts of (0, 1)."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def validation_noise(shape: Sequence[int], key: Sequence[int]) -> torch.Tensor:
    """Return the noise [32, h, w] of a held-out image."""
    rng = generator(VALIDATION, key)
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32))


class Prompt(NamedTuple):
    """The prompts of a batch."""

    # [B, T, C] in the forward's dtype.
    embeds: torch.Tensor
    # [B, T].
    mask: torch.Tensor
    # [B], before the model's scale.
    guidance: torch.Tensor


class Point(NamedTuple):
    """The points of a batch on their trajectories."""

    # [B, 32, h, w].
    x: torch.Tensor
    # [B].
    angle: torch.Tensor
    # dx/dt, in the shape of x.
    velocity: torch.Tensor


def training_angles(times: torch.Tensor) -> torch.Tensor:
    """Return the angles that SANA-Sprint is trained at for uniform `times` in (0, 1)."""
    normal = torch.special.ndtri(times.clamp(1e-6, 1 - 1e-6))
    return torch.atan(torch.exp(ANGLE_MEAN + ANGLE_STD * normal) / DATA_STD)


def training_guidance(choices: torch.Tensor) -> torch.Tensor:
    """Return one of GUIDANCES for each of the uniform `choices` in [0, 1)."""
    return torch.tensor(GUIDANCES)[(choices * len(GUIDANCES)).long()]


def data_point(x0: torch.Tensor, noise: torch.Tensor, angle: torch.Tensor) -> Point:
    """Return the point at `angle` [B] between latents and noise [B, 32, h, w], and the velocity there."""
    cos, sin = cos_sin(angle)
    return Point(cos * x0 + sin * noise, angle, cos * noise - sin * x0)


def cos_sin(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of `angle` [B] as [B, 1, 1, 1]."""
    return torch.cos(angle).view(-1, 1, 1, 1), torch.sin(angle).view(-1, 1, 1, 1)


def trigflow_velocity(
    transformer: SanaTransformer2DModel, x: torch.Tensor, angle: torch.Tensor, prompt: Prompt
) -> torch.Tensor:
    """Return TrigFlow's F [B, 32, h, w] of a model that predicts flow's noise - x0, in the dtype of `x`.

    Without training: flow's latents are x / (cos(t) + sin(t)) at sigma = sin(t) / (cos(t) + sin(t)) (SANA-Sprint,
    section 3.1). The model receives the guidance if it was distilled for it.
    """
    cos, sin = cos_sin(angle)
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
def tangent(transformer: SanaTransformer2DModel, point: Point, prompt: Prompt, ramp: float = 1.0) -> torch.Tensor:
    """Return cos(t) dx0/dt [B, 32, h, w] along the trajectory at `point`.

    `ramp`, from 0 to 1, scales the terms with the model's own derivative. They are unstable at the start of a training
    (sCM, section 4.1, tangent warmup).
    """
    cos, sin = cos_sin(point.angle)
    # The fused kernels of attention have no forward-mode derivative.
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        # Multiplied by cos(t) sin(t), so that it stays small at both ends (sCM, section 4.1, JVP rearrangement).
        x = forward_ad.make_dual(point.x, cos * sin * point.velocity)
        angle = forward_ad.make_dual(point.angle, (cos * sin).flatten())
        predicted, change = forward_ad.unpack_dual(trigflow_velocity(transformer, x, angle, prompt))
    assert change is not None
    return cos.square() * (point.velocity - predicted) - ramp * (cos * sin * point.x + change)


def consistency_loss(
    transformer: SanaTransformer2DModel, point: Point, prompt: Prompt, ramp: float, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss [B] whose gradient moves F against its normalised tangent. `weight` is as in `flow_loss`.

    Its value is not an error. It is the length of the normalised tangent, divided by the size of the latents.
    """
    change = DATA_STD * tangent(transformer, point, prompt, ramp)
    change = change / (torch.linalg.vector_norm(change, dim=(1, 2, 3), keepdim=True) + SMALLEST_NORM)
    velocity = trigflow_velocity(transformer, point.x, point.angle, prompt)
    return mean_error(velocity - velocity.detach() - change, weight) / (DATA_STD * torch.tan(point.angle))


def consistency_error(
    transformer: SanaTransformer2DModel, point: Point, prompt: Prompt, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the squared tangent [B]. It is 0 if the model gives the same x0 along the whole trajectory."""
    return mean_error(tangent(transformer, point, prompt), weight)
