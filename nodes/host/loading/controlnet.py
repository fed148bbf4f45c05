"""SANA's ControlNet as ComfyUI's CONTROL_NET."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import comfy.controlnet
import comfy.model_management
import comfy.ops
import comfy.utils
import torch
from diffusers import SanaControlNetModel

from ....sana_core.checkpoints import find_part, follow, inspect_checkpoint
from ....sana_core.errors import InputError, without_folder
from ....sana_core.model.controlnet import control_residuals
from ....sana_core.model.forward import prepare
from ....sana_core.model.reference import AUTO, model_timestep
from ..compat import remember_loader
from ..file_stats import Reloader
from ..sampling.latents import latent_format
from ..sampling.model import WHOLE_TIMESTEPS, timestep_scale
from ..sampling.split import clone_patcher
from .weights import keep_on_device, load_component

if TYPE_CHECKING:
    from collections.abc import Iterable

    from comfy.model_patcher import ModelPatcher


class SanaControlModel(SanaControlNetModel):
    """The ControlNet with the call that ComfyUI makes."""

    # The dtype to compute in. None: the dtype of the weights.
    compute_dtype: torch.dtype | None = None
    # ComfyUI assigns the device, but diffusers has a property without a setter.
    device = None

    def forward(self, x, timesteps, context, hint, attention_mask=None, sampled_timesteps=None):
        """Return the residuals after the first blocks. `hint` is the scaled latent of the control image.

        `sampled_timesteps` are the exact timesteps. ComfyUI rounds `timesteps` to the dtype of the weights.
        """
        mask = torch.ones(context.shape[:2], device=x.device) if attention_mask is None else attention_mask
        constants = prepare(self, context, mask, *x.shape[-2:])
        return {"input": control_residuals(self, x, sampled_timesteps, constants, hint)}


@without_folder
class SanaControlNet(comfy.controlnet.ControlNet):
    """ComfyUI's ControlNet, with the latent of the control image in the scale of the sampled model."""

    # Advanced-ControlNet passes its masks, weights and keyframes only to ControlNets with this attribute. It ignores
    # them for all others without a message.
    sub_idxs: object = None
    # The control image as a latent, if `encode_hints` has encoded it.
    hint_latent: torch.Tensor | None = None

    def disarm(self):
        """Raise InputError: Advanced-ControlNet calls this first in its node."""
        raise InputError(
            "control_net: got Apply Advanced ControlNet, whose masks, weights and keyframes SANA's ControlNet does not "
            "read; use Apply ControlNet"
        )

    def pre_run(self, model, percent_to_timestep_function):
        super().pre_run(model, percent_to_timestep_function)
        self.latent_format = model.latent_format

    def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
        images, hints = len(x_noisy) // batched_number, len(self.cond_hint_original)
        if hints not in (1, images):
            raise InputError(f"image: got {hints} control images for {images} images; give one, or one for each")
        sampling = self.model_sampling_current
        timesteps = sampling.timestep(t) * timestep_scale(sampling)
        round_down = transformer_options.get(WHOLE_TIMESTEPS, False)
        self.extra_args = {"sampled_timesteps": model_timestep(self.control_model, timesteps, round_down)}
        if self.cond_hint is None and self.hint_latent is not None:
            dtype = self.manual_cast_dtype or self.control_model.dtype
            self.cond_hint = self.hint_latent.to(device=x_noisy.device, dtype=dtype)
        return super().get_control(x_noisy, t, cond, batched_number, transformer_options)

    def copy(self):
        twin = SanaControlNet(load_device=self.load_device, manual_cast_dtype=self.manual_cast_dtype, extra_conds=[])
        twin.control_model, twin.control_model_wrapped = self.control_model, self.control_model_wrapped
        self.copy_to(twin)
        twin.hint_latent = self.hint_latent
        return twin

    def deepclone_multigpu(self, load_device, autoregister=False):
        """Return a copy for another device. ComfyUI would copy weights from GPU to GPU, and forget the callbacks."""
        twin = self.copy()
        if load_device != self.load_device:
            twin.control_model_wrapped = clone_patcher(self.control_model_wrapped, load_device, [self.control_model])
            twin.control_model = twin.control_model_wrapped.model
            twin.load_device, twin.manual_cast_dtype = load_device, twin.control_model.compute_dtype
        if autoregister:
            self.multigpu_clones[load_device] = twin
        return twin


def encode_hints(controls: Iterable[SanaControlNet], model: ModelPatcher, shape: torch.Size) -> dict[int, torch.Tensor]:
    """Encode the control images of `controls` and of all ControlNets in their chains, for latents of `shape`.

    Returns latents in RAM, by the id of the ControlNet. ComfyUI would encode in the first step of each thread. It would
    load the VAE then, and could move the weights of the model that is sampling.
    """
    hints: dict[int, torch.Tensor] = {}
    for control in controls:
        model.model.check_control(control)
        while control is not None and id(control) not in hints:
            vae = control.vae
            if vae is None:
                raise InputError("vae: got none in Apply ControlNet, expected a VAE; connect the VAE of SANA Loader")
            height, width = (side * vae.spacial_compression_encode() for side in shape[2:])
            image = comfy.utils.common_upscale(
                control.cond_hint_original, width, height, control.upscale_algorithm, "center"
            )
            hints[id(control)] = model.model.latent_format.process_in(vae.encode(image.movedim(1, -1))).cpu()
            control = control.previous_controlnet
    return hints


def control_on(control: SanaControlNet, device: torch.device, hints: dict[int, torch.Tensor]) -> SanaControlNet:
    """Return a copy of `control` and its chain of ControlNets on `device`, with the results of `encode_hints`."""
    twin = control.deepclone_multigpu(device)
    twin.hint_latent = hints[id(control)]
    if control.previous_controlnet is not None:
        twin.set_previous_controlnet(control_on(control.previous_controlnet, device, hints))
    return twin


def load_controlnet(path: Path, reference: str = AUTO) -> tuple[comfy.controlnet.ControlNet, str]:
    """Return the CONTROL_NET of the file at `path`, and a description of it. It needs SANA's VAE in Apply ControlNet.

    `reference` is the implementation whose arithmetic it follows.
    """
    # The function that ComfyUI's deepclone_multigpu calls. Its option for dynamic VRAM is not used.
    reload = Reloader(lambda *args, **ignored: load_controlnet(*args)[0].control_model_wrapped, path)
    checkpoint = follow(find_part(inspect_checkpoint(path), "controlnet"), reference)
    load_device = comfy.model_management.get_torch_device()
    supported = [torch.bfloat16, torch.float32]
    stored = comfy.model_management.unet_dtype(load_device, supported_dtypes=supported, weight_dtype=checkpoint.dtype)
    compute = comfy.model_management.unet_manual_cast(stored, load_device, supported)
    operations = comfy.ops.pick_operations(stored, compute, load_device)
    model = load_component(checkpoint, stored, compute, operations)
    model.__class__ = SanaControlModel
    model.compute_dtype = compute
    control = SanaControlNet(
        model,
        # The hint has the size of the latent.
        compression_ratio=1,
        # pre_run() sets the format of the model. Until then, any format makes ComfyUI require a VAE.
        latent_format=latent_format(checkpoint),
        load_device=load_device,
        manual_cast_dtype=compute,
        extra_conds=["attention_mask"],
    )
    keep_on_device(control.control_model_wrapped)
    remember_loader(control.control_model_wrapped, reload, path, reference)
    return control, f"SANA ControlNet {checkpoint.variant}, {checkpoint.layout} layout, as {checkpoint.reference} does"
