"""Trains the AutoencoderDC of the model, with SANA's x32 and 32 channels, on posters of all sizes.

`python -m demo.autoencoder FOLDER --minutes 60` trains for an hour and saves its state into FOLDER. The next run
resumes from there. The first run starts from the autoencoder in demo/sana-posters, if it exists. With `--decoder`, only
the decoder is trained, so that the latents do not change, and the transformer need not be trained again. FOLDER
contains state.pt, log.jsonl with losses and measurements, and vae/ with the averaged weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderDC

from .painting import paint
from .steps import take_step
from .world import SIZES, STYLES, training_scenes

START = Path(__file__).parent / "sana-posters" / "vae"
CHANNELS = (16, 16, 32, 128, 128, 256)
# Like DC-AE, the encoder has no block at the full resolution. The decoder has one. Without it, the last upsampling is
# linear, and edges are only 63 % as steep as in the paintings.
ENCODER_LAYERS = (0, 1, 1, 1, 1, 1)
DECODER_LAYERS = (1,) * 6
BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
MULTISCALES = ((), (), (), (5,), (5,), (5,))
# One step in WHOLE_EVERY trains on a complete poster, because the attention sums over all positions. The others train
# on crops with about as many pixels.
CROP, CROPS, WHOLE_EVERY = 256, 4, 4
# Highest change in a step, as a share of a weight matrix' entries (root mean square), and of vectors at once.
CHANGE, VECTOR_RATE = 0.01, 0.003
# Steps of the warm-up, steps after which the rate falls with the square root of the step, and the share of the time at
# the end in which it falls to 0.
WARM, STEADY, COOLING = 100, 3000, 0.25
# The average covers about a tenth of the steps (Karras et al., 2024, "Analyzing and Improving the Training Dynamics of
# Diffusion Models", section 3.1)
EMA_POWER = 6.94
SQUARED, EDGES = 20.0, 1.0
SAVE_MINUTES, MEASURE_EVERY, MEASURED = 4.0, 500, 16


def build(channels: tuple[int, ...] = CHANNELS, encoder_layers: tuple[int, ...] = ENCODER_LAYERS) -> AutoencoderDC:
    return AutoencoderDC(
        in_channels=3,
        latent_channels=32,
        attention_head_dim=16,
        encoder_block_types=BLOCKS,
        decoder_block_types=BLOCKS,
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        encoder_layers_per_block=encoder_layers,
        decoder_layers_per_block=DECODER_LAYERS,
        encoder_qkv_multiscales=MULTISCALES,
        decoder_qkv_multiscales=MULTISCALES,
        upsample_block_type="interpolate",
        downsample_block_type="Conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )


def to_pixels(images: np.ndarray) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> float [B, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(images).movedim(-1, 1).float() / 127.5 - 1


def batch(step: int) -> torch.Tensor:
    """Return the images of step `step`, [B, 3, H, W] in [-1, 1]."""
    rng = random.Random(f"autoencoder {step}")
    scenes = training_scenes(rng)
    if step % WHOLE_EVERY == 0:
        return to_pixels(paint(next(scenes), *rng.choice(SIZES))[None])
    crops = []
    for scene in islice(scenes, CROPS):
        image = paint(scene, *rng.choice(SIZES))
        corners = [[rng.randint(0, side - CROP) for side in image.shape[:2]] for _ in range(2)]
        # Of two crops, use the one with more detail, because skies are learned quickly.
        crops.append(max((image[y : y + CROP, x : x + CROP] for y, x in corners), key=detail))
    return to_pixels(np.stack(crops))


def detail(window: np.ndarray) -> float:
    """Return the mean difference between horizontal neighbours."""
    return float(np.abs(np.diff(window.astype(np.int16), axis=1)).mean())


def reconstruction_loss(shown: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Return the absolute and squared error of the pixels, plus the absolute error of the differences of neighbours."""
    error = shown - pixels
    loss = error.abs().mean() + SQUARED * error.square().mean()
    return loss + EDGES * (error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean())


class Norms:
    """Keeps weight matrices at their initial norms, with proportional rates (Karras et al., 2024, section 2.3).

    Because of the decoder's last norm, the scale of the maps before it does not change the output. Without fixed norms,
    these maps grow from stage to stage beyond the range of float16. The blocks, whose outputs are normalised, would
    then add nothing noticeable.
    """

    def __init__(self, model: AutoencoderDC) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.matrices = [parameter for parameter in trained if parameter.ndim > 1]
        self.vectors = [parameter for parameter in trained if parameter.ndim == 1]
        self.norms = [matrix.detach().norm() for matrix in self.matrices]

    def groups(self) -> list[dict]:
        """Return parameter groups for an optimizer. The rate of a matrix is proportional to its norm."""
        pairs = zip(self.matrices, self.norms, strict=True)
        groups = [{"params": [m], "lr": CHANGE * norm.item() / m.numel() ** 0.5} for m, norm in pairs]
        return [*groups, {"params": self.vectors, "lr": VECTOR_RATE}]

    @torch.no_grad()
    def keep(self) -> None:
        for matrix, norm in zip(self.matrices, self.norms, strict=True):
            matrix.mul_(norm / matrix.norm())


