"""A SANA transformer as what ComfyUI's samplers drive."""

from __future__ import annotations

import comfy.conds
import comfy.model_base
from diffusers import SanaControlNetModel, SanaTransformer2DModel

from ...sana_core.latents import check_channels

# Set by samplers whose reference passes whole timesteps to the model, as SANA's DPM-Solver does.
WHOLE_TIMESTEPS = "sana_whole_timesteps"


class SanaDiffusionModel(SanaTransformer2DModel):
    """The transformer with the call that ComfyUI makes; its parameters keep diffusers' names."""

    def forward(self, x, timesteps, context=None, control=None, transformer_options={}, attention_mask=None, **kwargs):
        if transformer_options.get(WHOLE_TIMESTEPS):
            timesteps = timesteps.floor()
        residuals = control["input"] if control else None
        return super().forward(
            x,
            context,
            timesteps,
            encoder_attention_mask=attention_mask,
            controlnet_block_samples=residuals,
            return_dict=False,
        )[0]


class SanaModel(comfy.model_base.BaseModel):
    """What ComfyUI's samplers drive: flow matching, text with its mask."""

    def extra_conds(self, **kwargs):
        out = super().extra_conds(**kwargs)
        field, context = kwargs["prompt_type"], kwargs["cross_attn"]
        check_channels("latent_image", kwargs["noise"].shape)
        width = self.diffusion_model.config.caption_channels
        if context.shape[-1] != width:
            raise ValueError(
                f"{field}: got embeddings of width {context.shape[-1]}, expected {width}; "
                "encode the text with the CLIP of SANA Loader"
            )
        check_controlnets(kwargs.get("control"), self.diffusion_model)
        out["c_crossattn"] = comfy.conds.CONDRegular(context)
        if "attention_mask" in kwargs:
            out["attention_mask"] = comfy.conds.CONDRegular(kwargs["attention_mask"])
        return out


def check_controlnets(control, transformer: SanaTransformer2DModel) -> None:
    """Raise ValueError unless `control` and all that it is chained to are SANA's and as wide as `transformer`."""
    while control is not None:
        model = getattr(control, "control_model", None)
        if not isinstance(model, SanaControlNetModel):
            raise ValueError(
                f"control_net: got {type(model).__name__}, expected a SANA ControlNet; use SANA Load ControlNet"
            )
        if inner_width(model) != inner_width(transformer):
            raise ValueError(
                f"control_net: got one of width {inner_width(model)}, expected {inner_width(transformer)}; "
                "choose the ControlNet of this model's size"
            )
        control = control.previous_controlnet


def inner_width(model: SanaTransformer2DModel | SanaControlNetModel) -> int:
    return model.config.num_attention_heads * model.config.attention_head_dim
