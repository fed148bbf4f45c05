"""Configurations from the shapes of tensors, and contradictions between a configuration and the shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..model.known_models import (
    CROSS_HEADS,
    DC_AE_SCALE,
    DMD,
    GEMMA_HEAD_DIM,
    GEMMA_WIDTHS,
    HEAD_DIM,
    POSITIONED,
    VIDEO_HEAD_DIM,
    VIDEOS,
    WIDTHS,
    Architecture,
    pick_twin,
    video_models,
)
from ..model.latents import DOWNSCALE
from ..runtime.text import Json, brief, shown
from .headers import Headers

# Only SANA-Video 2.0 has this tensor. Its feed-forwards are not convolutions.
VIDEO2 = "attn_res.final_proj.weight"
# In the names of SANA-Video 2.0's preview and of its folders, but 24step and 1024steps are of a training.
PREVIEW = re.compile(r"(?<!\d)(?:4|four)[-_. ]?steps?(?![a-z])", re.IGNORECASE)
PREVIEW_FILE = re.compile(r"(?<![a-z])(?:preview|dmd\d?)(?![a-z])", re.IGNORECASE)
# The last parts of a path that may name a model: the file and four folders.
NAMING_PARTS = 5
# The width that DC-AE-Lite's configuration has for the finest stage of the decoder. That stage has no blocks.
EMPTY_WIDTH = 128
# The convolution at the beginning of each stage of the decoder except the coarsest.
UP = "decoder.up_blocks.{}.0.conv.weight"
# The fields of AutoencoderDC's configuration that have a value for each stage.
STAGE = ("block_types", "block_out_channels", "layers_per_block", "qkv_multiscales")


def count(names: Iterable[str], pattern: str) -> int:
    """Return 1 + the largest number that `pattern` matches at the start of a name, or 0 without a match."""
    matches = (re.match(pattern, name) for name in names)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def architecture(headers: Headers) -> Architecture:
    return Architecture(
        headers["patch_embed.proj.weight"].shape[0],
        count(headers, r"transformer_blocks\.(\d+)\."),
        "transformer_blocks.0.attn1.norm_q.weight" in headers,
        "time_embed.guidance_embedder.linear_1.weight" in headers,
        headers["patch_embed.proj.weight"].shape[1] == 2 * out_channels(headers),
    )


def out_channels(headers: Headers) -> int:
    """Return the channels of a transformer's output. For a ControlNet, the channels of its input."""
    _, channels, *patch = headers["patch_embed.proj.weight"].shape
    last = headers.get("proj_out.weight")
    return last.shape[0] // math.prod(patch) if last is not None and last.shape else channels


def hidden_width(headers: Headers) -> int:
    """Return the channels between the layers of a feed-forward. conv_depth has the double number.

    Formats of 4 bits pack two input channels of conv_point into a byte, but leave the 3x3 convolution as it is.
    """
    if VIDEO2 in headers:
        return headers["transformer_blocks.0.ff.gate_proj.weight"].shape[0]
    return headers["transformer_blocks.0.ff.conv_depth.weight"].shape[0] // 2


def mlp_ratio(headers: Headers, width: int) -> float:
    """Return the ratio by which the library's classes get the hidden width: they truncate `width` times the ratio."""
    hidden = hidden_width(headers)
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def unknown_width(name: str, width: int, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: got width {width}, expected {expected}, because the weights do not determine the number of attention "
        "heads; put the model's config.json beside the file"
    )


