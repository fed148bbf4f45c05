"""Names for files that are not SANA's, so that an error can say what was found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..runtime.text import brief
from .headers import Header

# Models of SANA's family that this pack does not run. Their files also have the names that identify SANA's parts, so
# they are looked for first. A pattern matches the end of a tensor's name, the specific ones first. The names are from
# diffusers, NVlabs/Sana (diffusion/model/nets), ato-zen/VIBE (vibe/transformer), nunchaku (src/SanaModel.cpp,
# src/Linear.cpp) and bitsandbytes.
RELATIVES = (
    (r"raymap_embedder\.proj\.weight", "SANA-WM, which makes videos along a camera's path"),
    (r"\.attn\.A_log", "SANA-Streaming, which edits videos"),
    (r"meta_queries", "VIBE, which edits images by instructions that Qwen3-VL reads"),
    (r"\.mlp\.point_conv\.linear\.weight", "Sol-RL's SANA, which has linear layers for its 1x1 convolutions"),
    (r"\.ff\.inverted_conv\.qweight", "SANA in 4 bits for nunchaku; the loader's quantise saves memory in its place"),
    (r"\.qweight", "a model in 4 bits for the kernels of another program"),
    (r"\.quant_state\.bitsandbytes__\w+", "a model in 4 bits of bitsandbytes"),
)
# LongSANA has the tensors of SANA-Video 2B, but its attention and its convolutions over time are causal. 50 steps of
# SANA-Video would generate noise. These are the class in its config.json, and parts of its files' names.
LONGSANA = "LongSANA, whose layers read earlier frames from a cache that this pack does not have, unlike SANA-Video's"
CAUSAL_CLASS, LONG_NAMES = "SanaVideoCausalTransformer3DModel", ("longlive", "longsana")
# Damaged parts of SANA: a pattern for a tensor's name, the part, and the tensors by which the part is identified.
DAMAGED = (
    (
        r"\.ff\.conv_(inverted|depth|point)\.",
        "a SANA transformer",
        ("caption_projection.linear_1.weight", "transformer_blocks.0.ff.conv_point.weight"),
    ),
    # Nunchaku keeps the layers that it does not quantise in a second file.
    (r"^caption_norm\.", "a SANA transformer", ("transformer_blocks.0.ff.conv_point.weight",)),
    (
        r"\.cross_attn\.q_linear\.|\.mlp\.point_conv\.conv\.",
        "a SANA transformer",
        ("blocks.0.cross_attn.q_linear.weight", "blocks.0.mlp.point_conv.conv.weight"),
    ),
    (r"to_qkv_multiscale\.", "a DC-AE", ("decoder.conv_in.weight",)),
    (r"\.op_list\.", "a DC-AE", ("encoder.project_in.conv.weight", "decoder.project_in.main.conv.weight")),
    (r"\.pre_feedforward_layernorm\.", "a Gemma 2 text encoder", ("layers.0.pre_feedforward_layernorm.weight",)),
)
# The decoder's stages and first layer, as diffusers and as MIT name them.
DC_AE_STAGE = re.compile(r"decoder\.(?:up_blocks|stages)\.(\d{1,2})\.(?:op_list\.)?\d+\.")
DC_AE_FIRST = re.compile(r"decoder\.(conv_in|project_in(\.main)?\.conv)\.weight")


def relative(names: Iterable[str]) -> str:
    """Return the model of SANA's family that has tensors with these names, "" for none."""
    text = "\n".join(names)
    return next((label for pattern, label in RELATIVES if re.search(f"(?:{pattern})$", text, re.MULTILINE)), "")


def foreign_model(headers: Mapping[str, Header]) -> str:
    """Return a description of a file that is not SANA's. An unknown file is described by its first three names."""
    if known := relative(headers):
        return known
    stages = [int(match[1]) for name in headers if (match := DC_AE_STAGE.match(name))]
    first = next((header.shape for name, header in headers.items() if DC_AE_FIRST.fullmatch(name)), ())
    if stages and len(first) > 1:
        return f"a DC-AE f{2 ** max(stages)}c{first[1]} that is not SANA's"
    decoder = [header for name, header in headers.items() if name.endswith("decoder.conv_in.weight")]
    if decoder and len(decoder[0].shape) > 1:
        return f"a {'video ' * (len(decoder[0].shape) == 5)}VAE with {decoder[0].shape[1]} channels"
    for pattern, label, known_by in DAMAGED:
        missing = [name for name in known_by if name not in headers]
        # Gemma 3 has these norms too, and a q_norm besides.
        if missing and any(re.search(pattern, name) for name in headers) and not any("q_norm" in n for n in headers):
            return f"{label} without {missing[0]}"
    return f"tensors named {', '.join(brief(name) for name in sorted(headers)[:3])}" if headers else "no tensors"
