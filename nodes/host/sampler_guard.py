"""SANA-Sprint in the host's samplers: which of them it was distilled for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import comfy.samplers
from comfy.patcher_extension import WrappersMP

from ...sana_core.errors import InputError
from ...sana_core.model.known_models import SPRINT

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# core's name for multistep consistency sampling; on a flow model its step is that of SCM
LCM = "sample_lcm"
REMEDY = "use SANA Sprint, or lcm with cfg 1"


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
