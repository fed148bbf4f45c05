"""How well the bundled checkpoint follows held-out prompts with every sampler, with PAG, and at few and many steps.

`python -m demo.samplers` writes report/samplers.json and the contact sheet report/samplers.jpg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw

import sana_core
from sana_core.model.known_models import SHIFT
from sana_core.model.latents import latent_shape, noise_stream
from sana_core.model.text import TextEncoder
from sana_core.runtime.image_files import levels
from sana_core.sampling.guidance import PerturbedAttention, denoiser, perturbed_attention
from sana_core.sampling.samplers import SAMPLERS, sample_scm

from .evaluate import score
from .pictures import PIXELS, combinations, prompt

REPORT = Path(__file__).parent / "report"
CHECKPOINT = Path(__file__).parents[1] / "tests" / "models" / "sana-tiny"
STEPS = (4, 8, 14, 20, 28)
GUIDANCE = 4.5
# where the ODE samplers have long converged
MANY = 300
SHOWN = 4


class Row(NamedTuple):
    """A line of the table: a sampler, and the scale of perturbed attention with it."""

    sampler: str
    pag: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.sampler}, PAG {self.pag:g}" if self.pag else self.sampler


ROWS = [*map(Row, SAMPLERS), Row("flow_dpmpp_2m", 1.0), Row("flow_dpmpp_2m", 2.0), Row("flow_euler", 1.0)]


class Painter:
    """The checkpoint with all held-out prompts encoded, so that a table of 40 cells takes minutes."""

    def __init__(self, checkpoint: Path) -> None:
        self.transformer = sana_core.load_transformer(checkpoint)
        self.autoencoder = sana_core.load_autoencoder(checkpoint)
        encoder: TextEncoder = sana_core.load_text_encoder(checkpoint)
        self.wanted = combinations()[1]
        self.cond = sana_core.encode_prompts(encoder, [prompt(*combination) for combination in self.wanted])
        self.uncond = sana_core.encode_prompts(encoder, [""], instruction=False)

    @torch.no_grad()
    def draw(self, row: Row, steps: int) -> np.ndarray:
        """Draw one picture of each prompt, all with seed 0, uint8 [64, 128, 128, 3]."""
        attention: PerturbedAttention | None = None
        if row.pag:
            attention = perturbed_attention(self.transformer.config, row.pag, "")
        flow = SAMPLERS[row.sampler]
        model = denoiser(self.transformer, self.cond, self.uncond, GUIDANCE, flow.whole_timesteps, attention)
        count = len(self.wanted)
        # the seed of every prompt is 0, as it is when each is drawn alone
        noise = noise_stream(torch.empty(latent_shape(PIXELS, PIXELS, count)), 0, [0] * count)
        start = next(noise)
        more = {"noise": noise} if flow.sample is sample_scm else {}
        latents = flow.sample(model, start, flow.sigmas(steps, SHIFT), **more)
        images = sana_core.decode_latents(self.autoencoder, latents / self.autoencoder.config.scaling_factor)
        return np.stack([levels(image) for image in images])


def distance(pictures: np.ndarray, others: np.ndarray) -> float:
    """Mean difference in levels of 255."""
    return float(np.abs(pictures.astype(int) - others.astype(int)).mean())


def contact_sheet(cells: dict[str, list[np.ndarray]], side: int = 56) -> Image.Image:
    """One line a sampler, one block of pictures a number of steps."""
    left, top, gap = 150, 20, 8
    width = left + len(STEPS) * (SHOWN * side + gap)
    sheet = Image.new("RGB", (width, top + len(cells) * (side + 4)), "white")
    pen = ImageDraw.Draw(sheet)
    for column, steps in enumerate(STEPS):
        pen.text((left + column * (SHOWN * side + gap), 4), f"{steps} steps", fill="black")
    for line, (title, row) in enumerate(cells.items()):
        y = top + line * (side + 4)
        pen.text((4, y + side // 2 - 6), title, fill="black")
        for column, pictures in enumerate(row):
            for k in range(SHOWN):
                small = Image.fromarray(pictures[k]).resize((side, side), Image.Resampling.LANCZOS)
                sheet.paste(small, (left + column * (SHOWN * side + gap) + k * side, y))
    return sheet


def main() -> None:
    painter = Painter(CHECKPOINT)
    converged = painter.draw(Row("flow_euler"), MANY)
    table: dict[str, dict] = {}
    cells: dict[str, list[np.ndarray]] = {}
    for row in ROWS:
        drawn = [painter.draw(row, steps) for steps in STEPS]
        # four prompts from all over the list
        cells[row.title] = [pictures[:: len(pictures) // SHOWN] for pictures in drawn]
        table[row.title] = {
            str(steps): score(pictures, painter.wanted) | {"distance": round(distance(pictures, converged), 2)}
            for steps, pictures in zip(STEPS, drawn, strict=True)
        }
    result = {
        "prompts": len(painter.wanted),
        "guidance": GUIDANCE,
        "pag_block": min(perturbed_attention(painter.transformer.config, 1.0, "").blocks),
        "distance_from": f"flow_euler with {MANY} steps, mean levels of 255",
        "table": table,
    }
    (REPORT / "samplers.json").write_text(json.dumps(result, indent=2) + "\n")
    contact_sheet(cells).save(REPORT / "samplers.jpg", quality=88)


if __name__ == "__main__":
    main()
