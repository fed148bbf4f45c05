"""A ControlNet that begins as a copy of the model that it will steer, and its residuals with gradients.

Copies of the first blocks and the projections around them are trained. The projections begin at zero, so the ControlNet
has no effect at first. The embeddings of image, time and caption are the frozen modules of the model (SanaMSControlNet
in NVlabs/Sana, diffusion/model/nets/sana_multi_scale_controlnet.py). `sana_core.model.controlnet` documents where
NVIDIA's code and diffusers add the control signal and the residuals.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from ..errors import InputError
from ..model.controlnet import Control
from ..model.forward import DROPPED, embed
from ..model.known_models import TransformerConfig
from ..model.reference import DIFFUSERS, NVIDIA

if TYPE_CHECKING:
    from diffusers import SanaControlNetModel, SanaTransformer2DModel


def check_steerable(config: TransformerConfig, blocks: int) -> None:
    """Raise InputError unless a ControlNet of `blocks` blocks fits the transformer with `config`."""
    if config.qk_norm is not None:
        raise InputError(
            "model: got one with norms of query and key (SANA-1.5), for which there is no ControlNet; train that of "
            "SANA 0.6B or 1.6B"
        )
    # A residual acts after the copied block. In diffusers it acts after the next block.
    if blocks >= config.num_layers:
        raise InputError(
            f"blocks: got {blocks} for a model of {config.num_layers} blocks, expected less than that; lower it"
        )


def begin_controlnet(transformer: SanaTransformer2DModel, blocks: int, dtype: torch.dtype) -> SanaControlNetModel:
    """Return a ControlNet with copies of the first `blocks` of `transformer`, in `dtype`, at first without effect.

    It follows the reference of `transformer`. The copies and the projections require gradients. The other modules are
    the frozen modules of `transformer`, in NVIDIA's arrangement also its first block.
    """
    from accelerate import init_empty_weights
    from diffusers import SanaControlNetModel

    transformer.requires_grad_(False)
    arguments = signature(SanaControlNetModel.__init__).parameters
    config = {name: value for name, value in transformer.config.items() if name in arguments}
    with init_empty_weights():
        controlnet = SanaControlNetModel(**{**config, "num_layers": blocks})
    for name in ("patch_embed", "time_embed", "caption_projection", "caption_norm"):
        setattr(controlnet, name, getattr(transformer, name))
    copies = [copy.deepcopy(block).to(dtype) for block in transformer.transformer_blocks[:blocks]]
    controlnet.transformer_blocks = torch.nn.ModuleList(copies)
    trained = [controlnet.transformer_blocks, controlnet.input_block, controlnet.controlnet_blocks]
    for projection in trained[1:]:
        projection.to_empty(device=transformer.device).to(dtype)
        for parameter in projection.parameters():
            torch.nn.init.zeros_(parameter)
    for module in trained:
        module.requires_grad_(True)
    reference = getattr(transformer.config, "reference", DIFFUSERS)
    controlnet.register_to_config(reference=reference)
    if reference == NVIDIA:
        controlnet.base_block = transformer.transformer_blocks[0]
    return controlnet.train(False)


def steering_residuals(
    control: Control, x: torch.Tensor, embeds: torch.Tensor, timestep: torch.Tensor, mask: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the residuals of a ControlNet with gradients, through the library's modules.

    Residual i [B, N, D] acts after block i. None: no residual. `x` [B, 32, h, w] is in the model's scale. `embeds`
    [B, T, C] and `mask` [B, T] are the captions.
    """
    controlnet, latents = control.controlnet, control.latents.to(x)
    if getattr(controlnet, "base_block", None) is None:
        library_residuals = controlnet(x, embeds, timestep, latents, encoder_attention_mask=mask, return_dict=False)[0]
        return [None, *(residual.to(x.dtype) for residual in library_residuals)]
    patch = controlnet.config.patch_size
    size = x.shape[-2] // patch, x.shape[-1] // patch
    hidden = controlnet.patch_embed(x)
    time, _ = controlnet.time_embed(timestep, batch_size=len(x), hidden_dtype=hidden.dtype)
    captions = controlnet.caption_norm(controlnet.caption_projection(embeds))
    bias = ((1 - mask.to(x.dtype)) * DROPPED)[:, None]

    def run(block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        arguments = (hidden, None, captions, bias, time, *size)
        if controlnet.gradient_checkpointing:
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)

    hidden = run(controlnet.base_block, hidden) + controlnet.input_block(embed(controlnet, latents, None))
    residuals: list[torch.Tensor | None] = []
    for block, projection in zip(controlnet.transformer_blocks, controlnet.controlnet_blocks, strict=True):
        hidden = run(block, hidden)
        residuals.append(projection(hidden).to(x.dtype))
    return residuals


@contextmanager
def steered(transformer: SanaTransformer2DModel, residuals: Sequence[torch.Tensor | None]) -> Iterator[Any]:
    """Give the `controlnet_block_samples` of the library's forward, so that residual i acts after block i.

    The library's first sample acts after the second block. This context adds the residual of the first block.
    """
    first = residuals[0] if residuals else None
    if first is None:
        yield residuals[1:] or None
        return
    hook = transformer.transformer_blocks[0].register_forward_hook(lambda block, inputs, hidden: hidden + first)
    try:
        yield residuals[1:] or None
    finally:
        hook.remove()
