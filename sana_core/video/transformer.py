"""SANA-Video 2.0's transformer, which diffusers does not have, from diffusers' layers of SANA-Video.

Its blocks have gated attention, linear in most layers and softmax in every fourth one, and a feed-forward without
convolutions. forward.py computes with it. Source: NVlabs/Sana, diffusion/model/nets/sana_video2{,_blocks}.py.
"""

from __future__ import annotations

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import PixArtAlphaTextProjection
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import AdaLayerNormSingle, RMSNorm
from diffusers.models.transformers.transformer_sana_video import SanaModulatedNorm, SanaVideoTransformerBlock
from torch.nn import Linear

from ..errors import InputError
from .forward import prepare, velocity


class GatedAttention(Attention):
    """The layers of a self-attention. Only linear attention has `to_beta`, the weight of each key in each head."""

    def __init__(self, width: int, heads: int, is_linear: bool) -> None:
        dim = width // heads
        super().__init__(width, heads=heads, kv_heads=heads, dim_head=dim, qk_norm="rms_norm_across_heads")
        self.to_gate = Linear(width, width)
        if is_linear:
            self.to_beta = Linear(width, heads)
            self.norm_out = RMSNorm(dim, eps=1e-5)


class SwiGLU(torch.nn.Module):
    """The layers of a feed-forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(width, hidden), Linear(width, hidden)
        self.down_proj = Linear(hidden, width)


class DepthAttention(torch.nn.Module):
    """The queries by which attention, feed-forward and the last layer weigh the states of earlier groups of layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn_proj, self.mlp_proj, self.final_proj = (Linear(width, 1, bias=False) for _ in range(3))


class SanaVideo2Transformer3DModel(ModelMixin, ConfigMixin):
    """The parameters of SANA-Video 2.0, with diffusers' names where SANA-Video has them too."""

    @register_to_config
    def __init__(
        self,
        in_channels: int = 128,
        out_channels: int | None = 128,
        num_attention_heads: int = 20,
        attention_head_dim: int = 128,
        num_layers: int = 32,
        caption_channels: int = 2304,
        mlp_ratio: float = 4.0,
        patch_size: tuple[int, int, int] = (1, 1, 1),
        guidance_embeds: bool = False,
        softmax_heads: int = 10,
        softmax_every: int = 4,  # every fourth layer has softmax
        group_layers: int = 8,  # layers that add to the same state
    ) -> None:
        super().__init__()
        heads, dim, width = num_attention_heads, attention_head_dim, num_attention_heads * attention_head_dim
        self.patch_embedding = torch.nn.Conv3d(in_channels, width, patch_size, patch_size)
        self.time_embed = AdaLayerNormSingle(width)
        self.caption_projection = PixArtAlphaTextProjection(caption_channels, width)
        self.caption_norm = RMSNorm(width, eps=1e-5)
        self.transformer_blocks = torch.nn.ModuleList()
        for i in range(num_layers):
            is_linear = (i + 1) % softmax_every > 0
            # A small feed-forward, because the next lines replace it. With 1 / width, rounding may leave no channel.
            block = SanaVideoTransformerBlock(width, heads, dim, 0.0, heads, dim, width, mlp_ratio=2 / width)
            block.attn1 = GatedAttention(width, heads if is_linear else softmax_heads, is_linear)
            block.ff = SwiGLU(width, int(width * mlp_ratio))
            self.transformer_blocks.append(block)
        self.attn_res = DepthAttention(width)
        self.scale_shift_table = torch.nn.Parameter(torch.zeros(2, width))
        self.norm_out = SanaModulatedNorm(width)
        self.proj_out = Linear(width, in_channels)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """The call of diffusers' transformers, as a tuple."""
        if torch.is_grad_enabled():
            raise InputError("model: got SANA-Video 2.0 for training, expected a SANA model of images; train that one")
        embeds, mask = encoder_hidden_states, encoder_attention_mask
        mask = embeds.new_ones(embeds.shape[:2]) if mask is None else mask
        return (velocity(self, hidden_states, timestep, prepare(self, embeds, mask, *hidden_states.shape[2:])),)
