"""Make the tests' checkpoint: `python -m demo.recipe`. About 80 minutes on two CPU cores, seeded.

Stages keep what they made under demo/build/, so that an interrupted recipe goes on where it was; delete that folder
to begin again. The result is tests/models/sana-tiny/ and demo/report/.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from transformers import AutoTokenizer

from sana_core.checkpoints import load_text_encoder

from . import autoencoder, evaluate, preview, text, transformer
from .checkpoint import save_checkpoint
from .losses import log_losses, plot_losses
from .pictures import PIXELS

HERE = Path(__file__).parent
BUILD, CHECKPOINT, REPORT = HERE / "build", HERE.parent / "tests" / "models" / "sana-tiny", HERE / "report"


def main() -> None:
    BUILD.mkdir(exist_ok=True)
    REPORT.mkdir(exist_ok=True)
    if not (BUILD / "vae/config.json").is_file():
        vae = autoencoder.train(log_losses(BUILD / "vae.jsonl"))
        vae.register_to_config(scaling_factor=transformer.latent_scale(vae))
        vae.save_pretrained(BUILD / "vae")
    vae = AutoencoderDC.from_pretrained(BUILD / "vae")
    if not (BUILD / "text_encoder/config.json").is_file():
        tokenizer, language_model = text.train(log_losses(BUILD / "text_encoder.jsonl"))
        tokenizer.save_pretrained(BUILD / "tokenizer")
        language_model.save_pretrained(BUILD / "text_encoder")
    encoder = load_text_encoder(BUILD / "text_encoder")
    if not (BUILD / "transformer/config.json").is_file():
        transformer.train(vae, encoder, log_losses(BUILD / "transformer.jsonl")).save_pretrained(BUILD / "transformer")
    dit = SanaTransformer2DModel.from_pretrained(BUILD / "transformer")

    scheduler = DPMSolverMultistepScheduler(flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction")
    tokenizer = AutoTokenizer.from_pretrained(BUILD / "tokenizer", local_files_only=True)
    pipeline = SanaPipeline(tokenizer, encoder.model, vae, dit, scheduler)
    size = save_checkpoint(pipeline, preview.fit_colours(vae, preview.training_pictures()), CHECKPOINT)
    # of the stages that were trained here
    plot_losses(sorted(BUILD.glob("*.jsonl")), REPORT)
    kept = AutoencoderDC.from_pretrained(CHECKPOINT / "vae")
    # whole pictures that training did not see
    unseen = autoencoder.draw_batch(random.Random(0), autoencoder.Phase(1, PIXELS, PIXELS, 32))
    result = evaluate.evaluate(CHECKPOINT, REPORT, autoencoder.psnr(kept, unseen))
    sys.stderr.write(f"{size:.2f} MB, {json.dumps(result, indent=2)}\n")


if __name__ == "__main__":
    main()
