"""Scorers under ComfyUI's memory management, and the choice of the best images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch
from PIL import Image, ImageDraw, ImageFont

from ....sana_core.batch.best import Scorer, best_first, load_scorer
from ....sana_core.errors import CheckpointError, InputError
from ....sana_core.runtime.cancellation import Polled
from ....sana_core.runtime.checks import check_text
from ....sana_core.runtime.image_files import levels
from ....sana_core.runtime.text import get_logger
from ..charts import PAPER, TEXT, as_image
from ..sampling.sampler import SEED
from .vae import SanaAutoencoder, check_decodable

if TYPE_CHECKING:
    import comfy.sd

logger = get_logger(__name__)

# Pixels of an image on the sheet, of the line below it, and of its text.
SIDE, LINE, LETTERS = 256, 30, 18


class HostScorer(NamedTuple):
    """A scorer of images, with the ModelPatcher that moves its model between devices."""

    scorer: Scorer
    patcher: comfy.model_patcher.ModelPatcher

    def score(self, pixels: torch.Tensor, prompt: str) -> float:
        """Return how well an image [3, H, W] in [-1, 1] fits `prompt`."""
        comfy.model_management.load_models_gpu([self.patcher], force_full_load=True)
        # A large CLIP takes seconds on a CPU, so scoring can be cancelled, too.
        with Polled(comfy.model_management.throw_exception_if_processing_interrupted):
            return float(self.scorer.score(pixels[None], prompt)[0])


def load(folder: Path) -> HostScorer:
    management = comfy.model_management
    with Polled(management.throw_exception_if_processing_interrupted):
        device, home = management.text_encoder_device(), management.text_encoder_offload_device()
        scorer = load_scorer(folder, home, management.text_encoder_dtype(device))
    # In a ModuleList, because ComfyUI assigns `device`, and models of transformers have no setter for it.
    return HostScorer(scorer, comfy.model_patcher.ModelPatcher(torch.nn.ModuleList([scorer.model]), device, home))


def pick(latent: dict, vae: comfy.sd.VAE, loaded: HostScorer, prompt: str, best: int) -> tuple:
    """Return LATENT and IMAGE of the `best` images, the sheet of all as IMAGE, and the seeds of the best.

    Images are decoded at full size, because a decode of downscaled latents loses objects of the prompt. They are
    decoded one by one, and only the best so far stay in memory. An image whose score is not finite ranks last.
    """
    check_text("prompt", prompt)
    samples = latent["samples"]
    check_decodable(samples, vae)
    if best > len(samples):
        raise InputError(f"best: got {best}, expected at most the {len(samples)} images; raise count in the sampler")
    places = list(latent.get("batch_index") or range(len(samples)))
    seeds = [(latent.get(SEED, 0) + place) % 2**64 for place in places]
    bar, ranked, cells = comfy.utils.ProgressBar(len(samples)), [], []
    # The bar counts images. A decode would move it too, from image to image back to the start.
    options = {"progress": None} if isinstance(vae.first_stage_model, SanaAutoencoder) else {}
    for number, row in enumerate(samples):
        comfy.model_management.throw_exception_if_processing_interrupted()
        image = vae.decode(row[None], options)[0]
        pixels = image.movedim(-1, 0) * 2 - 1
        score = loaded.score(pixels, prompt)
        if not math.isfinite(score):
            seed = seeds[number]
            logger.warning("scorer: %s gave %s for seed %d; this image ranks last", loaded.scorer.name, score, seed)
        ranked = sorted([*ranked, (best_first(score), number, image)], key=lambda rank: rank[:2])[:best]
        cells.append((levels(pixels), score, seeds[number]))
        bar.update_absolute(number + 1)
    if math.isinf(ranked[0][0]):
        raise CheckpointError(
            f"scorer: {loaded.scorer.name} gave no number for any of the {len(samples)} images from seed {seeds[0]}; "
            "use another scorer"
        )
    rows = [number for _, number, _ in ranked]
    out = {**latent, "samples": samples[rows], "batch_index": [places[row] for row in rows]}
    return (
        out,
        torch.stack([image for *_, image in ranked]),
        as_image(draw_sheet(cells, rows)),
        [seeds[r] for r in rows],
    )


def draw_sheet(cells: list[tuple], rows: list[int]) -> Image.Image:
    """Return all images, (pixels, score, seed), in a grid; the ranks of `rows` are before their scores."""
    across, font = math.ceil(math.sqrt(len(cells))), ImageFont.load_default(LETTERS)
    sheet = Image.new("RGB", (across * SIDE, math.ceil(len(cells) / across) * (SIDE + LINE)), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, (pixels, score, seed) in enumerate(cells):
        x, y = number % across * SIDE, number // across * (SIDE + LINE)
        small = Image.fromarray(pixels)
        small.thumbnail((SIDE, SIDE))
        sheet.paste(small, (x, y))
        rank = f"#{rows.index(number) + 1}  " if number in rows else ""
        words = f"{score:.2f}" if math.isfinite(score) else "no score"
        draw.text((x + 6, y + SIDE + 4), f"{rank}{words}  seed {seed}", TEXT, font)
    return sheet
