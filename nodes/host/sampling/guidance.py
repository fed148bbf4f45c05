"""Guidance as patches of a MODEL, for every sampler and guider, and what SANA-Sprint refuses of it.

Perturbed attention, the interval and the mask that prompts share wrap the call that computes what a step needs of the
positive and the negative prompt, so that all passes stay one batch, and other patches of the guidance (APG, CFG-Zero)
act on what they return.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import comfy.conds
import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP

from ....sana_core.errors import InputError
from ....sana_core.model.known_models import SPRINT, is_video
from ....sana_core.model.reference import reference_of
from ....sana_core.sampling.guidance import PerturbedAttention, perturbed_attention
from ..compat.patches import INTERVAL, PERTURBED, SHARED_MASK
from .model import SanaModel
from .prompts import Prompt, PromptCondition

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# sigma as a number of the host, from samplers that know it; reading it from the device would wait for it
SIGMA = "sana_sigma"
# core's name for multistep consistency sampling; on a flow model its step is that of SCM
LCM = "sample_lcm"
REMEDY = "use SANA Sprint, or lcm with cfg 1"


def require_sana(model: torch.nn.Module) -> SanaModel:
    """Return `model`. Raises InputError unless it is a SANA model."""
    if not isinstance(model, SanaModel):
        raise InputError(f"model: got {type(model).__name__}, expected a SANA model; use SANA Loader")
    return model


def require_images(model: torch.nn.Module) -> SanaModel:
    """Return `model`. Raises InputError unless it is a SANA model that generates images."""
    sana = require_sana(model)
    if is_video(sana.diffusion_model.config):
        raise InputError(
            "model: got SANA-Video, expected a SANA model of images; generate videos with SANA Video Latent and SANA "
            "Sampler"
        )
    return sana


def prompt_of(cond: dict) -> Prompt:
    return cond["model_conds"]["prompt"].cond


def is_perturbed(conds: list[dict] | None) -> bool:
    return bool(conds) and prompt_of(conds[0]).perturbed is not None


def add_perturbed_attention(model: ModelPatcher, scale: float, blocks: str) -> ModelPatcher:
    """Return a copy of `model` with perturbed-attention guidance in place of any before.

    Raises InputError for a MODEL that is not SANA's or is SANA-Sprint, a scale that is not from 0 to 100, and blocks
    that the model does not have.
    """
    attention = perturbed_attention(require_images(model.model).diffusion_model.config, scale, blocks)
    patched = model.clone()
    patched.remove_wrappers_with_key(WrappersMP.CALC_COND_BATCH, PERTURBED)
    # for machines of a cluster, where no function can go
    patched.set_attachments(PERTURBED, (scale, blocks))
    if scale:

        def wrapper(executor, base, conds, *args):
            if len(conds) != 2 or conds[0] is None:
                return executor(base, conds, *args)
            with_prompt, without, perturbed = executor(base, [*conds, perturb(conds[0], attention)], *args)
            # the same shift on both sides passes through u + g (c - u) unchanged
            shift = scale * (with_prompt - perturbed)
            return [with_prompt + shift, without + shift]

        patched.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, PERTURBED, wrapper)
    return patched


def perturb(conds: list[dict], attention: PerturbedAttention) -> list[dict]:
    """Return copies of `conds` whose prompts ask for perturbed attention.

    Caches such as EasyCache know a pass by its uuid, so a copy has one of its own, the same in every step.
    """
    out = []
    for cond in conds:
        prompt = PromptCondition(prompt_of(cond).perturb(attention))
        own = uuid.uuid5(cond["uuid"], PERTURBED)
        out.append({**cond, "uuid": own, "model_conds": {**cond["model_conds"], "prompt": prompt}})
    return out


def limit_guidance(model: ModelPatcher, start: float, end: float) -> ModelPatcher:
    """Return a copy of `model` that is guided only from the share `start` of the sampling to `end`.

    Outside, the negative prompt is not computed, and each step takes half the time. Raises InputError for a
    MODEL that is not SANA's.
    """
    require_sana(model.model)
    patched = model.clone()
    patched.remove_wrappers_with_key(WrappersMP.CALC_COND_BATCH, INTERVAL)
    patched.set_attachments(INTERVAL, (start, end))

    def wrapper(executor, base, conds, x, sigma, options):
        perturbed = conds[2:]
        if len(conds) < 2 or conds[1] is None or not all(map(is_perturbed, perturbed)):
            return executor(base, conds, x, sigma, options)
        high, low = (base.model_sampling.percent_to_sigma(share) for share in (start, end))
        now = options.get("transformer_options", {}).get(SIGMA)
        if low <= (float(sigma[0]) if now is None else now) <= high:
            return executor(base, conds, x, sigma, options)
        with_prompt, _, *rest = executor(base, [conds[0], None, *perturbed], x, sigma, options)
        return [with_prompt, with_prompt, *rest]

    patched.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, INTERVAL, wrapper)
    return patched


def follow_reference(patcher: ModelPatcher) -> None:
    """Let the negative prompt have the positive one's mask where the model's reference computes it so."""
    if reference_of(patcher.model.diffusion_model).shared_mask:
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, SHARED_MASK, share_mask)


def share_mask(executor, base, conds, *args):
    """Give negative conditionings the mask of the positive one, of several that of the longest prompt."""
    positives = [prompt_of(cond) for each in conds for cond in each or [] if prompt_of(cond).field == "positive"]
    if positives:
        longest = max(positives, key=lambda prompt: prompt.tokens)
        conds = [each and [with_mask(cond, longest) for cond in each] for each in conds]
    return executor(base, conds, *args)


def with_mask(cond: dict, positive: Prompt) -> dict:
    """Return a negative `cond` with the mask of `positive`, for model and ControlNet; any other as it is."""
    if prompt_of(cond).field != "negative":
        return cond
    prompt = prompt_of(cond).masked_like(positive)
    changed = {"prompt": PromptCondition(prompt), "attention_mask": comfy.conds.CONDRegular(prompt.mask)}
    return {**cond, "model_conds": {**cond["model_conds"], **changed}}


def refuse_unfit_samplers(patcher: ModelPatcher) -> None:
    """Let a SANA-Sprint model refuse samplers that it was not distilled for, in whatever node they are."""
    if patcher.model.diffusion_model.config.guidance_embeds:
        patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, SPRINT, refuse_other_samplers)


def refuse_other_samplers(executor, guider, *args, **kwargs):
    """Raises InputError for a sampler of one ODE step after another, or for guidance by a second pass."""
    sampler = executor.class_obj
    # ours say themselves what they are for
    if type(sampler) is comfy.samplers.KSAMPLER and sampler.sampler_function.__name__ != LCM:
        name = sampler.sampler_function.__name__.removeprefix("sample_")
        raise InputError(f"sampler_name: got {name} for a SANA-Sprint model, expected scm; {REMEDY}")
    if getattr(guider, "cfg", 1.0) != 1:
        raise InputError(
            f"cfg: got {guider.cfg} for a SANA-Sprint model, whose guidance is built in, expected 1; {REMEDY}"
        )
    return executor(guider, *args, **kwargs)
