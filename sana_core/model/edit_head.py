"""VIBE's edit head: the hidden states of Qwen3-VL at the meta queries to embeddings of the transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# Of all released edit heads. The shapes do not show it.
HEADS = 16
# The feed-forward has this many times the width of the hidden states.
EXPANSION = 4


class GatedLinear(nn.Module):
    """The feed-forward of a block, SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, EXPANSION * width)
        self.fc3 = nn.Linear(width, EXPANSION * width)
        self.fc2 = nn.Linear(EXPANSION * width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.silu(self.fc1(states)) * self.fc3(states))


class FusedAttention(nn.Module):
    """The attention of torch.nn.MultiheadAttention, from layers that ComfyUI can cast and offload."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        parts = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.in_proj(states).chunk(3, dim=-1)]
        return self.out_proj(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class HeadBlock(nn.Module):
    """A transformer block with norms before its two parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_norm, self.attn = nn.LayerNorm(width), FusedAttention(width)
        self.output_norm, self.mlp = nn.LayerNorm(width), GatedLinear(width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.attn(self.input_norm(states))
        return states + self.mlp(self.output_norm(states))


class EditHead(nn.Module):
    """The meta queries [queries, width], and the head. Its parameters have VIBE's names, except for `attn.in_proj`."""

    def __init__(self, queries: int, width: int, hidden: int, output: int, layers: int) -> None:
        super().__init__()
        self.meta_queries = nn.Parameter(torch.zeros(queries, width))
        self.input_proj = nn.Linear(width, hidden)
        self.attn_blocks = nn.Sequential(*(HeadBlock(hidden) for _ in range(layers)))
        self.output_proj = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, output))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return embeddings [B, queries, output] for `states` [B, queries, width]. Zeros are the negative prompt."""
        return self.output_proj(self.attn_blocks(self.input_proj(states + self.meta_queries.to(states))))
