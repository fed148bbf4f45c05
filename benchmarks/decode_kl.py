"""Decode of an AutoencoderKL in strips and in ComfyUI's tiles, beside ComfyUI's full decode.

`python -m benchmarks.decode_kl` writes benchmarks/decode_kl.json. The VAEs have the layers of SD's and FLUX's with
random weights, so that no download is needed. `error` is the largest and the mean difference from the full decode as
a part of the range of its pixels, and `time` is the ratio of the seconds. The tiles have a quarter of the size in VAE
Decode (Tiled) because the image is small: 128 px with an overlap of 16. Everything runs on the CPU in fp32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from setup import comfyui_path

from benchmarks.machine import write
from sana_core.decode.group_norms import decode_normed

LAYERS = {"ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
# Channels of the latents.
CHANNELS = {"SD": 4, "FLUX": 16}
BUDGET = 4e9


def vae_of(channels: int) -> Any:
    """Return ComfyUI's VAE with random weights, whose pixels are not clamped."""
    from comfy.sd import VAE

    settings = {"double_z": True, "z_channels": channels, "resolution": 64, "in_channels": 3, "out_ch": 3, **LAYERS}
    vae = VAE(sd={"none": torch.ones(1)}, config={"params": {"ddconfig": settings, "embed_dim": channels}})
    vae.latent_channels, vae.process_output = channels, lambda image: image
    generator = torch.Generator().manual_seed(0)
    for name, value in vae.first_stage_model.named_parameters():
        drawn = torch.randn(value.shape, generator=generator).to(value)
        scale = value[0].numel() ** -0.5 if value.dim() > 1 else 0.1
        value.data = drawn * scale + float("norm" in name and name.endswith("weight"))
    return vae


def in_strips(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    decoder = vae.first_stage_model.decoder
    decoder.forward = lambda z: decode_normed(decoder, z, BUDGET, BUDGET)
    try:
        return vae.decode(latents)
    finally:
        del decoder.forward


def measure(channels: int, side: int, rounds: int) -> dict[str, Any]:
    vae = vae_of(channels)
    latents = torch.randn(1, channels, side // 8, side // 8, generator=torch.Generator().manual_seed(1))
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "full": lambda: vae.decode(latents),
        "strips": lambda: in_strips(vae, latents),
        "tiles": lambda: vae.decode_tiled(latents, tile_x=16, tile_y=16, overlap=2),
    }
    images = {way: decode() for way, decode in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            began = time.perf_counter()
            ways[way]()
            seconds[way].append(time.perf_counter() - began)
    full, figures = images["full"], {}
    for way in ("strips", "tiles"):
        error = (images[way] - full).abs() / (full.max() - full.min())
        ratios = [one / other for one, other in zip(seconds[way], seconds["full"], strict=True)]
        figures[way] = {
            "error": {"largest": float(f"{error.max():.3g}"), "mean": float(f"{error.mean():.3g}")},
            "time": round(statistics.median(ratios), 3),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="only print the figures, and do not write them")
    options = parser.parse_args()
    sys.path.insert(0, str(comfyui_path()))
    from comfy.cli_args import args

    args.cpu = True
    torch.set_grad_enabled(False)
    figures = {name: measure(channels, options.side, options.rounds) for name, channels in CHANNELS.items()}
    write(__file__, {"pixels": options.side, "rounds": options.rounds, **figures}, only_print=options.show)


if __name__ == "__main__":
    main()
