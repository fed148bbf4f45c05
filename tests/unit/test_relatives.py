"""Every loader names the files of SANA's family that this pack does not run.

Names and shapes come from public sources: the classes of diffusers and transformers where they have one, else
NVlabs/Sana (diffusion/model/nets/sana_multi_scale_video.py, sana_video2.py, sana_gdn_blocks.py,
basic_modules_linear.py), ato-zen/VIBE (vibe/transformer), nunchaku (src/SanaModel.cpp, src/Linear.cpp) and
bitsandbytes' state_dict.
"""

import json
import re

import layouts
import pytest
from accelerate import init_empty_weights

import sana_core
from sana_core.checkpoints.checkpoint import CHECKPOINT_KINDS

WIDTH, HIDDEN = 2240, 6720


def library(name, **config):
    import diffusers

    with init_empty_weights():
        return {key: tuple(value.shape) for key, value in getattr(diffusers, name)(**config).state_dict().items()}


def nvidia(*attention, channels=16, patch=(1, 2, 2), feed_forward=None, top=None):
    """Tensors of NVIDIA's video models: everything around the blocks, and the first block."""
    block = {
        "scale_shift_table": (6, WIDTH),
        "attn.qkv.weight": (3 * WIDTH, WIDTH),
        "attn.proj.weight": (WIDTH, WIDTH),
        "attn.q_norm.weight": (WIDTH,),
        **dict(attention),
        "cross_attn.q_linear.weight": (WIDTH, WIDTH),
        "cross_attn.kv_linear.weight": (2 * WIDTH, WIDTH),
        **(feed_forward or CONVOLUTIONS),
    }
    return {
        "x_embedder.proj.weight": (WIDTH, channels, *patch),
        "y_embedder.y_proj.fc1.weight": (WIDTH, 2304),
        "attention_y_norm.weight": (WIDTH,),
        "t_block.1.weight": (6 * WIDTH, WIDTH),
        "final_layer.linear.weight": (64, WIDTH),
        **{f"blocks.0.{name}": shape for name, shape in block.items()},
        **(top or {}),
    }


IMAGE = {
    "mlp.inverted_conv.conv.weight": (2 * HIDDEN, WIDTH, 1, 1),
    "mlp.depth_conv.conv.weight": (2 * HIDDEN, 1, 3, 3),
    "mlp.point_conv.conv.weight": (WIDTH, HIDDEN, 1, 1),
}
CONVOLUTIONS = {**IMAGE, "mlp.t_conv.weight": (WIDTH, WIDTH, 3, 1)}
LINEAR = {
    "mlp.inverted_conv.linear.weight": (2 * HIDDEN, WIDTH),
    "mlp.depth_conv.conv.weight": (2 * HIDDEN, 1, 3, 3),
    "mlp.point_conv.linear.weight": (WIDTH, HIDDEN),
}
GATED = (("attn.A_log", (20,)), ("attn.dt_bias", (20,)), ("attn.beta_proj.weight", (20, WIDTH)))


