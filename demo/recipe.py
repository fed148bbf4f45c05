"""Train the bundled model: `python -m demo.recipe FOLDER --minutes 600`.

It starts from demo/sana-posters if that folder exists, and `--first STAGE` skips the stages before. Otherwise it starts
from FOLDER/autoencoder/vae (`demo.autoencoder` trains it), and trains a text encoder and a new transformer. The judge
must be trained before. The recipe resumes in FOLDER and stops when the time is over. It writes FOLDER/sana-posters, and
its scores to FOLDER/report.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer

from sana_core.checkpoints import load_text_encoder
from sana_core.training.settings import TrainingSettings, read_settings
from sana_core.training.trainer import train

from . import text
from .autoencoder import measure, to_pixels
from .captions import random_caption
from .checkpoint import fit_colours, save_checkpoint
from .dataset import write_dataset
from .evaluate import evaluate
from .painting import paint
from .steps import log_losses
from .world import COUNTING, GROUPINGS, SIZES, Groupings, Scene, training_scenes

HERE = Path(__file__).parent
CHECKPOINT = HERE / "sana-posters"


class Stage(NamedTuple):
    """The training images of a stage. `side`: the area equals a square of this side, in pixels."""

    side: int
    count: int
    shift: float
    groupings: Groupings = GROUPINGS


# SANA uses shift 3 for 1024 tokens. The shift grows with the square root of the tokens: 64 and 256 tokens here (Esser
# et al., "Scaling Rectified Flow Transformers", 2024, section 5.3.2).
STAGES = {
    "256": Stage(256, 24_000, 1.0),
    "512": Stage(512, 8_000, 1.5),
    "counting": Stage(512, 6_000, 1.5, COUNTING),
}
# Size of the transformer.
HEADS, LAYERS = 6, 14
LARGEST_HALF = 65504.0
# Images for measuring the latents' scale and colours.
ENCODED = 64


class OutOfTime(Exception):
    """Raised when the time is over."""


def settings_in(folder: Path, name: str) -> TrainingSettings:
    """Copy the settings file `name` to `folder` and read it there."""
    shutil.copyfile(HERE / name, folder / name)
    return read_settings(folder / name)


def make_autoencoder(source: Path, target: Path) -> AutoencoderDC:
    """Return the VAE in the precision and scale of the final checkpoint, as the transformer learns these latents."""
    if not (target / "config.json").is_file():
        vae = AutoencoderDC.from_pretrained(source, torch_dtype=torch.float32)
        if measure(vae)["largest"] > LARGEST_HALF:
            raise SystemExit("the autoencoder's maps leave the range of float16; train it with lower learning rates")
        with torch.no_grad():
            latents = [vae.encode(pixels).latent for pixels in paintings("scale").split(4)]
        vae.register_to_config(scaling_factor=round(1 / torch.cat(latents).std().item(), 5))
        vae.to(torch.bfloat16).save_pretrained(target)
    return AutoencoderDC.from_pretrained(target, torch_dtype=torch.float32)


def paintings(seed: str) -> torch.Tensor:
    """Return training images of the model's size, [ENCODED, 3, 512, 512] in [-1, 1]."""
    scenes = islice(training_scenes(random.Random(seed)), ENCODED)
    return to_pixels(np.stack([paint(scene) for scene in scenes]))


def write_pictures(folder: Path, name: str, seed: str) -> None:
    """Paint the data set of the stage `name`, in all shapes."""
    side, count, _, groupings = STAGES[name]

    def painted(scene: Scene) -> np.ndarray:
        width, height = SIZES[scene.seed % len(SIZES)]
        return paint(scene, width * side // 512, height * side // 512)

    rng = random.Random(f"pictures {name}{seed}")
    write_dataset(folder, islice(training_scenes(rng, groupings), count), rng, painted, random_caption)


def make(folder: Path, until: float, first: str, seed: str = "") -> None:
    """Resume the recipe in `folder` at stage `first`. `seed`: seed of the training images.

    Raises OutOfTime when the clock passes `until`.
    """

    def poll() -> None:
        if time.monotonic() > until:
            raise OutOfTime

    folder.mkdir(parents=True, exist_ok=True)
    parts = folder / "parts"
    if CHECKPOINT.is_dir():
        shutil.copytree(CHECKPOINT, parts, dirs_exist_ok=True)
    vae = make_autoencoder(folder / "autoencoder" / "vae", parts / "vae")
    if not (parts / "text_encoder" / "config.json").is_file():
        tokenizer, language_model = text.train(log_losses(folder / "text_encoder.jsonl"), text.SIZE)
        tokenizer.save_pretrained(parts / "tokenizer")
        language_model.to(torch.bfloat16).save_pretrained(parts / "text_encoder")
    encoder = load_text_encoder(parts / "text_encoder")
    tokenizer = AutoTokenizer.from_pretrained(parts / "tokenizer", local_files_only=True)

    def pipeline(transformer: SanaTransformer2DModel, shift: float) -> SanaPipeline:
        scheduler = DPMSolverMultistepScheduler(
            flow_shift=shift, use_flow_sigmas=True, prediction_type="flow_prediction"
        )
        return SanaPipeline(tokenizer, encoder.model, vae, transformer, scheduler)

    torch.manual_seed(5)
    if (parts / "transformer").is_dir():
        transformer = SanaTransformer2DModel.from_pretrained(parts / "transformer", torch_dtype=torch.float32)
    else:
        transformer = SanaTransformer2DModel(
            in_channels=32,
            out_channels=32,
            num_attention_heads=HEADS,
            attention_head_dim=32,
            num_layers=LAYERS,
            num_cross_attention_heads=HEADS,
            cross_attention_head_dim=32,
            cross_attention_dim=32 * HEADS,
            caption_channels=encoder.model.config.hidden_size,
            mlp_ratio=2.5,
            sample_size=max(stage.side for stage in STAGES.values()) // 32,
            patch_size=1,
            interpolation_scale=1.0,
        )
    for name in list(STAGES)[list(STAGES).index(first) :]:
        poll()
        write_pictures(folder / f"pictures-{name}", name, seed)
        start, shift = folder / f"start-{name}", STAGES[name].shift
        if not (start / "model_index.json").is_file():
            pipeline(transformer, shift).save_pretrained(start)
        settings = settings_in(folder, f"train_{name}.toml")
        # On CPUs the backward pass of flash attention takes three times as long as plain attention.
        with sdpa_kernel(SDPBackend.MATH):
            trained = train(settings, report=lambda line: sys.stderr.write(f"{line}\n"), poll=poll)
        transformer = SanaTransformer2DModel.from_pretrained(trained)
    colours = fit_colours(vae, paintings("colours"))
    save_checkpoint(pipeline(transformer, shift), colours, folder / "sana-posters")
    evaluate(folder / "sana-posters", folder / "report")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--first", choices=STAGES, default=next(iter(STAGES)))
    parser.add_argument("--seed", default="", help="seed of the training images")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        make(arguments.folder, time.monotonic() + 60 * arguments.minutes, arguments.first, arguments.seed)
    except OutOfTime:
        sys.stderr.write("time is over; run the same command to resume\n")


if __name__ == "__main__":
    main()
