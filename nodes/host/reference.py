"""What the reference of a MODEL asks of guidance, in whatever sampler and guider."""

from __future__ import annotations

from typing import TYPE_CHECKING

import comfy.conds
from comfy.patcher_extension import WrappersMP

from ...sana_core.model.reference import reference_of
from .patches import SHARED_MASK
from .prompts import Prompt, PromptCondition

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


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


def prompt_of(cond: dict) -> Prompt:
    return cond["model_conds"]["prompt"].cond


def with_mask(cond: dict, positive: Prompt) -> dict:
    """Return a negative `cond` with the mask of `positive`, for model and ControlNet; any other as it is."""
    if prompt_of(cond).field != "negative":
        return cond
    prompt = prompt_of(cond).masked_like(positive)
    changed = {"prompt": PromptCondition(prompt), "attention_mask": comfy.conds.CONDRegular(prompt.mask)}
    return {**cond, "model_conds": {**cond["model_conds"], **changed}}
