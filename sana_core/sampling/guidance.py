"""Guidance: classifier-free guidance, its interval, perturbed attention (PAG), distilled guidance."""

from __future__ import annotations

import re
import threading
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InputError
from ..model.block import Constants, Perturbation
from ..model.controlnet import Control, control_residuals
from ..model.forward import pad_prompts, prepare, shard_velocity, velocity
from ..model.known_models import Defaults, TransformerConfig, edits_images, model_defaults, perturbed_block
from ..model.reference import model_timestep, reference_of
from ..model.row_shards import Shard, ShardSpec
from ..runtime.checks import check_number
from .samplers import check_distilled, find_sampler
from .schedules import check_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffusers import SanaControlNetModel, SanaTransformer2DModel

    from .samplers import Denoiser
    from .step_graph import StepGraph

LARGEST_GUIDANCE = 100.0


def choose_sampling(
    config: TransformerConfig,
    sampler: str | None,
    steps: int | None,
    guidance: float | None,
    begins_with_image: bool = False,
) -> Defaults:
    """Return the three values, with the defaults of the model with `config` in place of None."""
    defaults = model_defaults(config, begins_with_image)
    sampler = sampler or defaults.sampler
    steps = defaults.steps if steps is None else steps
    guidance = defaults.guidance if guidance is None else guidance
    find_sampler(sampler)
    check_steps(steps)
    check_number("guidance", guidance, 0, LARGEST_GUIDANCE)
    check_distilled(config, sampler=sampler, steps=steps, guidance=guidance)
    return Defaults(sampler, steps, guidance)


class PerturbedAttention(NamedTuple):
    """Perturbed-attention guidance (Ahn et al. 2024): its scale, and the blocks whose self-attention it perturbs."""

    scale: float
    blocks: frozenset[int]


class EditImage(NamedTuple):
    """The image that VIBE edits. Above 1, `guidance` costs a third pass, without the image (Brooks et al. 2022)."""

    latents: torch.Tensor  # [1, 32, h, w], in the model's scale
    guidance: float


class ControlledModel(NamedTuple):
    """A transformer and its ControlNet, which acts in all passes of a step."""

    transformer: SanaTransformer2DModel
    control: Control | None = None
    # Compile it with torch.compile, with CUDA graphs where torch supports them.
    compiled: bool = False


class Prepared(NamedTuple):
    """Everything that stays the same in all steps with the same passes and image size."""

    constants: Constants
    # Distilled models only: the guidance that they embed.
    guidance: torch.Tensor | None
    perturbation: Perturbation | None
    # Constants of each ControlNet of the chain.
    steering: Sequence[Constants]


