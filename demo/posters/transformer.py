"""The transformer of posters before it is trained: today's of scenes, made deeper without a change of what it draws."""

from __future__ import annotations

import torch
from diffusers import SanaTransformer2DModel

from ..transformer import build

# the shortest way to 8 to 15 M parameters that keeps each of today's weights
LAYERS = 14
PIXELS = 512
# what a block adds to its input is the output of these
OUTPUTS = ("attn1.to_out.0", "attn2.to_out.0", "ff.conv_point")


def deepen(small: SanaTransformer2DModel, layers: int = LAYERS, pixels: int = PIXELS) -> SanaTransformer2DModel:
    """Return a model of so many blocks that draws what `small` does, its blocks spread evenly among new ones.

    A new block adds nothing until it has learnt to. Positions stay what they were in a picture of `small`'s size, and
    lie closer together in a larger one.
    """
    config = small.config
    heads = config.num_attention_heads
    model = build(config.caption_channels, heads, layers, pixels)
    positions = config.interpolation_scale * pixels / 32 / config.sample_size
    if positions != 1.0:
        model = SanaTransformer2DModel.from_config({**model.config, "interpolation_scale": positions})
    with torch.no_grad():
        for block in model.transformer_blocks:
            for name in OUTPUTS:
                for parameter in block.get_submodule(name).parameters():
                    parameter.zero_()
    kept = {name: tensor for name, tensor in small.state_dict().items() if not name.startswith("transformer_blocks.")}
    last = len(small.transformer_blocks) - 1
    for number, block in enumerate(small.transformer_blocks):
        place = round(number * (layers - 1) / last)
        kept |= {f"transformer_blocks.{place}.{name}": tensor for name, tensor in block.state_dict().items()}
    model.load_state_dict(kept, strict=False)
    return model
