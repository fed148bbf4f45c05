"""A checkpoint with all parts of a SANA, as small as they can be, so that an example takes milliseconds."""

import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderDC, SanaTransformer2DModel
from transformers import Gemma2Config, Gemma2Model

import sana_core

BUNDLED = Path(__file__).parents[2] / "tests" / "models" / "sana-tiny"
WIDTH, TEXT_WIDTH = 32, 16
LOADERS = {
    "transformer": sana_core.load_transformer,
    "vae": sana_core.load_autoencoder,
    "text_encoder": sana_core.load_text_encoder,
}


def make_checkpoint(folder: Path) -> Path:
    """Write random models of the bundled checkpoint's kinds, with its tokenizer, into `folder`; return it."""
    torch.manual_seed(0)
    shutil.copytree(BUNDLED, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    transformer = SanaTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=WIDTH,
        caption_channels=TEXT_WIDTH,
        sample_size=4,
    )
    transformer.save_pretrained(folder / "transformer")
    config = json.loads((BUNDLED / "vae" / "config.json").read_text())
    for side in ("encoder", "decoder"):
        config[f"{side}_block_out_channels"] = [4, 4, 8, 16, 16, 32]
    AutoencoderDC.from_config({**config, "attention_head_dim": 8}).save_pretrained(folder / "vae")
    config = json.loads((BUNDLED / "text_encoder" / "config.json").read_text())
    small = {"hidden_size": TEXT_WIDTH, "intermediate_size": 16, "head_dim": 8, "query_pre_attn_scalar": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "layer_types": None}
    Gemma2Model(Gemma2Config(**{**config, **small, **heads})).save_pretrained(folder / "text_encoder")
    return folder
