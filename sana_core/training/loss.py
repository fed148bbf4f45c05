"""The losses: SANA's flow matching, and SANA-Sprint's continuous-time consistency.

Flow matching uses logit-normal times unless others are set, with the model's shift. For consistency, in TrigFlow,
x = cos(t) x0 + sin(t) noise at the angle t from 0 to pi / 2, and a model F gives x0 as cos(t) x - sin(t) F. This x0
should stay the same along the trajectory, whose velocity dx/dt is cos(t) noise - sin(t) x0. So the loss needs the
derivative of F along the trajectory (JVP), which one forward computes.

Sources: SANA-Sprint (arXiv 2503.09641), section 3; sCM (arXiv 2410.11081), sections 3 and 4; the arithmetic and its
constants as in train_scripts/train_scm_ladd.py and configs/sana_sprint_config of NVlabs/Sana, and in diffusers'
examples/research_projects/sana/train_sana_sprint_diffusers.py. Of theirs, what learns the weight of each time and the
adversarial loss (LADD) are not here.
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
from .controlnet import steered, steering_residuals
from .settings import MODE, UNIFORM, Loss

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

# so that the random values of training, of validation, of dropout and of variants are different ones
TRAINING, VALIDATION, DROPOUT, CHOICE = range(4)
# sigma_data: how large NVIDIA scales latents, which are about 1 here; it sets the scale of the tangent and of the times
DATA_STD = 0.5
# of the logarithm of DATA_STD tan(t)
ANGLE_MEAN, ANGLE_STD = 0.2, 1.6
# The guidance that the model receives during training.
GUIDANCES = (4.0, 4.5, 5.0)
# what is added to the tangent's norm before it divides the tangent
SMALLEST_NORM = 0.1


class Draw(NamedTuple):
    """The random values of a batch; those of each image depend on that image alone."""

    noise: torch.Tensor  # [B, 32, h, w], standard normal
    times: torch.Tensor  # [B], uniform in (0, 1) before the logit-normal
    dropped: torch.Tensor  # bool [B]: the caption gives way to the empty one
    choices: torch.Tensor  # [B], uniform in [0, 1), for a loss that has something to choose


def draw_training(shape: Sequence[int], keys: Sequence[Sequence[int]], dropout: float) -> Draw:
    """Return the random values of images whose latents have `shape` [32, h, w], float32 on the CPU.

    Each of `keys` are whole numbers, such as seed, epoch and image, that alone decide on that image's values: not
    its batch, nor the process, nor what was drawn before. So a run that is resumed, or shared out over devices, draws
    what an uninterrupted one draws.
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
    """Return the generator of a seed and the numbers behind it in `key`, another one for each `stream`."""
    # a spawn key keeps its words apart from the seed's, of which there are as many as the seed is long
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key[0], spawn_key=(stream, *key[1:]))))


@contextmanager
def seeded_dropout(device: torch.device, key: Sequence[int]) -> Iterator[None]:
    """Seed torch's generator with `key`, such as seed, step and rank, for the dropout of an adapter.

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
    """Return sigmoid(z) of the normal z that lies at the share `times` of its distribution."""
    return torch.sigmoid(mean + std * torch.special.ndtri(times.clamp(1e-6, 1 - 1e-6)))


def drop_captions(
    embeds: torch.Tensor, mask: torch.Tensor, dropped: torch.Tensor, empty: Mapping[str, torch.Tensor], shared: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `embeds` [B, T, C] and `mask` [B, T] with the `empty` prompt's for the captions that are dropped.

    `empty` has embeds [300, C] and mask [300]. Guidance compares with what is learned here, so the mask is the one that
    the model generates with: the caption's if it is `shared`, as in NVIDIA's code (CaptionEmbedder.token_drop in
    diffusion/model/nets/sana_blocks.py replaces the embeddings alone), else the empty prompt's own, as in diffusers'.
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
    [B, T]. With `weight` [B, 1, h, w], from 0 to 1, the mean is over what it lets through. Untrained: 1 + the variance
    of x0, about 2; trained: about 0.7 at 1024 px, irreducible. `control`, with a latent for each image, steers the
    model.
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
    """Return the mean square [B] of `difference` [B, 32, h, w], over what `weight` [B, 1, h, w] lets through."""
    error = difference.square()
    if weight is None:
        return error.mean(dim=(1, 2, 3))
    return (error * weight).sum(dim=(1, 2, 3)) / (weight.sum(dim=(1, 2, 3)) * error.shape[1]).clamp(min=1e-6)


def training_sigmas(times: torch.Tensor, shift: float, loss: Loss | None = None) -> torch.Tensor:
    """Return the sigmas of training for uniform `times`, as `loss` has them, by default logit-normal (0, 1) as SANA's;
    then shifted. "mode" is equation 20 of arXiv 2403.03206."""
    loss = loss or Loss()
    if loss.times == UNIFORM:
        return shift_sigmas(times, shift)
    if loss.times == MODE:
        bend = torch.cos(torch.pi / 2 * times).square() - 1 + times
        return shift_sigmas(1 - times - loss.mode_scale * bend, shift)
    return shift_sigmas(logit_normal(times, loss.logit_mean, loss.logit_std), shift)


def validation_times(count: int) -> torch.Tensor:
    """Return the middles of `count` equal shares of (0, 1): every validation sees the same times."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def validation_noise(shape: Sequence[int], key: Sequence[int]) -> torch.Tensor:
    """Return the noise [32, h, w] of a held-out image, the same in every validation."""
    rng = generator(VALIDATION, key)
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32))


class Prompt(NamedTuple):
    """What a batch of images is asked to show."""

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