def perturbed_attention(config: TransformerConfig, scale: float, blocks: str, prefix: str = "") -> PerturbedAttention:
    """Return perturbed attention for a transformer with `config`. `blocks` has numbers of blocks, like "8" or "7, 8".

    If `blocks` is empty, it perturbs the block that NVIDIA perturbs. In a model with another number of blocks, it
    perturbs the block at two fifths of the depth. Errors name the inputs `prefix`scale and `prefix`blocks.
    """
    check_number(f"{prefix}scale", scale, 0, LARGEST_GUIDANCE)
    if config.guidance_embeds:
        raise InputError(
            "model: got a SANA-Sprint model, which has its guidance built in; leave perturbed attention out"
        )
    last = config.num_layers - 1
    if not blocks.strip():
        return PerturbedAttention(scale, frozenset({perturbed_block(config.num_layers)}))
    parts = [part.strip() for part in blocks.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", part) and int(part) <= last for part in parts):
        name = f"{prefix}blocks"
        raise InputError(f"{name}: got {blocks!r:.60}, expected numbers from 0 to {last}, like 8 or 7, 8")
    return PerturbedAttention(scale, frozenset(map(int, parts)))


class ShardedModel(NamedTuple):
    """Several devices that compute each image together.

    `run(x, work, parts)` splits the latents `x` into shards, calls `work` for each shard and joins the velocities.
    `parts`: number of passes in the batch.
    """

    run: Callable[[torch.Tensor, Callable[[Shard], torch.Tensor], int], torch.Tensor]
    # One transformer per device. Shard.member is the index.
    members: Sequence[SanaTransformer2DModel]


def run_unsharded(x: torch.Tensor, work: Callable[[Shard], torch.Tensor], parts: int) -> torch.Tensor:
    """Call `work` once, with all of `x` as one shard."""
    return work(Shard(0, x, ShardSpec(0, 1, 0, 1, slice(0, x.shape[2])), x.shape[2], None))


def denoiser(
    transformer: SanaTransformer2DModel | ControlledModel | ShardedModel,
    cond: tuple[torch.Tensor, torch.Tensor],
    uncond: tuple[torch.Tensor, torch.Tensor],
    guidance: float,
    whole_timesteps: bool = False,
    perturbed: PerturbedAttention | None = None,
    interval: tuple[float, float] = (1.0, 0.0),
    graph: StepGraph | None = None,
    edit: EditImage | None = None,
) -> Denoiser:
    """Return model(x, sigma) -> x0. `cond` and `uncond` are (embeds, mask) of one prompt, or of one prompt per image.

    The result follows the reference of `transformer`. NVIDIA's reference needs `uncond` with its padding.
    `whole_timesteps`: see Sampler. With a ShardedModel, several devices compute each image together.

    Classifier-free guidance acts while sigma is in `interval`, the larger sigma first (Kynkaanniemi et al. 2024). There
    is no uncond pass at guidance 1, outside the interval, and in distilled models, which embed the guidance. All passes
    of a step are one batch. `graph` may compute the forwards. It is for a single device without a ControlNet. `edit` is
    for models that edit images. Without it they generate an image of the prompt.
    """
    run, models = transformer if isinstance(transformer, ShardedModel) else (run_unsharded, [transformer])
    members = [item if isinstance(item, ControlledModel) else ControlledModel(item) for item in models]
    # Read once, because diffusers searches all modules for the dtype.
    config, dtype = members[0].transformer.config, members[0].transformer.dtype
    forward = torch.compile(velocity, mode=compile_mode()) if members[0].compiled else velocity
    if reference_of(members[0].transformer).shared_mask:
        uncond = uncond[0], cond[1]
    prepared: dict[tuple, Prepared] = {}

    def model(x: torch.Tensor, sigma: float) -> torch.Tensor:
        inside = interval[1] <= sigma <= interval[0]
        guided = guidance != 1 and not config.guidance_embeds and inside
        image_guided = edit is not None and guided and edit.guidance > 1
        passes = [*[uncond] * (guided + image_guided), cond, *[cond] * (perturbed is not None)]
        count = len(passes)

        def work(shard: Shard) -> torch.Tensor:
            member, batch, key = members[shard.member], shard.x, (guided, shard.member, x.shape)
            if key not in prepared:
                prepared[key] = prepare_passes(member, passes, batch.device, x.shape, perturbed, guidance)
            constants, embedded, perturbation, steering = prepared[key]
            time = times_of(member.transformer, sigma, whole_timesteps, batch)
            residuals = steer(member.control, batch, sigma, whole_timesteps, steering)
            member_forward = partial(forward, member.transformer)

            def compute(batch: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
                part, times = shard._replace(x=batch), time.expand(count * len(x))
                return shard_velocity(member_forward, part, times, constants, embedded, perturbation, residuals)

            return compute(batch, time) if graph is None else graph(key, compute, batch, time)

        inputs = x.repeat(count, 1, 1, 1).to(dtype)
        if edits_images(config):
            image = torch.zeros_like(inputs) if edit is None else edit.latents.to(inputs).repeat(len(inputs), 1, 1, 1)
            image[: len(x) * image_guided] = 0
            inputs = torch.cat([inputs, image], 1)
        velocities = run(inputs, work, count).float()
        # Guidance combines x0 in this order, as ComfyUI does, so that the bits are the same with and without ComfyUI.
        x0s = list(x - sigma * velocities.unflatten(0, (count, len(x))))
        return combine(x0s, guided, guidance, perturbed, edit.guidance if edit is not None and image_guided else None)

    return model


def image_shift(without_text: torch.Tensor, without_image: torch.Tensor, guidance: float) -> torch.Tensor:
    """Return the shift by image guidance of the x0 of the passes with and without text, before these are combined.

    With VIBE's names: v = v_none + g (v_text - v_image) + i (v_image - v_none) is the usual guidance of v_image and
    v_text, both shifted by (1 - i) (v_none - v_image).
    """
    return (1 - guidance) * (without_image - without_text)


def combine(
    x0s: list[torch.Tensor],
    guided: bool,
    guidance: float,
    perturbed: PerturbedAttention | None,
    image_guidance: float | None = None,
) -> torch.Tensor:
    """Combine the x0 of all passes.

    The order is: without image (if `image_guidance`), without prompt (if `guided`), with prompt, perturbed (if
    `perturbed`).
    """
    if perturbed:
        last = x0s.pop()
        shift = perturbed.scale * (x0s[-1] - last)
        x0s = [x0 + shift for x0 in x0s]
    if image_guidance is not None:
        without_image = x0s.pop(0)
        shift = image_shift(x0s[0], without_image, image_guidance)
        x0s = [x0 + shift for x0 in x0s]
    return x0s[0] + (x0s[1] - x0s[0]) * guidance if guided else x0s[0]


def compile_mode() -> str:
    """Return the mode of torch.compile that works in this thread.

    Before torch 2.14, CUDA graphs fail in all threads but the main thread.
    """
    any_thread = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    return "reduce-overhead" if any_thread or threading.current_thread() is threading.main_thread() else "default"


def prepare_passes(
    member: ControlledModel,
    passes: list[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    shape: torch.Size,
    perturbed: PerturbedAttention | None,
    guidance: float,
) -> Prepared:
    """Compute everything that stays the same in all steps. `passes`: (embeds, mask) of each pass.

    `shape`: shape of the latents. If one pass has a prompt per image, the prompt of each other pass is repeated. The
    last pass is the perturbed one, if `perturbed`.
    """
    rows = max(len(embeds) for embeds, _ in passes)
    embeds, mask = (torch.cat([part[k].expand(rows, *part[k].shape[1:]) for part in passes]) for k in (0, 1))
    embeds, mask = embeds.to(device, member.transformer.dtype), mask.to(device)
    constants = prepare(member.transformer, embeds, mask, *shape[2:])
    if member.compiled:
        constants = pad_prompts(constants, mask.shape[1])
    controls = member.control.chain if member.control is not None else ()
    steering = [prepare(control.controlnet, embeds.to(dtype_of(control)), mask, *shape[2:]) for control in controls]
    perturbation = None
    if perturbed:
        images = torch.arange(len(passes) * shape[0], device=device)[:, None, None] >= (len(passes) - 1) * shape[0]
        perturbation = Perturbation(images, perturbed.blocks)
    config, embedded = member.transformer.config, None
    if config.guidance_embeds:
        # Multiply in float32, as diffusers and ComfyUI do, so that the bits are the same.
        embedded = torch.full((len(passes) * shape[0],), guidance, device=device) * config.guidance_embeds_scale
    return Prepared(constants, embedded, perturbation, steering)


def dtype_of(control: Control) -> torch.dtype:
    """Return the dtype of a ControlNet. diffusers would search all of its modules."""
    return control.controlnet.input_block.weight.dtype


def steer(
    control: Control | None, x: torch.Tensor, sigma: float, whole_timesteps: bool, steering: Sequence[Constants]
) -> list[torch.Tensor | None]:
    """Return the residuals of a chain of ControlNets for all passes in `x` at `sigma`. Without one the list is empty.

    They are scaled and added in ComfyUI's order, so that the bits are the same with and without ComfyUI.
    """
    total: list[torch.Tensor | None] = []
    for link, constants in zip(control.chain if control is not None else (), steering, strict=True):
        if not link.interval[1] <= sigma <= link.interval[0]:
            continue
        inputs = x.to(dtype_of(link))
        latents = link.latents.to(inputs)
        latents = latents.repeat(len(x) // len(latents), 1, 1, 1)
        times = times_of(link.controlnet, sigma, whole_timesteps, x).expand(len(x))
        residuals = control_residuals(link.controlnet, inputs, times, constants, latents)
        if link.strength != 1:
            residuals = [one if one is None else one * link.strength for one in residuals]
        total = [add_residuals(*pair) for pair in zip_longest(total, residuals)]
    return total


def add_residuals(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum. None adds nothing."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def times_of(
    model: SanaTransformer2DModel | SanaControlNetModel, sigma: float, whole_timesteps: bool, x: torch.Tensor
) -> torch.Tensor:
    """Return the model's timestep for `sigma`, a float32 scalar on the device of `x`."""
    # The schedules are exact for this product in float32 (see flow_dpm_sigmas).
    time = model_timestep(model, torch.tensor(sigma, dtype=torch.float32) * 1000, whole_timesteps)
    # A fill by value does not wait for the device. A copy from the CPU would.
    return torch.full((), time.item(), dtype=torch.float32, device=x.device)
