"""What leads the sampling to the prompt: classifier-free guidance, its interval, perturbed attention, distillation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .checks import check_number
from .errors import InputError
from .forward import Constants, Perturbation, prepare, velocity
from .reference import model_timestep, perturbed_block, reference_of

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

    from .sampling import Denoiser

LARGEST_GUIDANCE = 100.0


class PerturbedAttention(NamedTuple):
    """Perturbed-attention guidance (Ahn et al. 2024): its scale, and the blocks whose self-attention it perturbs."""

    scale: float
    blocks: frozenset[int]


def perturbed_attention(config: Any, scale: float, blocks: str) -> PerturbedAttention:
    """Return the perturbed attention of the transformer with `config`, `blocks` being like "8" or "7, 8".

    Without blocks it is the one that NVIDIA perturbs, in models of other depths the one at two fifths. Raises
    InputError for a scale that is not from 0 to 100, blocks that the model does not have, and a SANA-Sprint model,
    which has no place for it.
    """
    check_number("scale", scale, 0, LARGEST_GUIDANCE)
    if config.guidance_embeds:
        raise InputError("model: got a SANA-Sprint model, which has its guidance built in; remove SANA PAG")
    last = config.num_layers - 1
    if not blocks.strip():
        return PerturbedAttention(scale, frozenset({perturbed_block(config.num_layers)}))
    parts = [part.strip() for part in blocks.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", part) and int(part) <= last for part in parts):
        raise InputError(f"blocks: got {blocks!r:.60}, expected numbers from 0 to {last}, like 8 or 7, 8")
    return PerturbedAttention(scale, frozenset(map(int, parts)))


def denoiser(
    transformer: SanaTransformer2DModel,
    cond: tuple[torch.Tensor, torch.Tensor],
    uncond: tuple[torch.Tensor, torch.Tensor],
    guidance: float,
    whole_timesteps: bool = False,
    perturbed: PerturbedAttention | None = None,
    interval: tuple[float, float] = (1.0, 0.0),
    compiled: bool = False,
) -> Denoiser:
    """Return model(x, sigma) -> x0. `cond` and `uncond` are (embeds, mask) of one prompt, or of one for each picture.

    It computes what the reference of `transformer` computes; NVIDIA's wants the embeddings of `uncond` whole, behind
    its own tokens too. `whole_timesteps` are those of the sampler.

    Classifier-free guidance counts while sigma is in `interval`, high end first (Kynkaanniemi et al. 2024). At guidance
    1, outside the interval and in a distilled model, which gets it as an embedding, there is no uncond pass. All passes
    of a step are one batch. `compiled` runs the forward through torch.compile, with CUDA graphs where there is CUDA.
    """
    # diffusers finds the dtype by looking through all modules
    config, dtype, rules = transformer.config, transformer.dtype, reference_of(transformer)
    forward = torch.compile(velocity, mode="reduce-overhead") if compiled else velocity
    prepared: dict[tuple, tuple[Constants, Perturbation | None]] = {}

    def constants(guided: bool, x: torch.Tensor) -> tuple[Constants, Perturbation | None]:
        key = (guided, x.shape)
        if key not in prepared:
            passes = [uncond] if guided else []
            passes += [cond, cond] if perturbed else [cond]
            rows = max(len(embeds) for embeds, _ in passes)
            if guided and rules.shared_mask:
                passes[0] = (uncond[0], cond[1])
            # one mask width for prompts that were encoded together or apart
            embeds, mask = (
                torch.cat([part[k].expand(rows, *part[k].shape[1:]) for part in passes]).to(x.device) for k in (0, 1)
            )
            perturbation = None
            if perturbed:
                pictures = torch.zeros(len(passes) * len(x), 1, 1, dtype=torch.bool, device=x.device)
                pictures[-len(x) :] = True
                perturbation = Perturbation(pictures, perturbed.blocks)
            prepared[key] = prepare(transformer, embeds.to(dtype), mask, *x.shape[-2:]), perturbation
        return prepared[key]

    def model(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        high, low = interval
        inside = interval == (1.0, 0.0) or low <= float(sigma) <= high
        guided = guidance != 1 and not config.guidance_embeds and inside
        fixed, perturbation = constants(guided, x)
        count = 1 + guided + (perturbation is not None)
        batch = x.repeat(count, 1, 1, 1).to(dtype)
        timestep = model_timestep(transformer, sigma * 1000, whole_timesteps).to(x.device).expand(len(batch))
        embedded = None
        if config.guidance_embeds:
            embedded = torch.full((len(batch),), guidance * config.guidance_embeds_scale, device=x.device)
        parts = list(forward(transformer, batch, timestep, fixed, embedded, perturbation).float().chunk(count))
        without = parts.pop(0) if guided else None
        with_prompt = parts[0]
        v = with_prompt if without is None else without + guidance * (with_prompt - without)
        if perturbed:
            v = v + perturbed.scale * (with_prompt - parts[1])
        return x - sigma * v

    return model
