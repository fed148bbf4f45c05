"""Tiny transformers of every variant in the library's own class, with random weights, and its bundled pipeline."""

import torch
from diffusers import SanaPipeline, SanaTransformer2DModel
from transformers import Gemma2Model

CAPTION = 24
VARIANTS = {
    "sana": {},
    "sana-1.5": {"qk_norm": "rms_norm_across_heads"},
    "sana-4k": {"interpolation_scale": 2.0, "sample_size": 4},
    "sprint": {"qk_norm": "rms_norm_across_heads", "guidance_embeds": True},
}


def tiny_transformer(variant="sana", layers=3, seed=0):
    torch.manual_seed(seed)
    transformer = SanaTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=layers,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=CAPTION,
        **VARIANTS[variant],
    )
    return transformer.requires_grad_(False)


def random_prompt(count=1, tokens=10, kept=None, seed=0):
    """Embeddings [count, tokens, CAPTION] and a mask that keeps the first `kept` tokens, all by default."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(count, tokens, dtype=torch.long)
    mask[:, :kept] = 1
    return torch.randn(count, tokens, CAPTION, generator=generator), mask


def library_pipeline(checkpoint):
    """diffusers' pipeline of the bundled checkpoint in fp32, with the capped attention that older transformers lack."""
    encoder = Gemma2Model.from_pretrained(checkpoint / "text_encoder", attn_implementation="eager")
    return SanaPipeline.from_pretrained(checkpoint, text_encoder=encoder).to(torch.float32)
