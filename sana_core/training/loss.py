"""The loss of SANA's training: flow matching, at logit-normal times unless others are set, with the model's shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..model.controlnet import Control
from ..model.known_models import GUIDANCE
from ..model.reference import model_timestep
from ..sampling.schedules import shift_sigmas
from .settings import MODE, UNIFORM, Loss
from .steering import steered, steering_residuals

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

# so that the random numbers of training, of validation, of dropout and of variants are different ones
TRAINING, VALIDATION, DROPOUT, CHOICE = range(4)


class Draw(NamedTuple):
    """The random numbers of a batch, of which each picture's depend on itself alone."""

    noise: torch.Tensor  # [B, 32, h, w], standard normal
    times: torch.Tensor  # [B], uniform in (0, 1) before the logit-normal
    dropped: torch.Tensor  # bool [B]: the caption gives way to the empty one
    choices: torch.Tensor  # [B], uniform in [0, 1), for a loss that has something to choose


def draw_training(shape: Sequence[int], keys: Sequence[Sequence[int]], dropout: float) -> Draw:
    """Return the random numbers of pictures whose latents have `shape` [32, h, w], float32 on the CPU.

    Each of `keys` are whole numbers, such as seed, epoch and picture, that alone decide on that picture's numbers: not
    its batch, nor the process, nor what was drawn before. So a run that is resumed, or shared out over devices, draws
    what an uninterrupted one draws.
    """
    noise, times, dropped, choices = [], [], [], []
    for key in keys:
        numbers = generator(TRAINING, key)
        noise.append(torch.from_numpy(numbers.standard_normal(tuple(shape), dtype=np.float32)))
        times.append(numbers.random())
        dropped.append(numbers.random() < dropout)
        choices.append(numbers.random())
    return Draw(torch.stack(noise), torch.tensor(times), torch.tensor(dropped), torch.tensor(choices))


def generator(stream: int, key: Sequence[int]) -> np.random.Generator:
    """Return the generator of a seed and the numbers behind it in `key`, another one for each `stream`."""
    # a spawn key keeps its words apart from the seed's, of which there are as many as the seed is long
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key[0], spawn_key=(stream, *key[1:]))))


def logit_normal(times: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """Return sigmoid(z) of the normal z that lies at the share `times` of its distribution."""
    return torch.sigmoid(mean + std * torch.special.ndtri(times.clamp(1e-6, 1 - 1e-6)))


def drop_captions(
    embeds: torch.Tensor, mask: torch.Tensor, dropped: torch.Tensor, empty: Mapping[str, torch.Tensor], shared: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `embeds` [B, T, C] and `mask` [B, T] with the `empty` prompt's for the captions that are dropped.

    `empty` has embeds [300, C] and mask [300]. Guidance compares with what is learnt here, so the mask is the one that
    the model is drawn with: the caption's if it is `shared`, as in NVIDIA's code (CaptionEmbedder.token_drop in
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
    embeds: torch.Tensor,
    mask: torch.Tensor,
    noise: torch.Tensor,
    sigma: torch.Tensor,
    weight: torch.Tensor | None = None,
    control: Control | None = None,
) -> torch.Tensor:
    """Return the squared error [B] of the velocity noise - x0 for latents `x0` [B, 32, h, w], in the noise's dtype.

    x = (1 - sigma) x0 + sigma noise, sigma [B] (SANA paper, section 2.3). With `weight` [B, 1, h, w], from 0 to 1, the
    mean is over what it lets through. A model that knows nothing has 1 + the variance of x0, about 2; trained ones
    have about 0.7 at 1024 px, which noise that cannot be guessed makes up. `control`, with a latent for each picture,
    steers the model.
    """
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
    """Return the noise [32, h, w] of a held-out picture, the same in every validation."""
    numbers = generator(VALIDATION, key)
    return torch.from_numpy(numbers.standard_normal(tuple(shape), dtype=np.float32))