def transformer_config(name: str, headers: Headers) -> Json:
    """Return SanaTransformer2DModel's configuration, without the resolution. Errors name the file `name`."""
    arch = architecture(headers)
    if arch.width not in CROSS_HEADS:
        raise unknown_width(name, arch.width, " or ".join(map(str, CROSS_HEADS)))
    caption = headers["caption_projection.linear_1.weight"]
    return {
        "in_channels": headers["patch_embed.proj.weight"].shape[1],
        "out_channels": out_channels(headers),
        "num_attention_heads": arch.width // HEAD_DIM,
        "attention_head_dim": HEAD_DIM,
        "num_layers": arch.layers,
        "num_cross_attention_heads": CROSS_HEADS[arch.width],
        "cross_attention_head_dim": arch.width // CROSS_HEADS[arch.width],
        "cross_attention_dim": arch.width,
        # 4-bit formats pack two values into a byte.
        "caption_channels": caption.shape[1] * (2 if caption.dtype == torch.uint8 else 1),
        "mlp_ratio": mlp_ratio(headers, arch.width),
        "patch_size": headers["patch_embed.proj.weight"].shape[-1],
        "attention_bias": "transformer_blocks.0.attn1.to_q.bias" in headers,
        "guidance_embeds": arch.guidance_embeds,
        "qk_norm": "rms_norm_across_heads" if arch.qk_norm else None,
    }


def edit_head_config(headers: Headers) -> Json:
    queries, width = headers["meta_queries"].shape
    hidden, output = headers["input_proj.weight"].shape[0], headers["output_proj.1.weight"].shape[0]
    layers = count(headers, r"attn_blocks\.(\d+)\.")
    return {"queries": queries, "width": width, "hidden": hidden, "output": output, "layers": layers}


def no_qwen_config(name: str, headers: Headers) -> Json:
    """Refuse Qwen3-VL without its configuration, because the weights do not determine the number of heads."""
    raise CheckpointError(f"{name}: no config.json of Qwen3-VL beside it; download the folder again, whole")


def controlnet_config(name: str, headers: Headers) -> Json:
    """Return SanaControlNetModel's configuration, without the resolution. It has no guidance_embeds and no qk_norm."""
    config = transformer_config(name, headers)
    return {key: value for key, value in config.items() if key not in ("guidance_embeds", "qk_norm")}


def contradiction(kind: str, headers: Headers, config: Json) -> str:
    """Return where the tensors of a released model contradict `config`, "" if they agree.

    Only known widths are compared, because weights of other widths do not determine the number of attention heads.
    """
    shapes: Json = {}
    fields: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    if kind in ("transformer", "controlnet") and architecture(headers).width in CROSS_HEADS:
        shapes = transformer_config("", headers)
        fields = ("num_layers", "num_attention_heads", "attention_head_dim", "caption_channels", "patch_size")
        flags = ("qk_norm", "guidance_embeds") if kind == "transformer" else ()
    elif kind == "text_encoder" and gemma_width(headers) in GEMMA_WIDTHS:
        shapes, fields = gemma_config(headers), ("hidden_size", "num_hidden_layers", "intermediate_size")
    elif kind == "autoencoder":
        try:
            shapes = autoencoder_config(headers)
        except LookupError:
            # A tensor is missing. The load names it.
            return ""
        if tuple(shapes.get("encoder_block_out_channels", ())) == WIDTHS:
            fields = ("latent_channels", "encoder_layers_per_block", "decoder_layers_per_block")
    pairs = {field: (config[field], shapes[field]) for field in fields if field in config}
    pairs |= {field: (config.get(field) or None, shapes[field] or None) for field in flags}
    for field, (stated, actual) in pairs.items():
        # JSON has lists where shapes give tuples.
        if stated != (list(actual) if isinstance(actual, tuple) else actual):
            return f"{field} {brief(stated)}, the file has {brief(actual)}"
    return ""


