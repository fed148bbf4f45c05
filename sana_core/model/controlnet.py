"""The forward of SANA's ControlNet. It returns residuals for the hidden states of the base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InputError
from .block import BlockInputs, Constants, add, run_block
from .forward import embed, embed_time, modulate
from .reference import all_blocks

if TYPE_CHECKING:
    from diffusers import SanaControlNetModel, SanaTransformer2DModel


class Control(NamedTuple):
    """A ControlNet, and the latents [1 or B, 32, h, w] of the images that it follows, in the model's scale."""

    controlnet: SanaControlNetModel
    latents: torch.Tensor
    # Its residuals are multiplied by this.
    strength: float = 1.0
    # It acts while sigma is in this interval, the larger sigma first.
    interval: tuple[float, float] = (1.0, 0.0)
    # Another ControlNet, whose residuals are added.
    previous: Control | None = None

    @property
    def chain(self) -> list[Control]:
        """This ControlNet after all previous ones."""
        return [*(self.previous.chain if self.previous else ()), self]


def control_residuals(
    controlnet: SanaControlNetModel,
    x: torch.Tensor,
    timestep: torch.Tensor,
    constants: Constants,
    control_latents: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Return the residuals of a ControlNet. Residual i is added after block i of the base model. None adds nothing.

    `x` [B, 32, h, w] and `timestep` [B] are the base model's inputs. `constants` is the result of `prepare` for the
    ControlNet. `control_latents` [B, 32, h, w] are the latents of the control image, in the scale of `x`.

    In NVIDIA's arrangement (SanaMSControlNet in diffusion/model/nets/sana_multi_scale_controlnet.py), the file has a
    copy of the base model's first block. The control signal is added to the output of that block, and the residual of
    each block is added before the base model's next block. In diffusers' arrangement, the signal is added to the patch
    embedding, and the residuals act one block later.
    """
    blocks, projections = all_blocks(controlnet), controlnet.controlnet_blocks
    # 1 in NVIDIA's arrangement: a copy of the base model's first block comes before the other blocks, and the
    # control signal has no position embedding. 0 in diffusers'.
    first = len(blocks) - len(projections)
    hidden = embed(controlnet, x, constants.position)
    signal = embed(controlnet, control_latents.to(x), None if first else constants.position)
    time, _ = embed_time(controlnet, timestep, hidden)
    patch = controlnet.config.patch_size
    inputs = BlockInputs(modulate(constants, time), constants, (x.shape[2] // patch, x.shape[3] // patch), None)
    residuals: list[torch.Tensor | None] = [] if first else [None]
    for i, block in enumerate(blocks):
        if i == first:
            hidden = hidden + controlnet.input_block(signal)
        hidden = add(*run_block(block, i, (hidden, None), inputs), constants.kernels)
        if i >= first:
            residuals.append(projections[i - first](hidden))
    return residuals


def check_width(controlnet: SanaControlNetModel, transformer: SanaTransformer2DModel) -> None:
    """Raise InputError unless the ControlNet has the width of the transformer."""
    got, expected = (
        model.config.num_attention_heads * model.config.attention_head_dim for model in (controlnet, transformer)
    )
    if got != expected:
        raise InputError(
            f"control_net: got one of width {got}, expected {expected}; choose the ControlNet of this model's size"
        )
