"""Guidance as patches of a MODEL, for every sampler and guider, and checks for distilled models, which have none.

Perturbed attention, the guidance interval and the shared mask wrap ComfyUI's calc_cond_batch, the call that computes
the passes of a step. So all passes stay in one batch, and other patches of guidance (APG, CFG-Zero) receive their
results.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import comfy.conds
import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP

from ....sana_core.errors import InputError
from ....sana_core.model.known_models import SPRINT, edits_images, is_video, model_of
from ....sana_core.model.reference import reference_of
from ....sana_core.sampling.guidance import PerturbedAttention, image_shift, perturbed_attention
from ..compat import IMAGE_GUIDANCE, INTERVAL, PERTURBED, SHARED_MASK
from .model import Prompt, PromptCondition, SanaModel

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# Key in transformer_options: sigma as a Python number, if the sampler has set it. Reading the tensor would wait for the
# device.
SIGMA = "sana_sigma"
# Keys in a conditioning with the latents of an image.
IMAGES = {"concat_latent_image", "reference_latents"}
# The part of the uuid of a pass whose image was removed.
WITHOUT_IMAGE = "sana_without_image"
# ComfyUI's name for multistep consistency sampling. For a flow model, its step equals a step of SCM.
LCM = "sample_lcm"
REMEDY = "use SANA Sampler with model_defaults, or lcm with cfg 1"


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
    """Return a copy of `model` with perturbed-attention guidance, which replaces an earlier one."""
    attention = perturbed_attention(require_images(model.model).diffusion_model.config, scale, blocks)
    patched = model.clone()
    patched.remove_wrappers_with_key(WrappersMP.CALC_COND_BATCH, PERTURBED)
    # The machines of a cluster receive these numbers, because the wrapper cannot be sent.
    patched.set_attachments(PERTURBED, (scale, blocks))
    if scale:

        def wrapper(executor, base, conds, *args):
            place = find_positive(conds)
            if place is None:
                return executor(base, conds, *args)
            # ComfyUI reverses the passes: the perturbed one is the last of the batch, as without ComfyUI. The bits of
            # a pass can depend on its place.
            perturbed, *passes = executor(base, [perturb(conds[place], attention), *conds], *args)
            # Guidance computes u + g (c - u). The same shift of u and c shifts the result once.
            shift = scale * (passes[place] - perturbed)
            return [x0 + shift for x0 in passes]

        patched.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, PERTURBED, wrapper)
    return patched


def perturb(conds: list[dict], attention: PerturbedAttention) -> list[dict]:
    """Return copies of `conds` for passes with perturbed attention.

    Caches such as EasyCache identify a pass by its uuid. So a copy has another uuid, which is the same in every step.
    """
    out = []
    for cond in conds:
        prompt = PromptCondition(prompt_of(cond).perturb(attention))
        pass_id = uuid.uuid5(cond["uuid"], PERTURBED)
        out.append({**cond, "uuid": pass_id, "model_conds": {**cond["model_conds"], "prompt": prompt}})
    return out


def limit_guidance(model: ModelPatcher, start: float, end: float) -> ModelPatcher:
    """Return a copy of `model` that is guided only between `start` and `end`, which are shares of the sampling.

    Outside this interval, the negative prompt is not computed, and a step takes half the time.
    """
    require_sana(model.model)
    patched = model.clone()
    patched.remove_wrappers_with_key(WrappersMP.CALC_COND_BATCH, INTERVAL)
    patched.set_attachments(INTERVAL, (start, end))

    def wrapper(executor, base, conds, x, sigma, options):
        place = find_positive(conds)
        if place is None:
            return executor(base, conds, x, sigma, options)
        high, low = (base.model_sampling.percent_to_sigma(share) for share in (start, end))
        now = options.get("transformer_options", {}).get(SIGMA)
        if low <= (float(sigma[0]) if now is None else now) <= high:
            return executor(base, conds, x, sigma, options)
        computed = [cond if i == place or is_perturbed(cond) else None for i, cond in enumerate(conds)]
        results = executor(base, computed, x, sigma, options)
        return [results[place] if cond is None else x0 for cond, x0 in zip(computed, results, strict=True)]

    patched.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, INTERVAL, wrapper)
    return patched


def find_positive(conds: list[list[dict] | None]) -> int | None:
    """Return the place of the positive prompt among the passes of a guided step. None: this call has another purpose.

    Most guiders have it first, core's DualCFGGuider last.
    """
    fields = [cond and not is_perturbed(cond) and prompt_of(cond[0]).field for cond in conds]
    return fields.index("positive") if len(conds) > 1 and "positive" in fields else None


def add_image_guidance(patcher: ModelPatcher) -> None:
    """Let a model that edits images compute a third pass, without the image, in nodes with a positive and a negative.

    The strength is IMAGE_GUIDANCE of the negative, or the model's default. At 1 and below there are two passes.
    """
    model = model_of(patcher.model.diffusion_model.config)
    if not edits_images(patcher.model.diffusion_model.config):
        return

    def wrapper(executor, base, conds, x, sigma, options):
        shared = options["transformer_options"]
        if len(conds) == 1 and IMAGE_GUIDANCE in shared:
            # Guidance of other nodes compares this pass with the shifted ones of the same step.
            return [executor(base, conds, x, sigma, options)[0] + shared[IMAGE_GUIDANCE]]
        shared.pop(IMAGE_GUIDANCE, None)
        # Core's DualCFGGuider has the formula itself. Its positive prompt is the last one.
        if find_positive(conds) != 0 or not conds[1]:
            return executor(base, conds, x, sigma, options)
        guidance = conds[1][0].get(IMAGE_GUIDANCE, model.image_guidance)
        if guidance <= 1 or not any(cond.keys() & IMAGES for cond in conds[1]):
            return executor(base, conds, x, sigma, options)
        *passes, neither = executor(base, [*conds, list(map(remove_image, conds[1]))], x, sigma, options)
        shared[IMAGE_GUIDANCE] = image_shift(passes[1], neither, guidance)
        return [x0 + shared[IMAGE_GUIDANCE] for x0 in passes]

    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, IMAGE_GUIDANCE, wrapper)


def remove_image(cond: dict) -> dict:
    """Return a copy of `cond` without the image, with a uuid that is the same in every step."""
    image = comfy.conds.CONDNoiseShape(torch.zeros_like(cond["model_conds"]["c_concat"].cond))
    pass_id = uuid.uuid5(cond["uuid"], WITHOUT_IMAGE)
    return {**cond, "uuid": pass_id, "model_conds": {**cond["model_conds"], "c_concat": image}}


def follow_reference(patcher: ModelPatcher) -> None:
    """Give the negative prompt the mask of the positive one, if the model's reference does so."""
    if reference_of(patcher.model.diffusion_model).shared_mask:
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, SHARED_MASK, share_mask)


