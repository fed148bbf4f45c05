"""A SANA transformer as ComfyUI's MODEL."""

from __future__ import annotations

from pathlib import Path

import comfy.conds
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.supported_models_base
import torch
from diffusers import SanaTransformer2DModel

from ...sana_core.checkpoints import load_transformer, stored_dtype
from ...sana_core.defaults import GUIDANCE, model_timestep
from ...sana_core.forward import velocity
from ...sana_core.latents import check_channels
from ...sana_core.sampling import SHIFT
from .adopt import adopt
from .latents import latent_format
from .prompts import Prompt, PromptBatch, PromptCondition
from .sprint import watch_sampler

# Set by samplers whose reference passes whole timesteps to the model, as SANA's DPM-Solver does.
WHOLE_TIMESTEPS = "sana_whole_timesteps"


class SanaDiffusionModel(SanaTransformer2DModel):
    """The transformer with the call that ComfyUI makes; its parameters keep diffusers' names."""

    def forward(
        self,
        x,
        timesteps,
        context=None,
        control=None,
        transformer_options={},
        attention_mask=None,
        prompt: PromptBatch | None = None,
        guidance=None,
        **kwargs,
    ):
        timesteps = model_timestep(self.config, timesteps, transformer_options.get(WHOLE_TIMESTEPS, False))
        if guidance is not None:
            guidance = guidance * self.config.guidance_embeds_scale
        if prompt is None or torch.is_grad_enabled():
            # in training the prompt's keys change with the weights
            out = super().forward(
                x, context, timesteps, guidance, encoder_attention_mask=attention_mask, return_dict=False
            )
            return out[0]
        constants, perturbation = prompt.constants(self, x)
        return velocity(self, x, timesteps, constants, guidance, perturbation)


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
        mask = kwargs.get("attention_mask")
        out["prompt"] = PromptCondition(Prompt(field, context, mask, keep=kwargs.get("hooks") is None))
        # for ControlNets, training and what others hang into the call
        out["c_crossattn"] = comfy.conds.CONDRegular(context)
        if mask is not None:
            out["attention_mask"] = comfy.conds.CONDRegular(mask)
        if self.diffusion_model.config.guidance_embeds:
            guidance = float(kwargs.get("guidance", GUIDANCE))
            out["guidance"] = comfy.conds.CONDRegular(torch.tensor([guidance], device=context.device))
        return out


class SanaConfig(comfy.supported_models_base.BASE):
    """Settings that BaseModel reads."""

    unet_config = {"disable_unet_model_creation": True}
    unet_extra_config = {}
    sampling_settings = {"shift": SHIFT}
    # fp16 overflows in SANA's weights but for the repositories made for it
    supported_inference_dtypes = [torch.bfloat16, torch.float32]

    def __init__(self, transformer: SanaTransformer2DModel, folder: Path) -> None:
        super().__init__(self.unet_config)
        self.latent_format = latent_format(folder)
        # bytes a token and byte of dtype: three hidden tensors of the feed-forward and ten of the inner width
        inner = transformer.config.num_attention_heads * transformer.config.attention_head_dim
        hidden = 2 * inner * transformer.config.mlp_ratio
        self.memory_usage_factor = (3 * hidden + 10 * inner) / (0.01 * 1024 * 1024)


def load_model(folder: Path, disable_dynamic: bool = False) -> comfy.model_patcher.ModelPatcher:
    """Return the MODEL of the diffusers folder `folder`."""
    load_device = comfy.model_management.get_torch_device()
    supported = SanaConfig.supported_inference_dtypes
    weight_dtype = comfy.model_management.unet_dtype(
        device=load_device, supported_dtypes=supported, weight_dtype=stored_dtype(folder, "transformer")
    )
    compute_dtype = comfy.model_management.unet_manual_cast(weight_dtype, load_device, supported)

    transformer = load_transformer(folder, dtype=weight_dtype)
    config = SanaConfig(transformer, folder)
    config.set_inference_dtype(weight_dtype, compute_dtype, device=load_device)
    adopt(transformer, comfy.ops.pick_operations(weight_dtype, compute_dtype, load_device))
    transformer.__class__ = SanaDiffusionModel
    comfy.model_management.archive_model_dtypes(transformer)

    model = SanaModel(config, comfy.model_base.ModelType.FLOW)
    model.diffusion_model = transformer
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    patcher = patcher_class(model, load_device, comfy.model_management.unet_offload_device())
    patcher.cached_patcher_init = (load_model, (folder,))
    watch_sampler(patcher)
    return patcher