def video_name(file: Path, headers: Headers, config: Json | None) -> str:
    """Return the name in VIDEOS of a SANA-Video transformer.

    The 4-step preview has the tensors of the model that it was distilled from. It is recognised by the sampler in the
    configuration of a saved MODEL, or else by the name of the file or of its folders.
    """
    name = shown(file)
    width, channels, *patch = headers["patch_embedding.weight"].shape
    generation = [model for model in VIDEOS.values() if model.is_video2 == (VIDEO2 in headers)]
    models = [model for model in generation if model.channels == channels]
    if not models:
        expected = " or ".join(dict.fromkeys(str(model.channels) for model in generation))
        raise CheckpointError(
            f"{name}: got a SANA-Video model of latents with {channels} channels, expected {expected}; use a released "
            "model"
        )
    if patch != [1, models[0].patch, models[0].patch]:
        raise CheckpointError(
            f"{name}: got patches of {brief(patch)}, expected those of a SANA-Video model; use a released model"
        )
    layers = count(headers, r"transformer_blocks\.(\d+)\.")
    fitting = video_models(channels, width, layers, VIDEO2 in headers)
    if not fitting:
        raise CheckpointError(
            f"{name}: got {layers} layers of width {width}, expected at most {models[0].layers} of {models[0].width} "
            f"as in {models[0].title}; update this pack, which may know the model then"
        )
    sampler = DMD if config is None and named(PREVIEW, PREVIEW_FILE, file) else (config or {}).get("sampler")
    return pick_twin(fitting, sampler).name


def named(anywhere: re.Pattern[str], in_file: re.Pattern[str], file: Path) -> bool:
    """Whether a name in the path of `file` matches `anywhere`, or its own name `in_file`.

    NVIDIA's folders and the caches of the hub have the model's name up to four folders above the file.
    """
    return bool(in_file.search(file.stem)) or any(
        anywhere.search(part) for part in file.absolute().parts[-NAMING_PARTS:]
    )


