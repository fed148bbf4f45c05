"""The memory layout of layers' weights, and access to the weights for fused kernels and matrix products.

A kernel or a matrix product can use the weights of a plain layer directly. A host's layer may lend the weights that it
would use, cast and patched. All other layers, such as adapters and layers with hooks, have to be called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

WeightsUse = Callable[[Any, Any], torch.Tensor]
# Devices whose weights stay contiguous. MPS has computed wrong convolutions of some channels-last tensors (pytorch
# issue 180984). On the CPU the results would differ in the last bits.
CONTIGUOUS = ("cpu", "mps")


def with_weights(layer: torch.nn.Module, like: torch.Tensor, use: WeightsUse) -> torch.Tensor | None:
    """Return `use(weight, bias)` for the weights that `layer` uses for the input `like`. None: call the layer instead.

    A host's layer has a method `with_weights(like, use)`. It casts and patches its weights for `use`, and may move them
    back afterwards. The layers of torch and diffusers use their parameters.
    """
    if is_wrapped(layer) or layer._forward_pre_hooks or layer._forward_hooks:
        return None
    lend_weights = getattr(layer, "with_weights", None)
    if lend_weights is not None:
        return lend_weights(like, use)
    # Adapters of PEFT have other classes.
    if not type(layer).__module__.startswith(("torch.nn.", "diffusers.")):
        return None
    return use(layer.weight, layer.bias)


def is_wrapped(layer: torch.nn.Module) -> bool:
    """Whether `forward` of `layer` was replaced, as by accelerate's offloading and ComfyUI's adapters in bypass mode.

    Adapters that were removed leave the method of the class as an attribute of the layer. That does not count.
    """
    forward = vars(layer).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(layer).forward


def pointwise(layer: torch.nn.Module, states: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Apply a 1x1 convolution, or a Linear in its place, to `states` [B, N, C], the positions of a map of `size`.

    It is computed as one matrix product that includes the bias. A convolution would need a second kernel for the bias.
    """
    # A wrapped layer, convolution or Linear, gets maps.
    if not isinstance(layer, torch.nn.Conv2d) and not is_wrapped(layer):
        return layer(states)
    out = with_weights(layer, states, lambda weight, bias: F.linear(states, weight.flatten(1), bias))
    if out is None:
        out = layer(states.unflatten(1, size).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)
    return out


def arrange_convolutions(module: torch.nn.Module) -> None:
    """Store the weights of the convolutions in `module` in the memory format that suits their device.

    cuDNN would rearrange contiguous weights in each call, so once for each strip of a decode. Values and shapes do not
    change. With ROCm the weights stay contiguous, because MIOpen's preferred format depends on the GPU.
    """
    for child in module.modules():
        if isinstance(child, torch.nn.Conv2d):
            keeps = child.weight.device.type in CONTIGUOUS or torch.version.hip is not None
            layout = torch.contiguous_format if keeps else torch.channels_last
            child.weight.data = child.weight.data.contiguous(memory_format=layout)


def join_projections(transformer: SanaTransformer2DModel) -> None:
    """Add a layer `to_qkv` to each self-attention, which computes query, key and value in one product.

    The weights of the three layers become views of its weight. A CPU keeps separate products, because a joint product
    differs in the last bits.
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
