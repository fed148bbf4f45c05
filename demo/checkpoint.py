"""Saves a trained pipeline as a folder that all versions of the libraries can load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderDC, SanaPipeline


def save_checkpoint(pipeline: SanaPipeline, colours: dict[str, list], folder: Path) -> float:
    """Write `pipeline` in bf16 and the `colours` of its latents into `folder`. Returns the size in MB."""
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    for config in folder.glob("*/config.json"):
        forget_origin(config)
    # Only this name works in transformers 4 and 5 for a tokenizer without tokenizer.model.
    for file in (folder / "model_index.json", folder / "tokenizer" / "tokenizer_config.json"):
        file.write_text(file.read_text().replace('"GemmaTokenizer"', '"GemmaTokenizerFast"'))
    (folder / "preview.json").write_text(json.dumps(colours) + "\n")
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def forget_origin(config: Path) -> None:
    """Remove the folder that a module was loaded from, which diffusers writes into the `config`."""
    settings = {key: value for key, value in json.loads(config.read_text()).items() if key != "_name_or_path"}
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def fit_colours(autoencoder: AutoencoderDC, pixels: torch.Tensor) -> dict[str, list]:
    """Fit a linear map from scaled latents to the mean RGB in [0, 1] of their 32 x 32 pixels, by least squares.

    `pixels`: images [N, 3, H, W] in [-1, 1].
    """
    latents = torch.cat([autoencoder.encode(part).latent for part in pixels.split(16)])
    latents = latents * autoencoder.config.scaling_factor
    colours = torch.nn.functional.avg_pool2d(pixels, 32) / 2 + 0.5
    cells, cell_colours = (t.movedim(1, -1).flatten(0, 2) for t in (latents, colours))
    ones = torch.ones(len(cells), 1)
    solution = torch.linalg.lstsq(torch.cat([cells, ones], dim=1), cell_colours).solution
    *factors, bias = [[round(value, 4) for value in row] for row in solution.tolist()]
    return {"rgb_factors": factors, "rgb_bias": bias}