def video_config(name: str, headers: Headers) -> Json:
    """Return the configuration of a SANA-Video transformer's class. Errors name the file `name`.

    Heads of SANA-Video have 112 channels. In SANA-Video 2.0, `to_beta` has a row for each head of the linear layers,
    and the layers with softmax have half of these heads.
    """
    width, channels, *patch = headers["patch_embedding.weight"].shape
    if VIDEO2 not in headers and width % VIDEO_HEAD_DIM:
        raise unknown_width(name, width, f"a multiple of {VIDEO_HEAD_DIM}")
    beta = headers.get("transformer_blocks.0.attn1.to_beta.weight")
    heads = width // VIDEO_HEAD_DIM if beta is None else beta.shape[0]
    layers = range(count(headers, r"transformer_blocks\.(\d+)\."))
    config = {
        "in_channels": channels,
        "out_channels": channels,
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "num_layers": len(layers),
        "caption_channels": headers["caption_projection.linear_1.weight"].shape[1],
        "mlp_ratio": mlp_ratio(headers, width),
    }
    if VIDEO2 in headers:
        softmax = [i for i in layers if f"transformer_blocks.{i}.attn1.to_beta.weight" not in headers]
        return config | {"softmax_heads": heads // 2, "softmax_every": (softmax or [len(layers)])[0] + 1}
    return config | {
        "num_cross_attention_heads": heads,
        "cross_attention_head_dim": VIDEO_HEAD_DIM,
        "cross_attention_dim": width,
        "patch_size": tuple(patch),
    }


def resolution_config(resolution: int) -> Json:
    """Return the two fields of a configuration that depend on the training resolution."""
    return {
        "sample_size": resolution // DOWNSCALE,
        "interpolation_scale": resolution / POSITIONED if resolution >= POSITIONED else None,
    }


def is_lite(headers: Headers) -> bool:
    return not any(name.startswith("decoder.") and ".attn." in name for name in headers)


def autoencoder_config(headers: Headers) -> Json:
    """Return AutoencoderDC's configuration for tensors with diffusers' names."""
    config: Json = {
        "latent_channels": headers["decoder.conv_in.weight"].shape[1],
        "downsample_block_type": "Conv",
        "upsample_block_type": "interpolate",
        "decoder_norm_types": "rms_norm",
        "decoder_act_fns": "silu",
        # The weights do not determine the last activation: ReLU in dc-ae-f32c32-sana-1.0 and 1.1, SiLU in
        # dc-ae-lite-f32c32-sana-1.1 (dc_ai/aecore/models/dc_ae.py of dc-ai-projects/DC-Gen).
        "decoder_conv_act_fn": "silu" if is_lite(headers) else "relu",
        "scaling_factor": DC_AE_SCALE,
    }
    for side, blocks in (("encoder", "encoder.down_blocks"), ("decoder", "decoder.up_blocks")):
        last = count(headers, rf"{blocks}\.(\d+)\.") - 1
        if last < 0:
            # Half of the file is missing. With the library's default the load names the missing tensors.
            continue
        stages = [stage_config(headers, f"{blocks}.{stage}.", stage == last) for stage in range(last + 1)]
        for name, values in zip(STAGE, zip(*stages, strict=True), strict=True):
            config[f"{side}_{name}"] = values
    # A pixel shuffle needs a convolution with four times the channels.
    widths = enumerate(config.get("decoder_block_out_channels", ()))
    ratios = {headers[name].shape[0] // width for stage, width in widths if (name := UP.format(stage)) in headers}
    if 4 in ratios:
        config["upsample_block_type"] = "pixel_shuffle"
    grouped = [name for name in headers if name.endswith("to_qkv_multiscale.0.proj_out.weight")]
    config["attention_head_dim"] = headers[grouped[0]].shape[1] if grouped else HEAD_DIM
    return config


def stage_config(headers: Headers, stage: str, last: bool) -> tuple[str, int, int, tuple[int, ...]]:
    """Return a stage's values for STAGE. The last value is the kernel size of each scale of its attention.

    All stages except the last one have one more block, which changes the resolution.
    """
    names = [name for name in headers if name.startswith(stage)]
    if not names:
        # The finest stage of DC-AE-Lite. The library only reads that it has no blocks.
        return "ResBlock", EMPTY_WIDTH, 0, ()
    residual = [name for name in names if name.endswith(".conv1.weight")]
    attention = [name for name in names if name.endswith(".attn.to_q.weight")]
    first = (residual or attention)[0]
    kernels = {name: headers[name].shape[-1] for name in names if name.endswith(".proj_in.weight")}
    scales = tuple(kernels[name] for name in sorted(kernels) if name.startswith(first.removesuffix("to_q.weight")))
    return (
        "ResBlock" if residual else "EfficientViTBlock",
        headers[first].shape[1],
        count(names, rf"{re.escape(stage)}(\d+)\.") - (not last),
        scales,
    )


def video_autoencoder_name(names: Collection[str]) -> str:
    """Return the variant of a VAE of SANA-Video. `names`: its tensors. Only LTX-2.3's decoder has a fourth stage."""
    if "decoder.conv_in.conv.weight" not in names:
        return "wan-2.1"
    # diffusers' names of the stage, then Lightricks', which count the layers between the stages too.
    fourth = ("decoder.up_blocks.3.resnets.", "decoder.up_blocks.8.")
    return "ltx-2.3" if any(name.startswith(fourth) for name in names) else "ltx-2"


def gemma_width(headers: Headers) -> int:
    """Return the width of Gemma 2's hidden states, from a norm, because 4-bit formats pack two columns of a matrix."""
    return headers["layers.0.pre_feedforward_layernorm.weight"].shape[0]


def gemma_config(headers: Headers) -> Json:
    """Return Gemma2Config's arguments for tensors with transformers' names; heads are 256 wide, as in 2B and 9B."""
    layer = "layers.0."
    return {
        "vocab_size": headers["embed_tokens.weight"].shape[0],
        "hidden_size": gemma_width(headers),
        "intermediate_size": headers[f"{layer}mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": count(headers, r"layers\.(\d+)\."),
        "num_attention_heads": headers[f"{layer}self_attn.q_proj.weight"].shape[0] // GEMMA_HEAD_DIM,
        "num_key_value_heads": headers[f"{layer}self_attn.k_proj.weight"].shape[0] // GEMMA_HEAD_DIM,
        "head_dim": GEMMA_HEAD_DIM,
        "query_pre_attn_scalar": GEMMA_HEAD_DIM,
    }
