"""How weights lie in memory, so that a device reads them as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

# MPS has convolved some channels-last tensors wrong (pytorch issue 180984), and on the CPU the bits would be others
CONTIGUOUS = ("cpu", "mps")


def arrange_convolutions(module: torch.nn.Module) -> None:
    """Lay the weights of the convolutions in `module` out in memory as their device reads them beside such maps.

    cuDNN would rearrange contiguous weights in each call, for each strip of a decode. Values, shapes and bytes stay,
    and what is laid out already is not touched. MIOpen's choice depends on the GPU, so with ROCm they stay contiguous.
    """
    for child in module.modules():
        if isinstance(child, torch.nn.Conv2d):
            keeps = child.weight.device.type in CONTIGUOUS or torch.version.hip is not None
            layout = torch.contiguous_format if keeps else torch.channels_last
            child.weight.data = child.weight.data.contiguous(memory_format=layout)


def join_projections(transformer: SanaTransformer2DModel) -> None:
    """Let one product make query, key and value of each self-attention: a layer `to_qkv` has the weights of the three.

    Theirs become views of its. On a CPU nothing changes, where the products' bits would be others.
    """
    for attention in (block.attn1 for block in transformer.transformer_blocks):
        layers = attention.to_q, attention.to_k, attention.to_v
        weight = layers[0].weight
        if weight.device.type == "cpu" or layers[0].bias is not None:
            return
        joined = torch.nn.Linear(weight.shape[1], 3 * len(weight), bias=False, device="meta").requires_grad_(False)
        joined.weight = torch.nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
        for layer, part in zip(layers, joined.weight.chunk(3), strict=True):
            layer.weight.data = part
        attention.to_qkv = joined
