"""Names for files that are not SANA's, so that an error can say what was found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .files import brief
from .headers import Header

# of SANA's family, with all the names that tell SANA's own parts or a LoRA: what some tensor's name ends with, specific
# before broad. The names are those of diffusers, of NVlabs/Sana (diffusion/model/nets), of ato-zen/VIBE
# (vibe/transformer), of nunchaku (src/SanaModel.cpp, src/Linear.cpp), and of bitsandbytes.
RELATIVES = (
    (r"attn_res\.final_proj\.weight", "SANA-Video 2.0, which makes videos"),
    (r"raymap_embedder\.proj\.weight", "SANA-WM, which makes videos along a camera's path"),
    (r"\.attn\.A_log", "SANA-Streaming, which edits videos"),
    (r"meta_queries", "VIBE, which edits images by instructions that Qwen3-VL reads"),
    (r"\.mlp\.point_conv\.linear\.weight", "Sol-RL's SANA, which has linear layers for its 1x1 convolutions"),
    (r"\.ff\.inverted_conv\.qweight", "SANA in 4 bits for nunchaku; the loader's quantise saves memory in its place"),
    (r"\.qweight", "a model in 4 bits for the kernels of another program"),
    (r"\.quant_state\.bitsandbytes__\w+", "a model in 4 bits of bitsandbytes"),
)
# specific before broad: a pattern that some tensor's name contains
FAMILIES = (
    (r"model\.diffusion_model\.input_blocks.*(conditioner|label_emb)|^label_emb\.", "a Stable Diffusion XL U-Net"),
    (r"conditioner\.embedders\.1", "a Stable Diffusion XL checkpoint"),
    (r"input_blocks\.0\.0\.weight|down_blocks\.0\.resnets\.0\.time_emb_proj", "a Stable Diffusion U-Net"),
    (r"double_blocks\.0\.img_(attn|mod)|single_transformer_blocks\.0\.proj_mlp", "a Flux transformer"),
    (r"joint_blocks\.0\.context_block", "a Stable Diffusion 3 transformer"),
    (r"patch_embedding\.weight|audio_proj_in\.weight", "a video transformer"),
    (r"decoder\.conv1\.weight|decoder\.conv_in\.conv\.weight", "a video VAE"),
    (r"adaln_single\.linear\.weight", "a PixArt transformer"),
    (r"pixel_blocks|pixel_embedder", "a PixelDiT transformer"),
    (r"encoder\.block\.0\.layer\.0\.SelfAttention", "a T5 text encoder"),
    (r"layers\.0\.self_attn\.q_norm\.weight", "a Gemma 3 or Qwen text encoder"),
    (r"layers\.0\.self_attn\.q_proj\.weight", "a language model other than Gemma 2"),
    (r"text_model\.encoder\.layers\.0", "a CLIP text encoder"),
    (r"input_hint_block|controlnet_cond_embedding|zero_convs\.0", "another model's ControlNet"),
    (r"body\.0\.rdb1|model\.1\.sub\.0|conv_body\.weight", "an upscaler"),
)
# SANA's own parts that lack one of the tensors by which they are known
OWN = (
    (
        r"\.ff\.conv_(inverted|depth|point)\.",
        "a SANA transformer",
        ("caption_projection.linear_1.weight", "transformer_blocks.0.ff.conv_point.weight"),
    ),
    # what nunchaku leaves unquantised lies in a file of its own
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
# the decoder's stages and first layer in diffusers' names and in MIT's
DC_AE_STAGE = re.compile(r"decoder\.(?:up_blocks|stages)\.(\d{1,2})\.(?:op_list\.)?\d+\.")
DC_AE_FIRST = re.compile(r"decoder\.(conv_in|project_in(\.main)?\.conv)\.weight")


def relative(names: Iterable[str]) -> str:
    """Return which of SANA's family, which this pack does not run, has tensors with these names; "" for none."""
    text = "\n".join(names)
    return next((label for pattern, label in RELATIVES if re.search(f"(?:{pattern})$", text, re.MULTILINE)), "")


def foreign_model(headers: Mapping[str, Header]) -> str:
    """Return what a file with these names is, by its first three names if that is not known."""
    if known := relative(headers):
        return known
    stages = [int(match[1]) for name in headers if (match := DC_AE_STAGE.match(name))]
    first = next((header.shape for name, header in headers.items() if DC_AE_FIRST.fullmatch(name)), ())
    if stages and len(first) > 1:
        return f"a DC-AE f{2 ** max(stages)}c{first[1]} that is not SANA's"
    decoder = [header for name, header in headers.items() if name.endswith("decoder.conv_in.weight")]
    if decoder and len(decoder[0].shape) > 1:
        return f"a {'video ' * (len(decoder[0].shape) == 5)}VAE with {decoder[0].shape[1]} channels"
    for pattern, label, known_by in OWN:
        missing = [name for name in known_by if name not in headers]
        # Gemma 3 has Gemma 2's norms and its own
        if missing and any(re.search(pattern, name) for name in headers) and not any("q_norm" in n for n in headers):
            return f"{label} without {missing[0]}"
    for pattern, label in FAMILIES:
        if any(re.search(pattern, name) for name in headers):
            return label
    return f"tensors named {', '.join(brief(name) for name in sorted(headers)[:3])}" if headers else "no tensors"
