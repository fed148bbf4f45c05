"""A small random SANA-Video as diffusers' folder: transformer, VAE like Wan 2.1's or LTX-2's, the tiny text encoder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from checkpoints import TINY
from diffusers import (
    AutoencoderKLLTX2Video,
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    SanaImageToVideoPipeline,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)
from noise import noise_like
from transformers import AutoTokenizer, Gemma2Model

# channels of the latents, the patch, pixels of a cell, and frames of a latent frame
RATIOS = {"decoder_causal": False, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
MODELS = {"480p": (16, 2, 8, 4), "720p": (128, 1, 32, 8)}


def transformer(name: str, caption: int = 32, heads: int = 4, dim: int = 24, layers: int = 3):
    """A random model in diffusers' class."""
    torch.manual_seed(0)
    channels, patch, *_ = MODELS[name]
    model = SanaVideoTransformer3DModel(
        in_channels=channels,
        out_channels=channels,
        patch_size=(1, patch, patch),
        num_attention_heads=heads,
        attention_head_dim=dim,
        num_layers=layers,
        num_cross_attention_heads=heads,
        cross_attention_head_dim=dim,
        cross_attention_dim=heads * dim,
        caption_channels=caption,
        mlp_ratio=3.0,
    )
    return randomise(model)


def autoencoder(name: str):
    """A random VAE with few channels."""
    torch.manual_seed(1)
    if name == "480p":
        return randomise(AutoencoderKLWan(base_dim=8))
    side = {"block_out_channels": (128, 128, 128, 128), "layers_per_block": (1, 2, 2, 1, 1)}
    decoder = {"decoder_block_out_channels": (16, 32, 64), "decoder_layers_per_block": (1, 2, 1, 1)}
    model = randomise(AutoencoderKLLTX2Video(**side, **decoder, **RATIOS))
    model.latents_mean.normal_()
    model.latents_std.uniform_(0.5, 2)
    return model


def second_autoencoder() -> AutoencoderKLLTX2Video:
    """A random VAE like LTX-2.3's, with few channels."""
    torch.manual_seed(1)
    types = ("spatiotemporal", "spatiotemporal", "temporal", "spatial")
    side = {"block_out_channels": (128, 128, 128, 128), "layers_per_block": (1, 2, 1, 1, 1)}
    decoder = {"decoder_block_out_channels": (16, 32, 32, 64), "decoder_layers_per_block": (1, 2, 1, 1, 1)}
    stages = {"decoder_spatio_temporal_scaling": (True,) * 4, "decoder_inject_noise": (False,) * 5}
    ups = {"upsample_type": types, "upsample_residual": (False,) * 4, "upsample_factor": (2, 2, 1, 2)}
    padding = {"decoder_spatial_padding_mode": "zeros"}
    model = randomise(AutoencoderKLLTX2Video(**side, **decoder, **stages, **ups, **padding, **RATIOS))
    model.latents_mean.normal_()
    model.latents_std.uniform_(0.5, 2)
    return model


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    for key, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in key else 0.0, 0.1)
    return model.requires_grad_(False).eval()


def scheduler():
    """The one of the released folders."""
    return DPMSolverMultistepScheduler(flow_shift=8.0, use_flow_sigmas=True, prediction_type="flow_prediction")


def by_pipeline(
    name: str, folder: Path, prompts: tuple[str, str], size, image=None, output="pt", solver=None, guidance=6.0
):
    """What diffusers' pipeline makes in 4 steps from the noise of seed 3; `size` is [frames, height, width]."""
    channels, _, cell, stride = MODELS[name]
    frames, height, width = size
    encoder = Gemma2Model.from_pretrained(folder / "text_encoder", attn_implementation="eager").float()
    tokenizer, expected = AutoTokenizer.from_pretrained(folder / "tokenizer"), encoder.config.hidden_size
    kind = SanaVideoPipeline if image is None else SanaImageToVideoPipeline
    pipeline = kind(tokenizer, encoder, autoencoder(name), transformer(name, expected), solver or scheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=prompts[0],
        negative_prompt=prompts[1],
        num_inference_steps=4,
        guidance_scale=guidance,
        latents=noise_like(torch.empty(1, channels, 1 + (frames - 1) // stride, height // cell, width // cell), 3),
        frames=frames,
        height=height,
        width=width,
        use_resolution_binning=False,
        output_type=output,
        **({} if image is None else {"image": image}),
    ).frames


def save_folder(name: str, folder: Path) -> Path:
    """Write a diffusers folder of that model, with the text encoder and tokenizer of sana-tiny."""
    caption = json.loads((TINY / "text_encoder" / "config.json").read_text())["hidden_size"]
    transformer(name, caption).save_pretrained(folder / "transformer")
    autoencoder(name).save_pretrained(folder / "vae")
    scheduler().save_pretrained(folder / "scheduler")
    for part in ("text_encoder", "tokenizer"):
        os.symlink(TINY / part, folder / part, target_is_directory=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "SanaVideoPipeline"}))
    return folder
