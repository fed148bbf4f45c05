"""A frozen model in 8 bits, under an adapter in float32: half the memory of bfloat16 (Dettmers et al. 2023, QLoRA).

Each row of a weight has one scale, its largest number over 127. The weight that a product needs is made for that
product and again for its gradient, so that no more than one layer's is in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

LARGEST = 127


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [O, I] int8 and the scales [O, 1] of rows, in the dtype of `weight` [O, I]."""
    rows = weight.detach().float()
    # the rounded scale is the one that the codes are made for
    scale = (rows.abs().amax(dim=1, keepdim=True) / LARGEST).to(weight.dtype)
    steps = rows / scale.float().clamp(min=torch.finfo(torch.float32).tiny)
    return steps.round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def dequantise(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the weight [O, I] that `quantise_rows` made `codes` and `scale` of, in the dtype of `scale`."""
    return codes.to(scale.dtype) * scale


class Product(torch.autograd.Function):
    """x @ weight.T + bias of a frozen weight in 8 bits, which is not kept for the gradient of x."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.save_for_forward(codes, scale)
        return F.linear(x, dequantise(codes, scale), bias)

    @staticmethod
    def jvp(ctx: Any, x: torch.Tensor, *others: None) -> torch.Tensor:
        codes, scale = ctx.saved_for_forward
        return F.linear(x, dequantise(codes, scale))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        codes, scale = ctx.saved_tensors
        return gradients[0] @ dequantise(codes, scale), None, None, None


class EightBitLinear(torch.nn.Linear):
    """A linear layer with its weight in 8 bits. peft requires the class Linear."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return dequantise(self.codes, self.scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return Product.apply(input, self.codes, self.scale, self.bias)


class EightBitPointwise(torch.nn.Conv2d):
    """A 1x1 convolution with its weight in 8 bits. peft requires the class Conv2d."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return dequantise(self.codes, self.scale)[..., None, None]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return Product.apply(input.movedim(1, -1), self.codes, self.scale, self.bias).movedim(-1, 1)


def quantise_layer(layer: torch.nn.Module) -> None:
    """Put the weight of `layer` into 8 bits where it is a linear layer or a convolution of 1x1."""
    if type(layer) is torch.nn.Linear:
        kind: type[torch.nn.Module] = EightBitLinear
    elif type(layer) is torch.nn.Conv2d and layer.kernel_size == (1, 1) and layer.groups == 1:
        kind = EightBitPointwise
    else:
        return
    codes, scale = quantise_rows(layer.weight.flatten(1))
    del layer.weight
    layer.register_buffer("codes", codes)
    layer.register_buffer("scale", scale)
    layer.__class__ = kind  # type: ignore[assignment]


def quantise_base(transformer: SanaTransformer2DModel) -> None:
    """Put the frozen weights of the blocks of `transformer`, 95 % and more of it, into 8 bits, one after another.

    The depthwise convolutions, what embeds image, time and caption, and an adapter that is on it stay as they are.
    """
    for block in transformer.transformer_blocks:
        for layer in block.modules():
            if not any(parameter.requires_grad for parameter in layer.parameters()):
                quantise_layer(layer)
