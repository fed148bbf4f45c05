"""Matrix products with weights and inputs in fp8 e4m3 (Micikevicius et al. 2022), on GPUs that support it. Inexact.

With three bits of mantissa, a number is off by 2.6 % on average, and a product of two numbers by 3.7 %. A sum of such
products is off by 3.7 % too, because its errors partly cancel. Each row of inputs has its own scale. So an
image does not depend on the other images of its batch, and values far from 1, such as the ones between SANA's blocks,
are neither clipped at 448 nor rounded to zero.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from ..errors import InputError, first_line

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

FORMAT, LARGEST = torch.float8_e4m3fn, 448.0
# GPUs need both sides of a matrix to be multiples of this.
MULTIPLE = 16
# The layers that become fp8: attention and feed-forward, 97 % of the model. The layers outside the blocks are small.
LAYERS = re.compile(r"transformer_blocks\.\d+\.(attn[12]\.(to_(qkv|[qkv])|to_out\.0)|ff\.conv_(inverted|point))")


def scaled_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rows` [M, K] in e4m3, and the factors [M, 1] in float32 that restore the rows."""
    scale = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True, dtype=torch.float32) / LARGEST
    scale.clamp_(min=torch.finfo(torch.float32).tiny)
    # This divides in float32 and rounds once. On accelerators it is one kernel.
    return torch.div(rows, scale, out=torch.empty_like(rows, dtype=FORMAT)), scale


class Fp8Linear(torch.nn.Module):
    """`layer`, a Linear or a 1x1 convolution, with its weight [N, K] in e4m3. Inputs are [..., K]."""

    weight: torch.Tensor
    scale: torch.Tensor  # [1, N]

    def __init__(self, layer: torch.nn.Linear | torch.nn.Conv2d) -> None:
        super().__init__()
        weight, scale = scaled_rows(layer.weight.detach().flatten(1))
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.T.contiguous())
        self.bias = layer.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        codes, scale = scaled_rows(states.flatten(0, -2))
        out = torch._scaled_mm(
            codes,
            self.weight.T,
            scale_a=scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=states.dtype,
            use_fast_accum=True,
        )
        return out.unflatten(0, states.shape[:-1])


def quantise_products(transformer: SanaTransformer2DModel) -> None:
    """Replace the layers of the blocks by fp8 ones, except layers whose sides are not multiples of MULTIPLE."""
    for attention in (block.attn1 for block in transformer.transformer_blocks):
        if hasattr(attention, "to_qkv"):
            # These are views of the weight of `to_qkv` and would keep it in memory.
            del attention.to_q, attention.to_k, attention.to_v
    for path, layer in list(transformer.named_modules()):
        if LAYERS.fullmatch(path) and all(side % MULTIPLE == 0 for side in layer.weight.shape[:2]):
            transformer.set_submodule(path, Fp8Linear(layer))


@torch.no_grad()
def check_fp8(device: torch.device) -> None:
    """Raise InputError unless `device` supports fp8 products with a scale per row.

    This runs a small product, because support depends on the GPU, on torch and on its libraries.
    """
    why = "it has no such units"
    if device.type != "cpu":
        try:
            layer = torch.nn.Linear(MULTIPLE, MULTIPLE, device=device, dtype=torch.bfloat16)
            Fp8Linear(layer)(torch.zeros(1, MULTIPLE, device=device, dtype=torch.bfloat16))
            return
        except Exception as error:
            why = first_line(error)
    raise InputError(f"fp8: got {device}, which cannot multiply in fp8 ({why:.200}); leave it out")
