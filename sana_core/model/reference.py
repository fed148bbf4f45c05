"""Whose arithmetic a model follows: NVIDIA's own code, or diffusers' port of it.

The released files exist in NVIDIA's layout and in diffusers', and the two codebases generate slightly different images
from the same weights. A model follows the codebase of its file, unless the user chooses the other one. The
module's configuration stores the choice as "reference".

Sources: NVlabs/Sana, diffusion/model/nets/{sana_blocks,sana_multi_scale,sana_multi_scale_controlnet}.py and
diffusion/model/dpm_solver.py; diffusers, models/transformers/sana_transformer.py and pipelines/sana.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from diffusers import SanaControlNetModel, SanaTransformer2DModel
    from diffusers.models.transformers.sana_transformer import SanaTransformerBlock

AUTO, NVIDIA, DIFFUSERS = "auto", "nvidia", "diffusers"
REFERENCES = (AUTO, NVIDIA, DIFFUSERS)
# how diffusers' pipelines for SANA-Video read prompts: behind an instruction of their own
DIFFUSERS_VIDEO = "diffusers-video"
REFERENCE_HELP = "whose arithmetic to follow where NVIDIA's code and diffusers' differ; auto: that of the file's layout"


class Reference(NamedTuple):
    """What the two codebases compute differently. The blocks of a ControlNet show where it acts (controlnet.py)."""

    attention_eps: float  # in the denominator of the linear attention
    cross_norm_eps: float  # of the norms of query and key in the cross-attention, which SANA-1.5 and Sprint have
    whole_timesteps: bool  # with every sampler, not only with those whose scheduler rounds; never of Sprint
    shared_mask: bool  # the negative prompt is masked like the positive one, as in SANA's training
    always_lowers_order: bool  # DPM-Solver++ ends with lower orders whatever the number of steps
    float32_schedule: bool  # of DPM-Solver++; the other has it in float64
    guides_below_one: bool  # with DPM-Solver++: guidance is off at exactly 1. False: it is off at 1 and below.
    quote: str  # around "Enhanced prompt" in the instruction
    lower_case: bool  # prompts are read stripped and in lower case, and no mark like --ar 16:9 ends them


RULES = {
    NVIDIA: Reference(1e-8, 1e-6, True, True, True, True, True, '"', False),
    DIFFUSERS: Reference(1e-15, 1e-5, False, False, False, False, False, "'", True),
}
RULES[DIFFUSERS_VIDEO] = RULES[DIFFUSERS]
READINGS = (*REFERENCES, DIFFUSERS_VIDEO)


def reference_of(model: SanaTransformer2DModel | SanaControlNetModel) -> Reference:
    """Return the rules that `model` follows; those of diffusers for a module that was not loaded by this package."""
    return RULES[getattr(model.config, "reference", DIFFUSERS)]


def all_blocks(model: SanaTransformer2DModel | SanaControlNetModel) -> list[SanaTransformerBlock]:
    """Return the blocks in the order in which they run; NVIDIA's ControlNet begins with the base model's first."""
    base = getattr(model, "base_block", None)
    return [*([base] if base is not None else []), *model.transformer_blocks]


def set_reference(model: SanaTransformer2DModel | SanaControlNetModel, name: str) -> None:
    """Let `model`, fresh from the library, follow the rules of that name."""
    model.register_to_config(reference=name)
    for block in all_blocks(model):
        for norm in (block.attn2.norm_q, block.attn2.norm_k):
            if norm is not None:
                norm.eps = RULES[name].cross_norm_eps


def model_timestep(
    model: SanaTransformer2DModel | SanaControlNetModel, timestep: torch.Tensor, whole: bool = False
) -> torch.Tensor:
    """Convert `timestep` (1000 sigma) to the value that `model` expects.

    `whole`: round down to a whole timestep, as the schedulers of some samplers do. SANA-Sprint expects sigma, which is
    sin t / (sin t + cos t) for TrigFlow's angle t.
    """
    if getattr(model.config, "guidance_embeds", False):
        return timestep / 1000
    if whole or reference_of(model).whole_timesteps:
        timestep = timestep.floor()
    return timestep * getattr(model.config, "timestep_scale", 1.0)
