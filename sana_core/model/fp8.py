"""Products with weights and inputs in fp8, e4m3 (Micikevicius et al. 2022): inexact, for GPUs that multiply so.

Three bits of mantissa are off by 2.6 % of a number on average, so a product of two numbers by 3.7 %, and the sum of as
many as there are too, for they go up and down alike. Each row of inputs has its own scale: an image depends on no other
in the batch, and values that are far from 1, as those between SANA's blocks, neither end at 448 nor vanish.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from ..errors import InputError, first_line

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

FORMAT, LARGEST = torch.float8_e4m3fn, 448.0
# both sides of a matrix, in hardware
MULTIPLE = 16
# attention and feed-forward, 97 % of the model: what lies around the blocks is small
LAYERS = re.compile(r"transformer_blocks\.\d+\.(attn[12]\.(to_(qkv|[qkv])|to_out\.0)|ff\.conv_(inverted|point))")


def scaled_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rows` [M, K] in e4m3, and the scale [M, 1] in float32 that each is to be multiplied by."""
    scale = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True, dtype=torch.float32) / LARGEST
    scale.clamp_(min=torch.finfo(torch.float32).tiny)
    # divided in float32 and rounded once, by one kernel on accelerators
    return torch.div(rows, scale, out=torch.empty_like(rows, dtype=FORMAT)), scale


class Fp8Linear(torch.nn.Module):
    """What `layer`, a Linear or a 1x1 convolution, makes of [..., K], with a `weight` [N, K] in e4m3."""

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
    """Let the products of the blocks be in fp8; those whose sides no GPU takes stay as they are."""
    for attention in (block.attn1 for block in transformer.transformer_blocks):
        if hasattr(attention, "to_qkv"):
            # views, which would keep its weights
            del attention.to_q, attention.to_k, attention.to_v
    for path, layer in list(transformer.named_modules()):
        if LAYERS.fullmatch(path) and all(side % MULTIPLE == 0 for side in layer.weight.shape[:2]):
            transformer.set_submodule(path, Fp8Linear(layer))


@torch.no_grad()
def check_fp8(device: torch.device) -> None:
    """Raise InputError unless `device` multiplies in fp8 by rows: tried on a few elements, since no list of GPUs is as
    long as torch's and its libraries' own conditions."""
    why = "it has no such units"
    if device.type != "cpu":
        try:
            layer = torch.nn.Linear(MULTIPLE, MULTIPLE, device=device, dtype=torch.bfloat16)
            Fp8Linear(layer)(torch.zeros(1, MULTIPLE, device=device, dtype=torch.bfloat16))
            return
        except Exception as error:
            why = first_line(error)
    raise InputError(f"fp8: got {device}, which cannot multiply in fp8 ({why:.200}); leave it out")