def share_mask(executor, base, conds, *args):
    """Give negative conditionings the mask of the positive prompt, or of the longest one of several."""
    prompts = [prompt_of(cond) for cond_list in conds for cond in cond_list or []]
    positives = [prompt for prompt in prompts if prompt.field == "positive"]
    if positives:
        longest = max(positives, key=lambda prompt: prompt.tokens)
        conds = [cond_list and [with_mask(cond, longest) for cond in cond_list] for cond_list in conds]
    return executor(base, conds, *args)


def with_mask(cond: dict, positive: Prompt) -> dict:
    """Return a negative `cond` with the mask of `positive`, for model and ControlNet. Others do not change."""
    if prompt_of(cond).field != "negative":
        return cond
    prompt = prompt_of(cond).masked_like(positive)
    changed = {"prompt": PromptCondition(prompt), "attention_mask": comfy.conds.CONDRegular(prompt.mask)}
    return {**cond, "model_conds": {**cond["model_conds"], **changed}}


def refuse_unfit_samplers(patcher: ModelPatcher) -> None:
    """Let a distilled model refuse samplers that it was not distilled for, in any node."""
    if model_of(patcher.model.diffusion_model.config).fixed:
        patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, SPRINT, refuse_other_samplers)


def refuse_other_samplers(executor, guider, *args, **kwargs):
    """Sample. Raises InputError for samplers of ComfyUI except lcm, and for a cfg other than 1."""
    sampler, model = executor.class_obj, model_of(guider.model_patcher.model.diffusion_model.config)
    # The samplers of this pack check the model themselves.
    if type(sampler) is comfy.samplers.KSAMPLER and sampler.sampler_function.__name__ != LCM:
        name = sampler.sampler_function.__name__.removeprefix("sample_")
        raise InputError(
            f"sampler_name: got {name} for {model.title}, expected {model.defaults.sampler}, for which it was "
            f"distilled; {REMEDY}"
        )
    if getattr(guider, "cfg", 1.0) != 1:
        raise InputError(f"cfg: got {guider.cfg} for {model.title}, whose guidance is built in, expected 1; {REMEDY}")
    return executor(guider, *args, **kwargs)