@torch.no_grad()
def measure(model: AutoencoderDC) -> dict[str, float]:
    """Measure the reconstruction of posters that training does not show.

    For each style: the PSNR in decibels, and `edges`, the steepness of the reconstruction's edges relative to the
    painting's. `largest`: the largest value in any map. The limit of float16 is 65504.
    """
    largest = [0.0]
    hooks = [
        module.register_forward_hook(lambda _, __, out: largest.append(out.abs().max().item()))
        for module in model.modules()
        if not list(module.children())
    ]
    scenes, result = training_scenes(random.Random("measure the autoencoder")), {}
    for style in STYLES:
        squared, steep = [], []
        for index, scene in enumerate(islice(scenes, MEASURED)):
            scene = scene._replace(style=style)
            pixels = to_pixels(paint(scene, *SIZES[index % len(SIZES)])[None])
            shown = model.decode(model.encode(pixels).latent).sample.clamp(-1, 1)
            squared.append((shown - pixels).square().mean().item())
            painted_edges, got = steepness(pixels), steepness(shown)
            edge = painted_edges > 0.1
            steep.append((got[edge].sum() / painted_edges[edge].sum()).item())
        result[style] = round(-10 * float(np.log10(np.mean(squared) / 4)), 2)
        result[f"{style} edges"] = round(float(np.mean(steep)), 3)
    for hook in hooks:
        hook.remove()
    return result | {"largest": round(max(largest), 1)}


def steepness(pixels: torch.Tensor) -> torch.Tensor:
    """Return the magnitude of the gradient of the lightness, [B, H - 1, W - 1]."""
    grey = pixels.mean(1)
    return torch.hypot(grey.diff(dim=-1)[:, :-1], grey.diff(dim=-2)[:, :, :-1])


def train(folder: Path, time_left: Callable[[int], float], decoder_alone: bool = False) -> None:
    """Train, and resume from the state in `folder`. Stops when `time_left(step)`, a share of the time, is 0."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    model = AutoencoderDC.from_pretrained(START, torch_dtype=torch.float32) if START.is_dir() else build()
    model = model.to(memory_format=torch.channels_last)
    model.encoder.requires_grad_(not decoder_alone)
    norms, first = Norms(model), 0
    averaged = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(norms.groups(), betas=(0.9, 0.98), weight_decay=0.0)
    if (folder / "state.pt").is_file():
        state = torch.load(folder / "state.pt", weights_only=True)
        first = state["step"]
        model.load_state_dict(state["model"])
        averaged.load_state_dict(state["averaged"])
        optimizer.load_state_dict(state["optimizer"])
        for group, fresh in zip(optimizer.param_groups, norms.groups(), strict=True):
            group["lr"] = group["initial_lr"] = fresh["lr"]

    def rate(index: int) -> float:
        step = first + index
        return min((step + 1) / WARM, 1.0, (STEADY / (step + 1)) ** 0.5) * min(1.0, time_left(step) / COOLING)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def note(line: dict) -> None:
        with (folder / "log.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        sys.stderr.write(f"{line}\n")

    def save(step: int) -> None:
        state = {"step": step, "model": model.state_dict(), "averaged": averaged.state_dict()}
        state["optimizer"] = optimizer.state_dict()
        part = folder / "state.pt.part"
        torch.save(state, part)
        part.replace(folder / "state.pt")

    step, saved, losses = first, time.monotonic(), []
    while time_left(step) > 0:
        if step % MEASURE_EVERY == 0:
            note({"step": step, **measure(averaged)})
        pixels = batch(step).to(memory_format=torch.channels_last)
        loss = reconstruction_loss(model.decode(model.encode(pixels).latent).sample, pixels)
        take_step(model, optimizer, schedule, loss)
        norms.keep()
        step += 1
        with torch.no_grad():
            share = 1 - (1 - 1 / step) ** (EMA_POWER + 1)
            for mean, now in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, share)
        losses.append(loss.item())
        if step % 50 == 0:
            note({"step": step, "loss": round(float(np.mean(losses)), 5), "seconds": round(time.process_time())})
            losses = []
        if time.monotonic() > saved + 60 * SAVE_MINUTES:
            save(step)
            saved = time.monotonic()
    save(step)
    averaged.save_pretrained(folder / "vae")
    note({"step": step, **measure(averaged), "stopped": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--decoder", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # Late in training, many gradients are denormal, which makes a step a third slower.
    torch.set_flush_denormal(True)
    until, stopped = time.monotonic() + 60 * arguments.minutes, threading.Event()
    # SIGTERM ends the training after the current step, and the state is saved.
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())

    def time_left(_: int) -> float:
        return 0.0 if stopped.is_set() else (until - time.monotonic()) / (60 * arguments.minutes)

    train(arguments.folder, time_left, arguments.decoder)


if __name__ == "__main__":
    main()
