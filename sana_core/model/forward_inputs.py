"""Types that forward.py, block.py and sharded_ops.py share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from diffusers.models.transformers.sana_transformer import GLUMBConv


class Constants(NamedTuple):
    """Tensors that depend only on the prompts and the image size. Computed once per sampling.

    P prompts of T tokens, N positions, L blocks.
    """

    keys: list[torch.Tensor]  # L of [P, heads, T, head_dim]
    values: list[torch.Tensor]
    bias: torch.Tensor | None  # [P, 1, 1, T], or None if no prompt is padded
    position: torch.Tensor | None  # position embedding [1, N, D], or None
    tables: torch.Tensor  # [L, 6, D]
    kernels: frozenset[str]  # names of the fused kernels in sana_core.kernels to use between the layers
    eps: float  # in the denominator of the linear attention
    # SANA-Video: the rotation for each number of channels in a head (sana_core/video/forward.py).
    turns: dict[int, torch.Tensor] | None = None


class Perturbation(NamedTuple):
    """Perturbed attention: in `blocks`, the self-attention of the images in `images` becomes the identity."""

    images: torch.Tensor  # bool [B, 1, 1]
    blocks: frozenset[int]


class RowOperations(Protocol):
    """The operations of a forward that need the rows of other shards. sharded_ops.py implements them."""

    def embed(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the patch embedding [B, N, D] of `x` [B, 32, n, w]."""

    def sums(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the sums [B, heads, d, d + 1] of the linear attention over the whole image."""

    def kernel_sums(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the same sums as [B, heads, d + 1, d], from the parts of the fused kernel."""

    def feed_forward(self, block: GLUMBConv, states: torch.Tensor, kernels: frozenset[str]) -> torch.Tensor:
        """Return the feed-forward of `states` [B, N, D]. Its convolution reads one row of each neighbour."""
