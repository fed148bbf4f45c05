"""A verifier for a model: drafts of it, which a judge has judged whole, and a small network that learns to foresee that
by the hidden states of their first steps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional

from sana_core.batch.pipeline import (
    Conditioning,
    Embedding,
    ImageInputs,
    SamplingSettings,
    decode,
    encode_negative,
    encode_text,
    load_encoder,
    load_models,
    resolve_settings,
    sample,
    stack_texts,
)
from sana_core.batch.plan import ImageSpec
from sana_core.batch.verifier import KIND, Shape, Verifier
from sana_core.model.forward import Capture
from sana_core.runtime.image_files import levels
from sana_core.sampling.trail import Trail

from .step import take_step

# steps of a draft, and after how many of them its states are kept
DRAWN, LOOKS = 5, (1, 2)
WIDTH, HEADS, LAYERS = 96, 4, 2
STEPS, BATCH, LEARNING_RATE = 700, 48, 1e-3
# of the drafts, one in this many is not learned from
HELD_OUT_ONE_IN = 8

# what a judge says of a whole picture [H, W, 3], uint8: of each thing whether it is right
Judging = Callable[[np.ndarray], list[bool]]


class Drafts:
    """Draws drafts of a checkpoint on the CPU, square ones of its own size."""

    def __init__(self, checkpoint: Path, pixels: int, block: int, looks: tuple[int, ...] = LOOKS) -> None:
        self.device, self.block, self.looks = torch.device("cpu"), block, looks
        self.settings = resolve_settings(SamplingSettings(pixels, pixels, DRAWN), checkpoint)
        self.encoder = load_encoder(checkpoint, self.device, "float32")
        self.models = load_models(checkpoint, self.device, self.settings, checkpoint)
        self.negative = encode_negative(self.encoder, "")

    def encode(self, prompt: str) -> Embedding:
        return encode_text(self.encoder, prompt, instruction=True)

    def draw(self, text: Embedding, seed: int) -> tuple[list[Trail], np.ndarray]:
        """Return what each look sees of a draft, and its picture."""
        trails: list[Trail] = []
        for until in (*self.looks, DRAWN):
            trails.append(Trail(until, trails[-1].x0s if trails else (), Capture(self.block)))
            images = ImageInputs(trail=trails[-1])
            prompts = Conditioning([text], self.negative)
            latents = sample(self.models, self.settings, (ImageSpec(0, 0, seed),), prompts, images=images)
        return trails[:-1], levels(decode(self.models.autoencoder, latents)[0])


def gather(drafts: Drafts, folder: Path, number: int, prompt: str, judge: Judging) -> None:
    """Write what the looks see of the draft of that number, and what became of it; one that is there stays."""
    file = folder / f"{number:06d}.npz"
    if file.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    trails, picture = drafts.draw(drafts.encode(prompt), number)
    states = np.stack([trail.capture.states[0].half().numpy() for trail in trails])
    part = file.with_suffix(".part.npz")
    np.savez(part, prompt=prompt, states=states, said=np.array(judge(picture), dtype=np.int8))
    part.replace(file)


class Examples(NamedTuple):
    """Drafts: states [D, looks, N, hidden], embeddings [D, T, C] and mask [D, T], and what was said of them [D, K]."""

    states: torch.Tensor
    embeds: torch.Tensor
    mask: torch.Tensor
    said: torch.Tensor


def read(files: list[Path], encode: Callable[[str], Embedding]) -> Examples:
    loaded = [np.load(file) for file in files]
    known = {prompt: encode(prompt) for prompt in {str(each["prompt"]) for each in loaded}}
    embeds, mask = stack_texts([known[str(each["prompt"])] for each in loaded])
    longest = int(mask.sum(1).max())
    states = torch.from_numpy(np.stack([each["states"] for each in loaded]))
    said = torch.from_numpy(np.stack([each["said"] for each in loaded])).float()
    # one row stands for all where they are the same prompt
    rows = len(loaded)
    return Examples(states, embeds[:, :longest].expand(rows, -1, -1), mask[:, :longest].expand(rows, -1), said)


def order_of(verifier: Verifier, examples: Examples) -> float:
    """Return how often, of a draft that is right in all and one that is not, the first has the higher score, as the
    looks see them: 0.5 for a verifier that knows nothing."""
    right = examples.said.min(1)[0] > 0
    shares = []
    for look in range(examples.states.shape[1]):
        scores = verifier.score(examples.states[:, look], examples.embeds, examples.mask)
        shares.append((scores[right][:, None] > scores[~right]).float().mean())
    return torch.stack(shares).mean().item()


def train(
    folder: Path,
    encode: Callable[[str], Embedding],
    block: int,
    report: Callable[[int, float], None],
    steps: int = STEPS,
) -> tuple[Verifier, dict[str, float]]:
    """Return a verifier that has learned from the drafts in `folder`, and how well it orders those that it has not."""
    torch.manual_seed(13)
    files = sorted(folder.glob("*.npz"))
    random.Random(13).shuffle(files)
    held_out, examples = (read(part, encode) for part in (files[::HELD_OUT_ONE_IN], files_without(files)))
    hidden, text, said = examples.states.shape[-1], examples.embeds.shape[-1], examples.said.shape[-1]
    shape = Shape(block, hidden, text, WIDTH, HEADS, LAYERS, said, 100 * LOOKS[-1] // DRAWN)
    verifier = Verifier(shape).train()
    optimizer = torch.optim.AdamW(verifier.parameters(), LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pick = torch.randint(len(examples.said), (BATCH,))
        look = torch.randint(examples.states.shape[1], (BATCH,))
        logits = verifier(examples.states[pick, look].float(), examples.embeds[pick], examples.mask[pick])
        loss = functional.binary_cross_entropy_with_logits(logits, examples.said[pick])
        take_step(verifier, optimizer, schedule, loss)
        if step % 20 == 0:
            report(step, loss.item())
    verifier = verifier.half().float().train(False)  # as it is kept
    return verifier, {"drafts": len(files), "ordered rightly": round(order_of(verifier, held_out), 4)}


def files_without(files: list[Path]) -> list[Path]:
    """Return the files that are learned from."""
    return [file for number, file in enumerate(files) if number % HELD_OUT_ONE_IN]


def save(verifier: Verifier, folder: Path) -> None:
    """Write config.json and model.safetensors, as `load_verifier` reads them."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": KIND, **verifier.shape._asdict()}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {name: tensor.half().contiguous() for name, tensor in verifier.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
