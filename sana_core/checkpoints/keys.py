"""Map the names of original files to diffusers' names: NVIDIA's transformer and ControlNet, MIT's DC-AE, and adapters.

A fused tensor becomes several equal parts along its first dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from typing import NamedTuple

TRANSFORMER_NAMES = {
    "x_embedder.proj": "patch_embed.proj",
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "attention_y_norm": "caption_norm",
    "t_embedder.mlp.0": "time_embed.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_embed.emb.timestep_embedder.linear_2",
    "t_block.1": "time_embed.linear",
    "final_layer.linear": "proj_out",
    "final_layer": "",  # its scale_shift_table
}
# SANA-Video embeds patches of several frames. Its files have one of VIDEO_TENSORS.
VIDEO_NAMES = {"x_embedder.proj": "patch_embedding"}
VIDEO_TENSORS = {"blocks.0.mlp.t_conv.weight", "attn_res.final_proj.weight"}
# Sprint embeds the guidance in addition to the time.
SPRINT_NAMES = {
    "t_embedder.mlp.0": "time_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_embed.timestep_embedder.linear_2",
    "cfg_embedder.mlp.0": "time_embed.guidance_embedder.linear_1",
    "cfg_embedder.mlp.2": "time_embed.guidance_embedder.linear_2",
}
BLOCK_NAMES = {
    "": ("",),  # its scale_shift_table
    "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn.q_norm": ("attn1.norm_q",),
    "attn.k_norm": ("attn1.norm_k",),
    "attn.proj": ("attn1.to_out.0",),
    "cross_attn.q_linear": ("attn2.to_q",),
    "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
    "cross_attn.q_norm": ("attn2.norm_q",),
    "cross_attn.k_norm": ("attn2.norm_k",),
    "cross_attn.proj": ("attn2.to_out.0",),
    "mlp.inverted_conv.conv": ("ff.conv_inverted",),
    "mlp.depth_conv.conv": ("ff.conv_depth",),
    "mlp.point_conv.conv": ("ff.conv_point",),
    "mlp.t_conv": ("ff.conv_temp",),  # SANA-Video only.
    # SANA-Video 2.0 only.
    "attn.output_gate": ("attn1.to_gate",),
    "attn.beta_proj": ("attn1.to_beta",),
    "attn.o_norm": ("attn1.norm_out",),
    **{f"mlp.{name}_proj": (f"ff.{name}_proj",) for name in ("gate", "up", "down")},
}
CONTROL_PROJECTION = re.compile(r"controlnet\.(\d+)\.(before|after)_proj")
NUMBERED_BLOCK = re.compile(r"(?:blocks\.(\d+)|controlnet\.(\d+)\.copied_block)\.?(.*)")
# In NVIDIA's ControlNet: its copy of the base model's first block.
BASE_BLOCK = "base_block"

# Parts of names that torch.compile, FSDP and activation checkpointing insert, before any module.
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# What DDP, PEFT, Lightning and training scripts put before all names of a model, in any order.
HOLDERS = re.compile(r"^(?:(?:module|model|base_model|transformer|diffusion_model|unet)\.)+")

# The largest strength of an adapter, as in ComfyUI's LoRA loaders.
LARGEST_STRENGTH = 100.0
# The norms of a DoRA's rows, by PEFT's name, and of its columns, which are OneTrainer's default.
ROWS, COLUMNS = "lora_magnitude_vector", "column_magnitudes"
# Reads the end of a key in a file: a layer's name, the name that PEFT and diffusers give to an adapter in memory, such
# as default or default_0, and the part of the adapter.
LEAF = re.compile(
    r"\.(?P<part>lora_(?:A|B|down|up|mid|bias)|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)|[ab][12]"
    rf"|{ROWS}|alpha|dora_scale|oft_blocks|rescale|w_norm|b_norm|diff|diff_b|set_weight|reshape_weight)"
    r"(?:\.(?!weight$|bias$)[\w-]+)?(?:\.weight|(?P<bias>\.bias))?$"
    r"|(?:[._]lora(?:_linear_layer)?\.)(?P<old>up|down)\.weight$"
    r"|(?:\.base_layer|\.modules_to_save(?:\.(?!weight$|bias$)[\w-]+)?)?\.(?P<whole>weight|bias)$"
)
# Other names of a part: of kohya, of diffusers' old files, of LyCORIS' norms, and of whole tensors.
SAME = {
    **{"lora_down": "lora_A", "lora_up": "lora_B", "down": "lora_A", "up": "lora_B"},
    **{"w_norm": "diff", "b_norm": "diff_b", "set_weight": "weight"},
}

AUTOENCODER_PATTERNS = (
    (r"main\.|op_list\.", ""),
    (r"\.project_in\.conv\.", ".conv_in."),
    (r"encoder\.project_out\.0\.conv\.", "encoder.conv_out."),
    (r"decoder\.project_out\.0\.", "decoder.norm_out."),
    (r"decoder\.project_out\.2\.conv\.", "decoder.conv_out."),
    (r"encoder\.stages", "encoder.down_blocks"),
    (r"decoder\.stages", "decoder.up_blocks"),
    (r"context_module", "attn"),
    (r"local_module", "conv_out"),
    (r"aggreg\.(\d+)\.0\.", r"to_qkv_multiscale.\1.proj_in."),
    (r"aggreg\.(\d+)\.1\.", r"to_qkv_multiscale.\1.proj_out."),
    (r"(depth|inverted|point)_conv\.conv\.", r"conv_\1."),
    (r"point_conv\.norm|conv2\.norm", "norm"),
    (r"proj\.norm", "norm_out"),
    (r"proj\.conv\.", "to_out."),
    (r"conv([12]?)\.conv\.", r"conv\1."),
)


class Origin(NamedTuple):
    """The source of a parameter: a tensor of the file, and a number among its `parts` equal parts."""

    name: str
    part: int = 0
    parts: int = 1


def part_of(key: str) -> str:
    """Return the part of an adapter that the tensor `key` of a file is, "" for none."""
    match = LEAF.search(key)
    if match is None:
        return ""
    part = match["part"] or match["old"] or match["whole"]
    if match["bias"]:
        return "lora_bias" if part in ("lora_B", "lora_up") else ""
    return SAME.get(part, part)


def is_adapter(names: Iterable[str]) -> bool:
    """Whether tensors with these names are of an adapter. Models have tensors named alpha, too."""
    matches = filter(None, map(LEAF.search, names))
    return any(match["old"] or match["part"] not in (None, "alpha") for match in matches)


def transformer_origins(names: Set[str]) -> dict[str, Origin]:
    """Return {diffusers' name: origin} of NVIDIA's transformer or ControlNet. Unknown names map to themselves.

    `names` are the names in the file. The map is from diffusers' conversion scripts for SANA. A ControlNet's file
    contains the transformer that it was trained on. NVIDIA's ControlNet starts from its first block, which is
    "base_block" here.
    """
    modules = (
        {**TRANSFORMER_NAMES, **SPRINT_NAMES}
        if any(name.startswith("cfg_embedder.") for name in names)
        else TRANSFORMER_NAMES
    )
    if VIDEO_TENSORS & names:
        modules = {**modules, **VIDEO_NAMES}
    is_controlnet = any(name.startswith("controlnet.") for name in names)
    origins = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        targets = block_modules(module) or (modules.get(module, module),)
        if is_controlnet and name.startswith(("blocks.", "final_layer.")):
            if not name.startswith("blocks.0."):
                continue
            targets = tuple(target.replace("transformer_blocks.0", BASE_BLOCK, 1) for target in targets)
        for part, target in enumerate(targets):
            origins[f"{target}.{leaf}".lstrip(".")] = Origin(name, part, len(targets))
    return origins


def block_modules(module: str) -> tuple[str, ...]:
    """Return diffusers' names of a module inside a numbered block, or () for other modules."""
    if projection := CONTROL_PROJECTION.fullmatch(module):
        number, side = projection.groups()
        return ("input_block",) if side == "before" else (f"controlnet_blocks.{number}",)
    block = NUMBERED_BLOCK.fullmatch(module)
    if not block or block[3] not in BLOCK_NAMES:
        return ()
    return tuple(f"transformer_blocks.{block[1] or block[2]}.{target}".rstrip(".") for target in BLOCK_NAMES[block[3]])


def autoencoder_origins(names: Set[str]) -> dict[str, Origin]:
    """Return {diffusers' name: origin} of DC-AE in its original layout."""
    origins = {}
    for name in names:
        target = name
        for pattern, replacement in AUTOENCODER_PATTERNS:
            target = re.sub(pattern, replacement, target)
        fused = target.partition(".qkv.conv.")
        parts = [f"{fused[0]}.to_{letter}.{fused[2]}" for letter in "qkv"] if fused[1] else [target]
        origins.update({part: Origin(name, index, len(parts)) for index, part in enumerate(parts)})
    return origins
