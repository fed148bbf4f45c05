"""Make the model of scenes: `python -m demo.scenes.recipe`. Hours on two cores, minutes on a GPU.

Each stage goes on where it was left. The judge comes first, and stays. The result is demo/sana-scenes/, where
autoencoder and text encoder are as soon as they are trained, and demo/scenes/report/; what training needs is in
demo/build/scenes/. The transformer is trained by this pack's own trainer, with train.toml of this folder.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from transformers import AutoTokenizer

from sana_core.checkpoints import load_text_encoder
from sana_core.runtime.accelerator import chosen_device
from sana_core.training.settings_file import read_settings
from sana_core.training.train import train

from .. import text
from ..autoencoder import psnr, to_pixels
from ..checkpoint import save_checkpoint
from ..dataset import write_dataset
from ..losses import log_losses, plot_losses
from ..preview import fit_colours
from ..transformer import build
from . import autoencoder
from .autoencoder import paint_scenes
from .captions import random_caption
from .evaluate import evaluate
from .painting import paint
from .text import SIZE, documents
from .world import PIXELS, Scene, training_scenes

HERE = Path(__file__).parent
BUILD, CHECKPOINT, REPORT = HERE.parent / "build" / "scenes", HERE.parent / "sana-scenes", HERE / "report"
PICTURES, LARGE_PICTURES = 24_000, 2400
LARGE = ((512, 512), (608, 416), (416, 608))  # width, height
# between the sizes, for a model that learns one alone forgets the other in minutes
TURNS = 6
# of the transformer
HEADS, LAYERS = 6, 6
# SANA's 3 is for the 1024 tokens of 1024 px. The more there are the less noise hides, by the root of their number
# (Esser et al., "Scaling Rectified Flow Transformers", 2024, section 5.3.2).
SHIFT = 1.0


def paint_large(scene: Scene) -> np.ndarray:
    """Return the picture of `scene` in one of the sizes LARGE, uint8 [H, W, 3]."""
    return paint(scene, *LARGE[scene.seed % len(LARGE)])


def main() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    device = chosen_device("")
    base = BUILD / "base"
    if not (CHECKPOINT / "vae/config.json").is_file():
        vae = autoencoder.train(BUILD / "vae.pt", device, log_losses(BUILD / "vae.jsonl")).cpu()
        if not autoencoder.fits_half(vae):
            raise SystemExit("the autoencoder's maps leave the range of float16; train it with lower learning rates")
        vae.register_to_config(scaling_factor=autoencoder.latent_scale(vae))
        vae.to(torch.bfloat16).save_pretrained(CHECKPOINT / "vae")
    # as the result has them, so that the transformer learns the latents that are drawn from
    vae = AutoencoderDC.from_pretrained(CHECKPOINT / "vae", torch_dtype=torch.float32)
    if not (CHECKPOINT / "text_encoder/config.json").is_file():
        tokenizer, language_model = text.train(log_losses(BUILD / "text_encoder.jsonl"), documents, SIZE)
        tokenizer.save_pretrained(CHECKPOINT / "tokenizer")
        language_model.to(torch.bfloat16).save_pretrained(CHECKPOINT / "text_encoder")
    encoder = load_text_encoder(CHECKPOINT / "text_encoder")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT / "tokenizer", local_files_only=True)
    scheduler = DPMSolverMultistepScheduler(flow_shift=SHIFT, use_flow_sigmas=True, prediction_type="flow_prediction")
    if not (base / "model_index.json").is_file():
        torch.manual_seed(5)
        transformer = build(encoder.model.config.hidden_size, heads=HEADS, layers=LAYERS, pixels=PIXELS)
        SanaPipeline(tokenizer, encoder.model, vae, transformer, scheduler).save_pretrained(base)
    rng = random.Random(19)
    write_dataset(BUILD / "pictures", training_scenes(rng, PICTURES), rng, paint, random_caption)
    rng = random.Random(24)
    write_dataset(BUILD / "large", training_scenes(rng, LARGE_PICTURES), rng, paint_large, random_caption)
    settings = read_settings(HERE / "train.toml")
    first, *turns = settings.phase
    settings = replace(settings, phase=(first, *turns * TURNS))
    trained = train(settings, report=lambda line: sys.stderr.write(f"{line}\n"))
    transformer = SanaTransformer2DModel.from_pretrained(trained)
    pipeline = SanaPipeline(tokenizer, encoder.model, vae, transformer, scheduler)
    # before the pipeline is made bfloat16
    decibels = psnr(vae, to_pixels(paint_scenes("psnr", 64)))
    save_checkpoint(pipeline, fit_colours(vae, to_pixels(paint_scenes("colours", 256))), CHECKPOINT)
    evaluate(CHECKPOINT, REPORT, decibels)
    # of the stages that were trained here
    plot_losses([*sorted(BUILD.glob("*.jsonl")), BUILD / "run" / "log.jsonl"], REPORT)


if __name__ == "__main__":
    main()
