"""The accepted values of each field in the JSON files of a model. A library builds a module from these fields.

The bounds are far above the released models and far below a module that takes a minute or a gigabyte to build.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..model.known_models import SPRINT
from ..model.latents import CHANNELS
from ..runtime.text import Json, brief, shown
from ..sampling.samplers import SAMPLERS
from .files import read_json

Check = Callable[[Any], bool]
MOST_BLOCKS = 256
LARGEST_WIDTH = 65536
# Latent cells of a side: 8192 pixels.
MOST_CELLS = 256
# The bounds of a shift. The released models have 3 or 6.
SHIFT_RANGE = (0.01, 100.0)


def whole(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def number(low: float, high: float) -> Check:
    return lambda value: type(value) in (int, float) and low <= value <= high


def optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def each(check: Check, most: int = MOST_BLOCKS) -> Check:
    return lambda value: type(value) is list and len(value) <= most and all(map(check, value))


def several(count: int, check: Check) -> Check:
    return lambda value: each(check, count)(value) and len(value) == count


def same(*accepted: object) -> Check:
    """Return a check for one of the values `accepted`. 1 == True in Python, but a flag does not match a number here."""
    return lambda value: any(value == one and flag(value) == flag(one) for one in accepted)


def are_colours(factors: Any, bias: Any) -> bool:
    finite = each(lambda value: type(value) in (int, float) and math.isfinite(value), 3)
    rows = each(finite, CHANNELS)(factors) and [len(row) for row in factors] == [3] * CHANNELS
    return rows and finite(bias) and len(bias) == 3


def flag(value: object) -> bool:
    return type(value) is bool


def word(value: object) -> bool:
    return type(value) is str and len(value) <= 100


def table(value: object) -> bool:
    return (
        type(value) is dict and len(value) <= 20 and all(word(each) or number(0, 1e9)(each) for each in value.values())
    )


def patterns(value: object) -> bool:
    """Whether `value` maps regular expressions, which must match any name quickly, to numbers."""

    def quick(pattern: str) -> bool:
        try:
            re.compile(pattern)
        except re.error:
            return False
        return len(pattern) <= 200 and len(re.findall(r"[*+?{]", pattern)) <= 2 and not re.search(r"\)[*+?{]", pattern)

    return type(value) is dict and len(value) <= 500 and all(quick(key) and FACTOR(one) for key, one in value.items())


BLOCKS, WIDTH, FACTOR, SHARE = whole(1, MOST_BLOCKS), whole(1, LARGEST_WIDTH), number(1e-6, 1e6), number(0, 1)
LARGE, TOKEN = whole(1, 10_000_000), whole(0, 10_000_000)


def fields(check: Check, names: str) -> dict[str, Check]:
    return dict.fromkeys(names.split(), check)


# Fields of VIBE's transformer that SANA's does not have.
EDIT_FIELDS = (
    *("input_condition_type", "edit_head_input_dim", "edit_head_stacks_num"),
    *("num_meta_queries", "meta_queries_dim"),
)
# Arguments of the classes in diffusers and transformers.
TRANSFORMER_FIELDS = {
    **fields(WIDTH, "in_channels num_attention_heads attention_head_dim caption_channels"),
    **fields(optional(WIDTH), "out_channels num_cross_attention_heads cross_attention_head_dim cross_attention_dim"),
    **fields(flag, "attention_bias norm_elementwise_affine guidance_embeds"),
    **fields(SHARE, "dropout norm_eps"),
    "num_layers": BLOCKS,
    "mlp_ratio": number(0.01, 100),
    "sample_size": whole(1, MOST_CELLS),
    "patch_size": whole(1, 16),
    "interpolation_scale": optional(number(0.01, 100)),
    "qk_norm": optional(word),
    # Fields of VIBE, which the tensors' shapes show too.
    **dict.fromkeys(EDIT_FIELDS, lambda value: word(value) or WIDTH(value)),
    # latent_scale and the last three are fields that this package adds to a saved MODEL.
    **fields(FACTOR, "guidance_embeds_scale timestep_scale latent_scale"),
    "flow_shift": number(*SHIFT_RANGE),
    "sampler": lambda value: word(value) and value in SAMPLERS and value != SPRINT,
    "preview": lambda value: type(value) is dict and are_colours(value.get("rgb_factors"), value.get("rgb_bias")),
}
VIDEO_FIELDS = TRANSFORMER_FIELDS | {
    "patch_size": several(3, whole(1, 16)),
    # The library fills a table of this many rows and a head's channels.
    "attention_head_dim": whole(6, 1024),
    "rope_max_seq_len": whole(1, 4096),
    # These three are fields of SANA-Video 2.0.
    "softmax_heads": WIDTH,
    **fields(BLOCKS, "softmax_every group_layers"),
}
NAMES: Check = lambda value: word(value) or each(word)(value)  # noqa: E731
AUTOENCODER_FIELDS = {
    **fields(WIDTH, "in_channels latent_channels attention_head_dim"),
    **fields(NAMES, "encoder_block_types decoder_block_types decoder_norm_types decoder_act_fns"),
    **fields(each(WIDTH), "encoder_block_out_channels decoder_block_out_channels"),
    **fields(each(whole(0, MOST_BLOCKS), 16), "encoder_layers_per_block decoder_layers_per_block"),
    **fields(each(each(whole(1, 63), 16)), "encoder_qkv_multiscales decoder_qkv_multiscales"),
    **fields(word, "upsample_block_type downsample_block_type decoder_conv_act_fn"),
    **fields(flag, "encoder_out_shortcut decoder_in_shortcut"),
    "scaling_factor": FACTOR,
}
# The arguments of AutoencoderKLWan, then of AutoencoderKLLTX2Video. Fields that change the size of a latent or a video
# have the values of the released models.
VIDEO_AUTOENCODER_FIELDS = {
    "base_dim": WIDTH,
    "decoder_base_dim": optional(WIDTH),
    "z_dim": same(16),
    "dim_mult": several(4, whole(1, 64)),
    "num_res_blocks": whole(1, 16),
    "attn_scales": same([]),
    "temperal_downsample": same([False, True, True]),
    "dropout": same(0),
    "latents_mean": several(16, number(-1e6, 1e6)),
    "latents_std": several(16, FACTOR),
    "is_residual": same(False),
    "scale_factor_temporal": same(4),
    "scale_factor_spatial": same(8),
    **fields(same(3), "in_channels out_channels"),
    "patch_size": same(None, 4),
    "latent_channels": same(128),
    "block_out_channels": several(4, WIDTH),
    "down_block_types": same(["LTX2VideoDownBlock3D"] * 4),
    "decoder_block_out_channels": lambda value: several(3, WIDTH)(value) or several(4, WIDTH)(value),
    "layers_per_block": several(5, whole(1, 16)),
    "decoder_layers_per_block": lambda value: several(4, whole(1, 16))(value) or several(5, whole(1, 16))(value),
    "spatio_temporal_scaling": same(True, [True] * 4),
    "decoder_spatio_temporal_scaling": same(True, [True] * 3, [True] * 4),
    "decoder_inject_noise": same(False, [False] * 4, [False] * 5),
    "downsample_type": same(["spatial", "temporal", "spatiotemporal", "spatiotemporal"]),
    "upsample_type": same(["spatiotemporal"] * 3, ["spatiotemporal", "spatiotemporal", "temporal", "spatial"]),
    "upsample_residual": same(True, [True] * 3, False, [False] * 4),
    "upsample_factor": same([2] * 3, [2, 2, 1, 2]),
    "timestep_conditioning": same(False),
    "patch_size_t": same(1),
    "resnet_norm_eps": SHARE,
    "scaling_factor": FACTOR,
    **fields(flag, "encoder_causal decoder_causal"),
    **fields(same("zeros", "reflect"), "encoder_spatial_padding_mode decoder_spatial_padding_mode"),
    "spatial_compression_ratio": same(None, 32),
    "temporal_compression_ratio": same(None, 8),
}
GEMMA_FIELDS = {
    **fields(LARGE, "vocab_size max_position_embeddings"),
    **fields(WIDTH, "hidden_size num_attention_heads num_key_value_heads head_dim"),
    **fields(optional(TOKEN), "pad_token_id bos_token_id"),
    **fields(flag, "use_cache tie_word_embeddings attention_bias"),
    **fields(SHARE, "initializer_range rms_norm_eps"),
    **fields(optional(table), "rope_parameters rope_scaling"),
    **fields(optional(number(1e-3, 1e6)), "final_logit_softcapping attn_logit_softcapping"),
    # "reference" is the field that this package adds to a saved CLIP.
    **fields(word, "hidden_act reference"),
    "intermediate_size": whole(1, 10 * LARGEST_WIDTH),
    "num_hidden_layers": BLOCKS,
    "hidden_activation": optional(word),
    "eos_token_id": lambda value: optional(TOKEN)(value) or each(TOKEN)(value),
    "rope_theta": number(1, 1e9),
    "attention_dropout": optional(SHARE),
    "query_pre_attn_scalar": number(1e-3, 1e6),
    "sliding_window": optional(LARGE),
    "layer_types": optional(each(word)),
    "use_bidirectional_attention": optional(flag),
}


def section(fields: dict[str, Check]) -> Check:
    return lambda value: (
        type(value) is dict and all(check(value[field]) for field, check in fields.items() if field in value)
    )


def rope(value: Any) -> bool:
    return (
        type(value) is dict
        and len(value) <= 20
        and all(word(one) or flag(one) or number(0, 1e9)(one) or each(whole(0, 4096))(one) for one in value.values())
    )


ROPE = {"rope_theta": number(1, 1e9), "rope_scaling": optional(rope), "rope_parameters": optional(rope)}
# The fields of Gemma 2 that the language model of Qwen3-VL has too.
SHARED_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
)
QWEN_TEXT_FIELDS = {name: GEMMA_FIELDS[name] for name in SHARED_FIELDS} | ROPE
QWEN_VISION_FIELDS = {
    **{name: WIDTH for name in ("hidden_size", "intermediate_size", "num_heads", "out_hidden_size")},
    "depth": BLOCKS,
    "hidden_act": word,
    "in_channels": same(3),
    "patch_size": same(16),
    "spatial_merge_size": same(2),
    "temporal_patch_size": same(2),
    "num_position_embeddings": whole(1, 100_000),
    "deepstack_visual_indexes": each(whole(0, MOST_BLOCKS)),
}
# {number of blocks of Qwen3-VL's vision tower: blocks with deepstack features}. 27 is the default of transformers.
DEEPSTACK = {24: [5, 11, 17], 27: [8, 16, 24]}


def qwen_text(value: Any) -> bool:
    """Whether the three parts of the rotary embedding, for time, rows and columns, fill half of a head."""
    if not section(QWEN_TEXT_FIELDS)(value):
        return False
    parts = ((value.get("rope_parameters") or value.get("rope_scaling")) or {}).get("mrope_section")
    return parts is None or (several(3, whole(1, 4096))(parts) and 2 * sum(parts) == value.get("head_dim", 128))


def qwen_vision(value: Any) -> bool:
    """Whether the heads share the width, with rotary embeddings of rows and of columns, each of pairs, and whether the
    blocks with deepstack features exist, and in a tower of a released depth are the released ones."""
    if not section(QWEN_VISION_FIELDS)(value):
        return False
    depth, places = value.get("depth", 27), value.get("deepstack_visual_indexes", DEEPSTACK[27])
    fits = DEEPSTACK.get(depth, places) == places and max(places, default=0) < depth
    return fits and not value.get("hidden_size", 1152) % (4 * value.get("num_heads", 16))


QWEN_FIELDS = {
    "text_config": qwen_text,
    "vision_config": qwen_vision,
    "image_token_id": whole(0, 10_000_000),
}
# Accepted values of adapter_config.json and their descriptions. Other init methods also change the base weights.
ABOVE_ZERO = (FACTOR, "a number above 0")
PATTERNS = (patterns, "a table of numbers above 0 by simple patterns")
PEFT_FIELDS: dict[str, tuple[Check, str]] = {
    "peft_type": (lambda value: value in ("LORA", "LOHA", "LOKR"), "LORA, LOHA or LOKR"),
    "r": ABOVE_ZERO,
    "lora_alpha": ABOVE_ZERO,
    "alpha": ABOVE_ZERO,
    "rank_pattern": PATTERNS,
    "alpha_pattern": PATTERNS,
    "use_rslora": (flag, "true or false"),
    "init_lora_weights": (
        lambda value: flag(value) or value in ("gaussian", "eva", "orthogonal", "mica"),
        "true, or a way that leaves the model as it is",
    ),
}


def refuse_code(name: str, config: Json) -> None:
    if "auto_map" in config:
        raise CheckpointError(
            f"{name}: got auto_map, code that comes with the model, which is never run; use the released model's file"
        )


def read_preview(file: Path) -> tuple[list[list[float]], list[float]]:
    """Return the factors [32][3] and the bias [3] that turn a latent into the colours of a preview."""
    content = read_json(file)
    factors: Any = content.get("rgb_factors")
    bias: Any = content.get("rgb_bias")
    if not are_colours(factors, bias):
        raise CheckpointError(
            f"{shown(file)}: expected rgb_factors of {CHANNELS} x 3 values and rgb_bias of 3; remove the file"
        )
    return factors, bias


def check_peft(name: str, settings: Json) -> None:
    """Raise CheckpointError for settings of PEFT that are broken or that the tensors do not contain."""
    for field, (check, expected) in PEFT_FIELDS.items():
        if not optional(check)(settings.get(field)):
            raise CheckpointError(f"{name}: {field} is {brief(settings[field])}, expected {expected}; use another file")