def quantised(*modules):
    """nunchaku's GEMM_W4A4 of these modules."""
    parts = {
        "qweight": (WIDTH, WIDTH // 2),
        "wscales": (WIDTH // 64, WIDTH),
        "bias": (WIDTH,),
        "smooth": (WIDTH,),
        "lora_down": (WIDTH, 32),
        "lora_up": (WIDTH, 32),
    }
    return {f"{module}.{part}": shape for module in modules for part, shape in parts.items()}


def outside(model):
    return {name: shape for name, shape in model.items() if "blocks" not in name}


SANA = {"num_layers": 1}
NUNCHAKU = quantised(*(f"transformer_blocks.0.{m}" for m in ("attn.qkv_proj", "ff.inverted_conv", "ff.point_conv")))
GEMMA = "model.layers.0.mlp.gate_proj.weight"
VIDEO = re.escape("a SANA-Video transformer (video-2B-480p)")
# {file: (function of its tensors, name in the error)}
RELATIVES = {
    "sana_wm_1600m_720p": (
        lambda: library("SanaWMTransformer3DModel"),
        "SANA-WM, which makes videos along a camera's path",
    ),
    "sana_streaming_ar.pth": (lambda: nvidia(*GATED, channels=256), "SANA-Streaming, which edits videos"),
    "VIBE of seq_cat": (
        lambda: {
            **library("SanaTransformer2DModel", **SANA),
            "meta_queries": (224, 2048),
            "edit_head.input_proj.weight": (2048, 2048),
            "edit_head.attn_blocks.0.mlp.fc1.weight": (8192, 2048),
            "edit_head.output_proj.1.weight": (2304, 2048),
        },
        'VIBE of the kind "seq_cat", which this pack does not run, only the released kind "channel_cat"',
    ),
    "SANA_LinearFFN.pth": (
        lambda: nvidia(feed_forward=LINEAR),
        "Sol-RL's SANA, which has linear layers for its 1x1 convolutions",
    ),
    "svdq-int4-sana-1600m": (
        lambda: {**outside(library("SanaTransformer2DModel", **SANA)), **NUNCHAKU},
        "SANA in 4 bits for nunchaku; the loader's quantise saves memory in its place",
    ),
    "svdq-int4-sana-1600m, transformer_blocks": (
        lambda: NUNCHAKU,
        "SANA in 4 bits for nunchaku; the loader's quantise saves memory in its place",
    ),
    "svdq-int4-sana-1600m, unquantized_layers": (
        lambda: outside(library("SanaTransformer2DModel", **SANA)),
        "a SANA transformer without transformer_blocks.0.ff.conv_point.weight",
    ),
    "svdq-int4-flux.1-dev": (
        lambda: quantised("transformer_blocks.0.qkv_proj"),
        "a model in 4 bits for the kernels of another program",
    ),
    "gemma-2-2b-it-bnb-4bit": (
        lambda: {
            GEMMA: (9216 * 2304 // 2, 1),
            f"{GEMMA}.absmax": (331776,),
            f"{GEMMA}.quant_state.bitsandbytes__nf4": (86,),
            "model.layers.0.pre_feedforward_layernorm.weight": (2304,),
            "model.embed_tokens.weight": (256000, 2304),
        },
        "a model in 4 bits of bitsandbytes",
    ),
}
LOADERS = {
    "transformer": sana_core.load_transformer,
    "autoencoder": sana_core.load_autoencoder,
    "text_encoder": sana_core.load_text_encoder,
    "controlnet": sana_core.load_controlnet,
}


@pytest.mark.parametrize("released", RELATIVES)
def test_a_file_of_the_family_is_named_by_each_loader(tmp_path, released):
    tensors, label = RELATIVES[released]
    file = layouts.sparse(tensors(), tmp_path / "relative.safetensors")
    info = sana_core.inspect_checkpoint(file)
    assert (info.kind, info.variant) == ("other", label)
    for kind, load in LOADERS.items():
        with pytest.raises(
            ValueError, match=f"not {CHECKPOINT_KINDS[kind].wanted}: found {re.escape(label)}; get .* Hugging Face"
        ):
            load(file)


def test_a_diffusers_folder_of_the_family_is_named(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "SanaVideoPipeline"}))
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"_class_name": "SanaVideoTransformer3DModel"}))
    names = library("SanaVideoTransformer3DModel", **SANA)
    layouts.sparse(names, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ValueError, match=f"not a SANA transformer: found {VIDEO}; get one from"):
        sana_core.load_transformer(tmp_path)


def test_a_lora_of_the_family_stays_a_lora(tmp_path):
    names = {f"transformer_blocks.0.ff.conv_temp.lora_{side}.weight": (4, 4) for side in "AB"}
    assert sana_core.inspect_checkpoint(layouts.sparse(names, tmp_path / "lora.safetensors")).kind == "lora"
