"""SANA's ControlNet as ComfyUI's CONTROL_NET."""

from __future__ import annotations

from pathlib import Path

import comfy.controlnet
import comfy.model_management
import comfy.ops
import torch
from diffusers import SanaControlNetModel

from ...sana_core.checkpoints import find_part, inspect_checkpoint
from .latents import latent_format
from .weights import load_component


class SanaControlModel(SanaControlNetModel):
    """The ControlNet with the call that ComfyUI makes."""

    device = None  # ComfyUI writes it; diffusers has a property without setter here

    def forward(self, x, timesteps, context, hint, attention_mask=None):
        """Return the residuals after the first blocks; `hint` is the control picture's scaled latent."""
        residuals = super().forward(
            x, context, timesteps, hint, encoder_attention_mask=attention_mask, return_dict=False
        )[0]
        return {"input": list(residuals)}


class SanaControlNet(comfy.controlnet.ControlNet):
    """ComfyUI's ControlNet, with the control picture's latent in the scale of the model that samples."""

    def pre_run(self, model, percent_to_timestep_function):
        super().pre_run(model, percent_to_timestep_function)
        self.latent_format = model.latent_format

    def copy(self):
        twin = SanaControlNet(load_device=self.load_device, manual_cast_dtype=self.manual_cast_dtype, extra_conds=[])
        twin.control_model, twin.control_model_wrapped = self.control_model, self.control_model_wrapped
        self.copy_to(twin)
        return twin


def load_controlnet(path: Path) -> comfy.controlnet.ControlNet:
    """Return the CONTROL_NET of the file at `path`, for Apply ControlNet with SANA's VAE connected.

    Raises ValueError or FileNotFoundError, with the file's name, for what is no SANA ControlNet.
    """
    info = find_part(inspect_checkpoint(path), "controlnet")
    load_device = comfy.model_management.get_torch_device()
    supported = [torch.bfloat16, torch.float32]
    stored = comfy.model_management.unet_dtype(load_device, supported_dtypes=supported, weight_dtype=info.dtype)
    compute = comfy.model_management.unet_manual_cast(stored, load_device, supported)
    operations = comfy.ops.pick_operations(stored, compute, load_device)
    model = load_component(info, stored, compute, operations)
    model.__class__ = SanaControlModel
    return SanaControlNet(
        model,
        # the hint is as large as the latent
        compression_ratio=1,
        # until it runs: any says that a VAE is needed
        latent_format=latent_format(info),
        load_device=load_device,
        manual_cast_dtype=compute,
        extra_conds=["attention_mask"],
    )
