"""A SANA transformer as the model that ComfyUI's samplers call."""

from __future__ import annotations

import math
from contextlib import closing

import comfy.conds
import comfy.model_base
import comfy.model_management
import comfy.model_sampling
import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from diffusers import SanaControlNetModel, SanaTransformer2DModel

from ....sana_core.errors import InputError
from ....sana_core.model.controlnet import check_width
from ....sana_core.model.forward import velocity
from ....sana_core.model.known_models import GUIDANCE, edit_size, edits_images, size_note, trained_size
from ....sana_core.model.latents import DOWNSCALE, check_channels, check_patches
from ....sana_core.model.reference import model_timestep
from ..compat.internals import prefetched_blocks
from ..compat.patches import INSTRUCTION, SPLIT
from ..loading.weights import config_tensor
from .core_nodes import note_unused, pack_of
from .prompts import Prompt, PromptBatch, PromptCondition

# Set by samplers whose reference passes whole timesteps to the model, as SANA's DPM-Solver does.
WHOLE_TIMESTEPS = "sana_whole_timesteps"
# The transformer's timestep at sigma 1.
TIMESTEPS = 1000


class SanaDiffusionModel(SanaTransformer2DModel):
    """The transformer with the call that ComfyUI makes. Its parameters have diffusers' names."""

    def forward(self, x, timesteps, context=None, control=None, transformer_options={}, **kwargs):
        """Run the model inside the wrappers that other nodes, such as EasyCache, have added."""
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options)
        if wrappers:
            # EasyCache writes its result into x. In fp32, x is the sampler's latents, not a copy.
            x = x.clone()
        executor = WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        # Wrappers expect the options as the last positional argument.
        return executor.execute(x, timesteps, context, control, transformer_options, **kwargs)

    def _forward(
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
        if not all(hasattr(block, "attn2") for block in self.transformer_blocks):
            name = pack_of(type(self.transformer_blocks[0]))
            raise InputError(f"model: got a node of {name} that replaces all blocks in each call; remove it")
        timesteps = model_timestep(self, timesteps, transformer_options.get(WHOLE_TIMESTEPS, False))
        if guidance is not None:
            guidance = guidance * self.config.guidance_embeds_scale
        residuals = control["input"] if control else ()
        if prompt is None or torch.is_grad_enabled():
            # In training, the keys of the prompt cannot be cached, because they change with the weights.
            if residuals and residuals[0] is not None:
                raise InputError("control_net: got NVIDIA's arrangement in training; choose reference diffusers for it")
            return super().forward(
                x,
                context,
                timesteps,
                guidance,
                encoder_attention_mask=attention_mask,
                # In diffusers, the first residual is added after the second block.
                controlnet_block_samples=residuals[1:] or None,
                return_dict=False,
            )[0]
        group = transformer_options.get(SPLIT, {}).get(x.device)
        if group is not None and group.has_weights_of(self, prompt):
            return group.velocity(self, x, timesteps, prompt, guidance, residuals)
        constants, perturbation = prompt.constants(self, x)
        if torch.compiler.is_compiling() or not transformer_options.get("prefetch_dynamic_vbars"):
            return velocity(self, x, timesteps, constants, guidance, perturbation, residuals)
        with closing(prefetched_blocks(self.transformer_blocks, x.device, transformer_options)) as blocks:
            return velocity(self, x, timesteps, constants, guidance, perturbation, residuals, blocks=blocks)


class SanaModel(comfy.model_base.BaseModel):
    """The BaseModel of ComfyUI for SANA: flow matching, and prompts with masks."""

    @property
    def resolution(self) -> int:
        """Side in pixels of the square images that the model was trained with."""
        return self.diffusion_model.config.sample_size * DOWNSCALE

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options={}, **kwargs):
        note_unused(transformer_options)
        if kwargs.get("prompt") is not None:
            kwargs["prompt"].weights = self.current_weight_patches_uuid
        return super().apply_model(x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)

    def memory_required(self, input_shape, cond_shapes={}):
        """Return the bytes of a forward, excluding the weights, with or without flash attention in ComfyUI.

        Without flash attention, ComfyUI's estimate is 7.5 times as high, because softmax attention then stores its
        scores. SANA's attention is linear and has no scores.
        """
        area = input_shape[0] * math.prod(input_shape[2:])
        item = comfy.model_management.dtype_size(self.get_dtype_inference())
        return area * item * 0.01 * self.memory_usage_factor * 1024 * 1024

    def check_latent(self, field: str, shape: torch.Size) -> None:
        """Raise InputError if latents of `shape` do not fit the model."""
        check_channels(field, shape)
        check_patches(field, shape, self.diffusion_model.config.patch_size)

    def check_control(self, control) -> None:
        """Raise InputError unless `control`, None or a chain of ControlNets, fits the model."""
        check_controlnets(control, self.diffusion_model)

    @property
    def default_size(self) -> tuple[int, int]:
        """The main (width, height) in pixels of the images in training."""
        return self.resolution, self.resolution

    def trained_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the size in pixels, with the aspect ratio of `width` x `height`, that the model was trained for."""
        if edits_images(self.diffusion_model.config):
            return edit_size(width, height)
        return trained_size(width, height, self.resolution)

    def size_note(self, shape: torch.Size) -> str:
        """Return a warning if latents of `shape` are far from the sizes in training, else ""."""
        height, width = (cells * self.latent_format.spacial_downscale_ratio for cells in shape[-2:])
        return size_note(width, height, self.trained_size(width, height))

    def process_timestep(self, timestep, **kwargs):
        return timestep * timestep_scale(self.model_sampling)

    def state_dict_for_saving(self, unet_state_dict, *state_dicts, **parts):
        latents = self.latent_format
        fields = {"flow_shift": self.model_config.sampling_settings["shift"], "latent_scale": latents.scale_factor}
        if latents.preview is not None:
            fields["preview"] = latents.preview
        config = config_tensor("transformer", {**self.diffusion_model.config, **fields})
        return super().state_dict_for_saving({**unet_state_dict, **config}, *state_dicts, **parts)

    def extra_conds(self, **kwargs):
        field, context = kwargs["prompt_type"], kwargs.get("cross_attn")
        if not isinstance(context, torch.Tensor):
            got = "no embeddings" if context is None else f"embeddings of type {type(context).__name__}"
            raise InputError(f"{field}: got {got}, expected a tensor; encode the text with the CLIP of SANA Loader")
        out = super().extra_conds(**kwargs)
        check_flow(self.model_sampling)
        check_prompt_width(field, context, self.diffusion_model)
        check_count(field, context, kwargs["noise"])
        self.check_control(kwargs.get("control"))
        mask = kwargs.get("attention_mask")
        edits = edits_images(self.diffusion_model.config)
        # VIBE's CLIP makes no mask, SANA's always does. Both have the same width.
        if edits and mask is not None or not edits and kwargs.get(INSTRUCTION):
            raise InputError(
                f"{field}: got embeddings of another model's CLIP, expected the CLIP of this MODEL; use one SANA Loader"
            )
        out["prompt"] = PromptCondition(Prompt(field, context, mask, keep=kwargs.get("hooks") is None))
        # ControlNets, training and wrappers of other nodes use these inputs.
        out["c_crossattn"] = comfy.conds.CONDRegular(context)
        if mask is not None:
            out["attention_mask"] = comfy.conds.CONDRegular(mask)
        if edits:
            out["c_concat"] = comfy.conds.CONDNoiseShape(self.edited_latents(**kwargs))
        if self.diffusion_model.config.guidance_embeds:
            guidance = float(kwargs.get("guidance", GUIDANCE))
            out["guidance"] = comfy.conds.CONDRegular(torch.tensor([guidance], device=context.device))
        return out

    def edited_latents(self, prompt_type, noise, concat_latent_image=None, reference_latents=(), **kwargs):
        """Return the latents of the image that VIBE edits, in the model's scale, or zeros without an image."""
        images = [*([] if concat_latent_image is None else [concat_latent_image]), *reference_latents]
        if not images:
            return torch.zeros_like(noise)
        if kwargs.get("concat_mask") is not None:
            raise InputError(
                f"{prompt_type}: got an image whose masked part is grey, from InpaintModelConditioning, expected the "
                "whole image; use Set Latent Noise Mask"
            )
        if len(images) > 1 or len(images[0]) > len(noise) or images[0].shape[1:] != noise.shape[1:]:
            got = ", ".join(str(list(latents.shape)) for latents in images)
            raise InputError(
                f"{prompt_type}: got images with latents of {got}, expected one like {list(noise.shape)}; connect the "
                "latent of SANA Edit"
            )
        return self.process_latent_in(images[0].to(noise))


