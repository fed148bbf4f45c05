"""Guidance: classifier-free guidance, its interval, perturbed attention (PAG), distilled guidance."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InputError
from ..model.controlnet import Control, control_residuals
from ..model.forward import Capture, Constants, Perturbation, pad_prompts, prepare, velocity
from ..model.known_models import TransformerConfig, perturbed_block
from ..model.reference import model_timestep, reference_of
from ..model.row_shards import RowRange, Shard, shard_constants
from ..runtime.checks import check_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffusers import SanaTransformer2DModel

    from ..model.step_cache import StepCache
    from .samplers import Denoiser

LARGEST_GUIDANCE = 100.0


class PerturbedAttention(NamedTuple):
    """Perturbed-attention guidance (Ahn et al. 2024): its scale, and the blocks whose self-attention it perturbs."""

    scale: float
    blocks: frozenset[int]


class ControlledModel(NamedTuple):
    """A transformer with a ControlNet, which acts in all passes of a step, and who looks at the states of one: that of
    the prompts."""

    transformer: SanaTransformer2DModel
    control: Control | None = None
    capture: Capture | None = None
    cache: StepCache | None = None  # of one sampling on one device
    compiled: bool = False  # by torch.compile, with CUDA graphs where it has them


class Prepared(NamedTuple):
    """What the prompts of a step's passes and the size of its images fix for all steps."""

    constants: Constants
    perturbation: Perturbation | None
    steering: Constants | None  # the ControlNet's


def perturbed_attention(config: TransformerConfig, scale: float, blocks: str) -> PerturbedAttention:
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


class ShardedModel(NamedTuple):
    """A model of several devices, which compute each image together.

    `run(x, work, parts)` returns the velocity at the latents `x` from what `work` makes of each shard, where the batch
    is so many equal parts, a pass each, and `members` are the models by their number in a shard.
    """

    run: Callable[[torch.Tensor, Callable[[Shard], torch.Tensor], int], torch.Tensor]
    members: Sequence[ControlledModel]


def run_unsharded(x: torch.Tensor, work: Callable[[Shard], torch.Tensor], parts: int) -> torch.Tensor:
    """Return what `work` makes of the latents `x` as one shard."""
    return work(Shard(0, x, RowRange(0, x.shape[2]), x.shape[2], None))


