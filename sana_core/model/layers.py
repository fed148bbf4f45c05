"""The weights of layers: how they lie in memory, and what a fused kernel or a product of matrices takes itself.

Where it does, the layer stays what it is: its host's, cast and patched as it runs, or an adapter's. Only a layer that
has nothing to do but its arithmetic is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

WeightsUse = Callable[[Any, Any], torch.Tensor]
# MPS has convolved some channels-last tensors wrong (pytorch issue 180984), and on the CPU the bits would be others
CONTIGUOUS = ("cpu", "mps")


def with_weights(layer: torch.nn.Module, like: torch.Tensor, use: WeightsUse) -> torch.Tensor | None:
    """Return `use(weight, bias)` of the weights that `layer` would use on `like`; None if it must be called.

    A host's layer has a `with_weights(like, use)` of its own: it casts and patches its weights, and may give them back
    to where they came from afterwards. Of torch's and diffusers' layers they are the parameters.
    """
    if is_wrapped(layer) or layer._forward_pre_hooks or layer._forward_hooks:
        return None
    own = getattr(layer, "with_weights", None)
    if own is not None:
        return own(like, use)
    # an adapter of PEFT has a class of its own
    if not type(layer).__module__.startswith(("torch.nn.", "diffusers.")):
        return None
    return use(layer.weight, layer.bias)


def is_wrapped(layer: torch.nn.Module) -> bool:
    """Whether `layer` has a forward that is not its class's, as accelerate's offloading and ComfyUI's adapters in
    bypass mode give it; these leave a plain one behind when they go."""
    own = vars(layer).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(layer).forward


def pointwise(layer: torch.nn.Module, states: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return what a 1x1 convolution, or a Linear in its place, makes of `states` [B, N, C] of a map of `size`.

    A product of matrices with its bias in it, where the convolution is one kernel and its bias another.
    """
    # an adapter around either takes maps
    if not isinstance(layer, torch.nn.Conv2d) and not is_wrapped(layer):
        return layer(states)
    out = with_weights(layer, states, lambda weight, bias: F.linear(states, weight.flatten(1), bias))
    if out is None:
        out = layer(states.unflatten(1, size).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)
    return out


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
