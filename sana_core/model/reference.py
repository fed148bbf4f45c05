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
# The prompts of diffusers' pipelines for SANA-Video, which have another instruction.
DIFFUSERS_VIDEO = "diffusers-video"


class Reference(NamedTuple):
    """The differences of the two codebases. The arrangement of a ControlNet depends on its blocks (controlnet.py)."""

    # Added to the denominator of the linear attention.
    attention_eps: float
    # SANA-1.5 and Sprint: eps of the norms of query and key in the cross-attention.
    cross_norm_eps: float
    # Timesteps are rounded down with every sampler. False: only with samplers whose scheduler rounds. Sprint: ignored.
    whole_timesteps: bool
    # The negative prompt gets the mask of the positive one, as in SANA's training.
    shared_mask: bool
    # DPM-Solver++: the last steps have lower orders for any number of steps.
    always_lowers_order: bool
    # DPM-Solver++: the schedule is computed in float32. False: in float64.
    float32_schedule: bool
    # DPM-Solver++: guidance is off at exactly 1. False: it is off at 1 and below.
    guides_below_one: bool
    # The quotes around "Enhanced prompt" in the instruction.
    quote: str
    # Prompts are stripped and converted to lower case. False: a mark such as --ar 16:9 ends a prompt.
    lower_case: bool


RULES = {
    NVIDIA: Reference(1e-8, 1e-6, True, True, True, True, True, '"', False),
    DIFFUSERS: Reference(1e-15, 1e-5, False, False, False, False, False, "'", True),
}
RULES[DIFFUSERS_VIDEO] = RULES[DIFFUSERS]
READINGS = (*REFERENCES, DIFFUSERS_VIDEO)


def reference_of(model: SanaTransformer2DModel | SanaControlNetModel) -> Reference:
    """Return the rules that `model` follows. A module that another package has loaded follows diffusers."""
    return RULES[getattr(model.config, "reference", DIFFUSERS)]


def all_blocks(model: SanaTransformer2DModel | SanaControlNetModel) -> list[SanaTransformerBlock]:
    """Return the blocks in the order in which they run. In NVIDIA's ControlNet, `base_block` is the first one."""
    base = getattr(model, "base_block", None)
    return [*([base] if base is not None else []), *model.transformer_blocks]


def set_reference(model: SanaTransformer2DModel | SanaControlNetModel, name: str) -> None:
    """Let `model`, as diffusers has built it, follow the rules of that name."""
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