def denoiser(
    transformer: SanaTransformer2DModel | ControlledModel | ShardedModel,
    cond: tuple[torch.Tensor, torch.Tensor],
    uncond: tuple[torch.Tensor, torch.Tensor],
    guidance: float,
    whole_timesteps: bool = False,
    perturbed: PerturbedAttention | None = None,
    interval: tuple[float, float] = (1.0, 0.0),
) -> Denoiser:
    """Return model(x, sigma) -> x0. `cond` and `uncond` are (embeds, mask) of one prompt, or of one for each image.

    It computes what the reference of `transformer` does; NVIDIA's wants the embeddings of `uncond` whole, with padding.
    `whole_timesteps` are those of the sampler. With ShardedModel, several devices compute it together.

    Classifier-free guidance acts while sigma is in `interval`, high end first (Kynkaanniemi et al. 2024). At guidance
    1, outside it and in a distilled model, which embeds it, there is no uncond pass. All passes are one batch.
    """
    if not isinstance(transformer, ShardedModel):
        one = transformer if isinstance(transformer, ControlledModel) else ControlledModel(transformer)
        transformer = ShardedModel(run_unsharded, [one])
    run, members = transformer.run, transformer.members
    # once: diffusers finds the dtype by looking through all modules
    config, dtype = members[0].transformer.config, members[0].transformer.dtype
    forward = torch.compile(velocity, mode=compile_mode()) if members[0].compiled else velocity
    cache = PromptCache(members, cond, uncond, perturbed)

    def model(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        inside = interval == (1.0, 0.0) or interval[1] <= float(sigma) <= interval[0]
        guided = guidance != 1 and not config.guidance_embeds and inside
        count = 1 + guided + (perturbed is not None)

        def work(shard: Shard) -> torch.Tensor:
            member, batch = members[shard.member], shard.x
            fixed, perturbation, steering = cache.prepare(guided, shard, len(x))
            timestep = on_device(model_timestep(member.transformer, sigma * 1000, whole_timesteps), batch)
            embedded = None
            if config.guidance_embeds:
                # multiplied in float32, as in diffusers and in ComfyUI: the same bits
                embedded = torch.full((len(batch),), guidance, device=batch.device) * config.guidance_embeds_scale
            residuals = steer(member.control, shard, sigma, whole_timesteps, steering)
            times = timestep.expand(len(batch))
            return forward(member.transformer, batch, times, fixed, embedded, perturbation, residuals, shard.ops)

        velocities = run(x.repeat(count, 1, 1, 1).to(dtype), work, count).float()
        if members[0].capture is not None:
            members[0].capture.keep(int(guided), len(x))
        # guided in x0 and in this order, as ComfyUI does it: the same bits with and without the host
        return combine(list(x - sigma * velocities.unflatten(0, (count, len(x)))), guided, guidance, perturbed)

    return model


def combine(
    x0s: list[torch.Tensor], guided: bool, guidance: float, perturbed: PerturbedAttention | None
) -> torch.Tensor:
    """Return the guided x0 of those of a step's passes: without the prompt if `guided`, with it, perturbed."""
    if perturbed:
        last = x0s.pop()
        shift = perturbed.scale * (x0s[-1] - last)
        x0s = [x0 + shift for x0 in x0s]
    return x0s[0] + (x0s[1] - x0s[0]) * guidance if guided else x0s[0]


def compile_mode() -> str:
    """Return the mode of torch.compile that works in this thread: CUDA graphs fail in all but the first before 2.14."""
    any_thread = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    return "reduce-overhead" if any_thread or threading.current_thread() is threading.main_thread() else "default"


class PromptCache:
    """What the prompts fix for all steps, computed for each member in its first one."""

    def __init__(
        self,
        members: Sequence[ControlledModel],
        cond: tuple[torch.Tensor, torch.Tensor],
        uncond: tuple[torch.Tensor, torch.Tensor],
        perturbed: PerturbedAttention | None,
    ) -> None:
        self.members, self.cond, self.uncond, self.perturbed = members, cond, uncond, perturbed
        self.prepared: dict[tuple, Prepared] = {}

    def prepare(self, guided: bool, shard: Shard, images: int) -> Prepared:
        """Return what `shard` needs of a step of so many `images`, with the uncond pass if it is `guided`."""
        member, size = self.members[shard.member], (shard.height, shard.x.shape[3])
        key = (guided, shard.member, images, size)
        if key not in self.prepared:
            passes = [self.uncond] if guided else []
            passes += [self.cond, self.cond] if self.perturbed else [self.cond]
            if guided and reference_of(member.transformer).shared_mask:
                passes[0] = (self.uncond[0], self.cond[1])
            batch = BatchShape(shard.x.device, images, size)
            found = prepare_passes(member, passes, batch, self.perturbed)
            if member.compiled:
                found = found._replace(constants=pad_prompts(found.constants, self.cond[1].shape[1]))
            self.prepared[key] = found
        constants, perturbation, steering = self.prepared[key]
        if perturbation is not None:
            perturbation = perturbation._replace(images=shard.own(perturbation.images))
        own = shard_constants(constants, shard)._replace(capture=member.capture, cache=member.cache)
        return Prepared(own, perturbation, steering and shard_constants(steering, shard))


class BatchShape(NamedTuple):
    """A device, and how many images of which rows and columns a step computes there or has a part of."""

    device: torch.device
    images: int
    size: tuple[int, int]


def prepare_passes(
    models: ControlledModel,
    passes: list[tuple[torch.Tensor, torch.Tensor]],
    batch: BatchShape,
    perturbed: PerturbedAttention | None,
) -> Prepared:
    """Return what (embeds, mask) of the `passes` of a step fix for all steps."""
    embeds, mask = batch_passes(passes)
    embeds, mask = embeds.to(batch.device, models.transformer.dtype), mask.to(batch.device)
    perturbation = perturb_last(len(passes), batch, perturbed.blocks) if perturbed else None
    constants, steering = (
        None if model is None else prepare(model, embeds, mask, *batch.size)
        for model in (models.transformer, models.control and models.control.controlnet)
    )
    assert constants is not None
    return Prepared(constants, perturbation, steering)


def steer(
    control: Control | None, shard: Shard, sigma: torch.Tensor, whole: bool, prompts: Constants | None
) -> list[torch.Tensor | None]:
    """Return the residuals of `control` for all passes in `shard` at `sigma`, none without it."""
    if control is None or prompts is None:
        return []
    batch = shard.x
    latents = control.latents[:, :, slice(*shard.span)].to(batch)
    latents = latents.repeat(len(batch) // len(latents), 1, 1, 1)
    timestep = on_device(model_timestep(control.controlnet, sigma * 1000, whole), batch).expand(len(batch))
    return control_residuals(control.controlnet, batch, timestep, prompts, latents, shard.ops)


def on_device(number: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the scalar `number` on the device of `x`, by its value: that travels with the launch, where a copy from
    the CPU would be waited for."""
    return number if number.device == x.device else torch.full((), float(number), dtype=number.dtype, device=x.device)


def batch_passes(passes: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeds and mask of all passes of a step; where one has a prompt for each image, the others repeat."""
    rows = max(len(embeds) for embeds, _ in passes)
    # one mask width for prompts that were encoded together or apart
    embeds, mask = (torch.cat([part[k].expand(rows, *part[k].shape[1:]) for part in passes]) for k in (0, 1))
    return embeds, mask


def perturb_last(passes: int, batch: BatchShape, blocks: frozenset[int]) -> Perturbation:
    """Return the perturbation of the last of so many passes."""
    images = torch.zeros(passes * batch.images, 1, 1, dtype=torch.bool, device=batch.device)
    images[-batch.images :] = True
    return Perturbation(images, blocks)
