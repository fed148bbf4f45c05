"""A SANA transformer as the model that ComfyUI's samplers call, and the prompts of a call.

Values that depend only on prompts are computed once per sampling, in its first step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import closing
from functools import cached_property
from uuid import UUID

import comfy.conds
import comfy.model_base
import comfy.model_management
import comfy.model_sampling
import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from diffusers import SanaControlNetModel, SanaTransformer2DModel

from ....sana_core.errors import InputError
from ....sana_core.model.block import Constants, Perturbation
from ....sana_core.model.controlnet import check_width
from ....sana_core.model.forward import prepare, velocity
from ....sana_core.model.known_models import GUIDANCE, edit_size, edits_images, is_video, size_note, trained_size
from ....sana_core.model.latents import DOWNSCALE, check_channels, check_patches
from ....sana_core.model.reference import model_timestep
from ....sana_core.sampling.guidance import PerturbedAttention
from ....sana_core.video import forward as video
from ..compat import INSTRUCTION, SPLIT, prefetched_blocks
from ..loading.weights import config_tensor
from .core_nodes import note_unused, pack_of


class Prompt:
    """One conditioning of a sampling: embeddings [R, T, C] and mask [R, T], for one image or for R images.

    ComfyUI creates a Prompt for each sampling and deletes it afterwards, together with its cached constants. `keep`
    is False if hooks may change the weights between steps. Then the constants are not cached.
    """

    def __init__(self, field: str, embeds: torch.Tensor, mask: torch.Tensor | None, keep: bool) -> None:
        self.embeds = embeds
        self.mask = torch.ones(embeds.shape[:2], device=embeds.device) if mask is None else mask
        if self.mask.shape != embeds.shape[:2]:
            raise InputError(
                f"{field}: got a mask of shape {list(self.mask.shape)} for embeddings of shape {list(embeds.shape)}; "
                "SANA cannot join prompts, write one text"
            )
        self.field, self.keep = field, keep
        self.perturbed: PerturbedAttention | None = None
        self.copies: dict[PerturbedAttention | Prompt, Prompt] = {}
        self.constants: dict[tuple[object, ...], tuple[Constants, Perturbation | None]] = {}

    @cached_property
    def tokens(self) -> int:
        """The number of unmasked tokens of the longest row. Cached, because reading it waits for the device."""
        return int((self.mask != 0).sum(1).max())

    def perturb(self, attention: PerturbedAttention) -> Prompt:
        """Return this prompt for passes with perturbed attention, the same object each time."""
        if attention not in self.copies:
            self.copies[attention] = Prompt(self.field, self.embeds, self.mask, self.keep)
            self.copies[attention].perturbed = attention
        return self.copies[attention]

    def masked_like(self, other: Prompt) -> Prompt:
        """Return this prompt with the mask of `other`, the same object each time."""
        if other not in self.copies:
            count = max(len(self.embeds), len(other.embeds))
            embeds, mask = self.rows(count)[0], other.rows(count)[1]
            mask = torch.nn.functional.pad(mask, (0, embeds.shape[1] - mask.shape[1]))
            self.copies[other] = Prompt(self.field, embeds, mask, self.keep)
        return self.copies[other]

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings and mask of `count` images, repeated in turn as ComfyUI repeats a batch."""
        index = torch.arange(count, device=self.embeds.device) % len(self.embeds)
        return self.embeds[index], self.mask[index]


class PromptBatch:
    """The prompts of one call of the model. Each prompt has the same number of images."""

    # ComfyUI's id of the LoRAs that are merged into the weights. `SanaModel.apply_model` sets it for each call.
    weights: UUID | None = None

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts

    def to(self, device: torch.device) -> PromptBatch:
        """Return self. ComfyUI calls this, but `constants` already uses the device of the latents."""
        return self

    @torch.compiler.disable
    def constants(self, transformer: torch.nn.Module, x: torch.Tensor) -> tuple[Constants, Perturbation | None]:
        """Return the constants for `x` [B, 32, h, w] or [B, C, T, h, w].

        They are computed for the first call with these prompts, that transformer, its weights and that shape. One
        sampling may call several models: nodes of other packs refine with a second one, or guide with a worse one.
        """
        # A dead reference equals no other one. An id could belong to a later prompt.
        key = (*map(weakref.ref, self.prompts), transformer, self.weights, tuple(x.shape), x.device, x.dtype)
        cache = self.prompts[0].constants
        if key in cache:
            return cache[key]
        embeds, mask, perturbation = self.inputs(x)
        prepare_prompts = video.prepare if is_video(transformer.config) else prepare
        prepared = prepare_prompts(transformer, embeds, mask, *x.shape[2:]), perturbation
        if all(prompt.keep for prompt in self.prompts):
            cache[key] = prepared
        return prepared

    def inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Perturbation | None]:
        """Return embeddings [P, T, C] and mask [P, T] for `x` [B, 32, h, w], and where attention is perturbed."""
        images = len(x) // len(self.prompts)
        # All images of a prompt share one row of keys and values, unless a prompt has a row for each image.
        count = 1 if all(len(prompt.embeds) == 1 for prompt in self.prompts) else images
        longest = max(prompt.embeds.shape[1] for prompt in self.prompts)
        rows = [prompt.rows(count) for prompt in self.prompts]
        pads = [(0, longest - mask.shape[1]) for _, mask in rows]
        embeds = torch.cat(
            [torch.nn.functional.pad(part, (0, 0, *pad)).to(x) for (part, _), pad in zip(rows, pads, strict=True)]
        )
        mask = torch.cat([torch.nn.functional.pad(part, pad).to(x) for (_, part), pad in zip(rows, pads, strict=True)])
        attention = next((prompt.perturbed for prompt in self.prompts if prompt.perturbed), None)
        perturbation = None
        if attention:
            flags = torch.tensor([prompt.perturbed is not None for prompt in self.prompts], device=x.device)
            perturbation = Perturbation(flags.repeat_interleave(images)[:, None, None], attention.blocks)
        return embeds, mask, perturbation


class PromptCondition(comfy.conds.CONDRegular):
    """A Prompt as a condition that ComfyUI can batch. The model gets a PromptBatch."""

    def process_cond(self, batch_size: int, **kwargs) -> PromptCondition:
        return self

    def can_concat(self, other: PromptCondition) -> bool:
        return True

    def concat(self, others: list[PromptCondition]) -> PromptBatch:
        return PromptBatch([self.cond, *(other.cond for other in others)])

    def size(self) -> list[int]:
        return list(self.cond.embeds.shape)


# Set by samplers whose reference passes whole timesteps to the model, as SANA's DPM-Solver does.
WHOLE_TIMESTEPS = "sana_whole_timesteps"


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
        while control is not None:
            model = getattr(control, "control_model", None)
            if not isinstance(model, SanaControlNetModel):
                raise InputError(
                    f"control_net: got {type(model).__name__}, expected a SANA ControlNet; use SANA Load ControlNet"
                )
            check_width(model, self.diffusion_model)
            control = control.previous_controlnet

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
        # ComfyUI repeats fewer prompts than images in turn, as in any batch.
        prompts, images = len(context), len(kwargs["noise"])
        if prompts > images:
            raise InputError(
                f"{field}: got {prompts} prompts for a batch of {images}, expected a batch_size of {prompts}; set it "
                "so, or use SANA Batch Sampler"
            )
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


# The transformer's timestep at sigma 1.
TIMESTEPS = 1000


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
