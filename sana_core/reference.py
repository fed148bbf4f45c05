"""Whose arithmetic a model follows: NVIDIA's own code, or diffusers' port of it.

The released files exist in NVIDIA's layout and in diffusers', and the two codebases draw slightly different pictures
from the same weights. A model computes what the codebase of its file computes, unless its user chooses the other. Which
one it is stands in the configuration of the module, under "reference".

Sources: NVlabs/Sana, diffusion/model/nets/{sana_blocks,sana_multi_scale,sana_multi_scale_controlnet}.py and
diffusion/model/dpm_solver.py; diffusers, models/transformers/sana_transformer.py and pipelines/sana.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .errors import InputError

if TYPE_CHECKING:
    import torch
    from diffusers import SanaControlNetModel, SanaTransformer2DModel
    from diffusers.models.transformers.sana_transformer import SanaTransformerBlock

AUTO, NVIDIA, DIFFUSERS = "auto", "nvidia", "diffusers"
REFERENCES = (AUTO, NVIDIA, DIFFUSERS)
REFERENCE_HELP = "whose arithmetic to follow where NVIDIA's code and diffusers' differ; auto: that of the file's layout"


class Reference(NamedTuple):
    """What the two codebases compute differently. Where a ControlNet acts is told by its blocks (see control.py)."""

    attention_eps: float  # in the denominator of the linear attention
    cross_norm_eps: float  # of the norms of query and key in the cross-attention, which SANA-1.5 and Sprint have
    whole_timesteps: bool  # with every sampler, not only with those whose scheduler rounds; never of Sprint
    shared_mask: bool  # the negative prompt is masked like the positive one, as in SANA's training
    always_lowers_order: bool  # DPM-Solver++ ends with lower orders whatever the number of steps


RULES = {
    NVIDIA: Reference(1e-8, 1e-6, True, True, True),
    DIFFUSERS: Reference(1e-15, 1e-5, False, False, False),
}


# by the number of blocks: the one whose attention NVIDIA perturbs (pag_applied_layers in configs/sana_app_config, and
# its default in diffusion/utils/config.py for SANA-1.5 4.8B)
PERTURBED_BLOCKS = {20: 8, 28: 14, 60: 8}
# pixels that a model was trained at: the schedule's shift; other sizes have 3
SHIFT, SHIFTS = 3.0, {4096: 6.0}
# of NVIDIA's SANA 0.6B at 1024 px, whose ControlNet steers it (configs/sana_app_config/Sana_600M_app.yaml,
# configs/sana_config/1024ms/Sana_600M_img1024.yaml); diffusers' folders of it say 3
NVIDIA_SHIFTS = {("0.6B", 1024): 4.0}


def released_shift(variant: str, resolution: int, reference: str) -> float:
    """Return the shift of the schedule that a model of that variant was released with, for `resolution` pixels."""
    own = NVIDIA_SHIFTS.get((variant, resolution)) if reference == NVIDIA else None
    return own or SHIFTS.get(resolution, SHIFT)


def perturbed_block(layers: int) -> int:
    """Return the block whose self-attention PAG perturbs in a model of so many blocks."""
    return PERTURBED_BLOCKS.get(layers, round(0.4 * layers))


def check_reference(name: str) -> None:
    """Raise InputError unless `name` is one of REFERENCES."""
    if name not in REFERENCES:
        raise InputError(f"reference: got {name!r:.40}, expected one of {', '.join(REFERENCES)}; choose one")


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
    """Return what `model` is given for `timestep`, which is 1000 sigma.

    `whole` is set by samplers whose scheduler makes whole ones of them. SANA-Sprint's time is sin t / (sin t + cos t)
    of TrigFlow's angle t, which is sigma.
    """
    if getattr(model.config, "guidance_embeds", False):
        return timestep / 1000
    if whole or reference_of(model).whole_timesteps:
        timestep = timestep.floor()
    return timestep * getattr(model.config, "timestep_scale", 1.0)
