"""SANA's ControlNet as ComfyUI's CONTROL_NET."""

from __future__ import annotations

from pathlib import Path

import comfy.controlnet
import comfy.model_management
import comfy.ops
import torch
from diffusers import SanaControlNetModel

from ...sana_core.checkpoints import find_part, follow, inspect_checkpoint
from ...sana_core.errors import InputError
from ...sana_core.model.controlnet import control_residuals
from ...sana_core.model.forward import prepare
from ...sana_core.model.reference import AUTO, model_timestep
from .latents import latent_format
from .layers import keep_on_device
from .model import WHOLE_TIMESTEPS, timestep_scale
from .weights import load_component


class SanaControlModel(SanaControlNetModel):
    """The ControlNet with the call that ComfyUI makes."""

    device = None  # ComfyUI writes it; diffusers has a property without setter here

    def forward(self, x, timesteps, context, hint, attention_mask=None, sampled_timesteps=None):
        """Return the residuals after the first blocks; `hint` is the control image's scaled latent.

        `sampled_timesteps` are the sampler's own; ComfyUI rounds `timesteps` to the dtype of the weights.
        """
        mask = torch.ones(context.shape[:2], device=x.device) if attention_mask is None else attention_mask
        constants = prepare(self, context, mask, *x.shape[-2:])
        return {"input": control_residuals(self, x, sampled_timesteps, constants, hint)}


class SanaControlNet(comfy.controlnet.ControlNet):
    """ComfyUI's ControlNet, with the control image's latent in the scale of the model that samples."""

    def pre_run(self, model, percent_to_timestep_function):
        super().pre_run(model, percent_to_timestep_function)
        self.latent_format = model.latent_format

    def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
        images, hints = len(x_noisy) // batched_number, len(self.cond_hint_original)
        if hints not in (1, images):
            raise InputError(f"image: got {hints} control images for {images} images; give one, or one for each")
        sampling = self.model_sampling_current
        timesteps = sampling.timestep(t) * timestep_scale(sampling)
        whole = transformer_options.get(WHOLE_TIMESTEPS, False)
        self.extra_args = {"sampled_timesteps": model_timestep(self.control_model, timesteps, whole)}
        return super().get_control(x_noisy, t, cond, batched_number, transformer_options)

    def copy(self):
        twin = SanaControlNet(load_device=self.load_device, manual_cast_dtype=self.manual_cast_dtype, extra_conds=[])
        twin.control_model, twin.control_model_wrapped = self.control_model, self.control_model_wrapped
        self.copy_to(twin)
        return twin


def load_controlnet(path: Path, reference: str = AUTO) -> tuple[comfy.controlnet.ControlNet, str]:
    """Return the CONTROL_NET of the file at `path`, for Apply ControlNet with SANA's VAE connected, and what it is.

    `reference` is whose arithmetic it follows. Raises CheckpointError or MissingFileError, with the file's name, for
    what is no SANA ControlNet, and for a reference that the file does not allow.
    """
    info = follow(find_part(inspect_checkpoint(path), "controlnet"), reference)
    load_device = comfy.model_management.get_torch_device()
    supported = [torch.bfloat16, torch.float32]
    stored = comfy.model_management.unet_dtype(load_device, supported_dtypes=supported, weight_dtype=info.dtype)
    compute = comfy.model_management.unet_manual_cast(stored, load_device, supported)
    operations = comfy.ops.pick_operations(stored, compute, load_device)
    model = load_component(info, stored, compute, operations)
    model.__class__ = SanaControlModel
    control = SanaControlNet(
        model,
        # the hint is as large as the latent
        compression_ratio=1,
        # until it runs: any says that a VAE is needed
        latent_format=latent_format(info),
        load_device=load_device,
        manual_cast_dtype=compute,
        extra_conds=["attention_mask"],
    )
    keep_on_device(control.control_model_wrapped)
    return control, f"SANA ControlNet {info.variant}, {info.layout} layout, as {info.reference} does"