def image_pixels(latents: torch.Tensor) -> tuple[int, int]:
    """Return (width, height) of the decoded images of latents [B, 32, h, w]."""
    return latents.shape[3] * DOWNSCALE, latents.shape[2] * DOWNSCALE


def timestep_scale(sampling) -> float:
    """Return the factor from `sampling`'s timesteps to 0...1000. ModelSamplingAuraFlow and -Flux use sigmas."""
    return TIMESTEPS / sampling.timestep(1.0)


def check_flow(sampling) -> None:
    """Raise InputError unless `sampling`, a ModelSampling of ComfyUI, is flow matching. Any shift is allowed."""
    flow = comfy.model_sampling.CONST
    names = ("calculate_input", "calculate_denoised", "noise_scaling")
    if any(getattr(type(sampling), name, None) is not getattr(flow, name) for name in names):
        got = ", ".join(base.__name__ for base in type(sampling).__bases__)
        raise InputError(
            f"model: got a ModelSampling of another kind ({got}), expected flow matching; remove that node, or use "
            "ModelSamplingSD3 for another shift"
        )


def check_count(field: str, embeds: torch.Tensor, noise: torch.Tensor) -> None:
    """Raise InputError for more prompts (rows of `embeds`) than images (rows of `noise`).

    If there are fewer prompts than images, the prompts are repeated in turn, as in any batch of ComfyUI.
    """
    prompts, images = len(embeds), len(noise)
    if prompts > images:
        raise InputError(
            f"{field}: got {prompts} prompts for a batch of {images}, expected a batch_size of {prompts}; set it so, "
            "or use SANA Batch Sampler"
        )


def check_prompt_width(field: str, embeds: torch.Tensor, transformer: SanaTransformer2DModel) -> None:
    """Raise InputError unless `embeds` [P, T, C] have the width of the transformer's text encoder."""
    width = transformer.config.caption_channels
    if embeds.ndim != 3 or 0 in embeds.shape:
        raise InputError(
            f"{field}: got embeddings of shape {list(embeds.shape)}, expected [prompts, tokens, {width}]; "
            "encode the text with the CLIP of SANA Loader"
        )
    if embeds.shape[-1] != width:
        raise InputError(
            f"{field}: got embeddings of width {embeds.shape[-1]}, expected {width}; use the text encoder of this model"
        )


def check_controlnets(control, transformer: SanaTransformer2DModel) -> None:
    """Raise InputError unless `control` and its chain are ControlNets of SANA with the width of `transformer`."""
    while control is not None:
        model = getattr(control, "control_model", None)
        if not isinstance(model, SanaControlNetModel):
            raise InputError(
                f"control_net: got {type(model).__name__}, expected a SANA ControlNet; use SANA Load ControlNet"
            )
        check_width(model, transformer)
        control = control.previous_controlnet
