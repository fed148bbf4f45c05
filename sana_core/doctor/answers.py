"""Run model files where the answer is known: a round trip through a VAE, and the loss of a transformer.

The published DC-AE gives photographs back at 29.3 (1.0) and 29.7 dB (1.1) at 1024 px (efficientvit,
assets/docs/dc_ae_sana_1.1.md). NVIDIA's training logs have losses of about 0.67 at 1024 px; an untrained model has 1 +
the variance of the latents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..checkpoints import CheckpointInfo, load_autoencoder, load_text_encoder, load_transformer
from ..checkpoints.load import latent_scale, shift_of
from ..decode import decode_latents, encode_images
from ..model.forward import prepare, velocity
from ..model.known_models import DECODERS, VARIANTS
from ..model.reference import model_timestep
from ..model.text import encode_prompts, instruction_text
from .arithmetic import BUNDLED, EXPECTED, noise, release
from .report import NOTED, RIGHT, WRONG, Report

SECTION = "What the models compute"
# dB below which a VAE is another one, or broken
FLOOR = 20.0
# the share of a know-nothing's loss below which a transformer has learned, for this VAE and these prompts
LEARNT = 0.75


class Model(NamedTuple):
    """A transformer, how lines name it, and the VAE and text encoder that it is tried with."""

    name: str
    transformer: CheckpointInfo
    autoencoder: CheckpointInfo
    text_encoder: CheckpointInfo


def check_models(report: Report, found: Sequence[CheckpointInfo], device: torch.device) -> None:
    """Add lines on what each VAE and each transformer in `found` computes on `device`."""
    if not EXPECTED.is_file():
        return
    for info in found:
        for part in info.parts or (info,):
            if part.kind == "autoencoder" and not report.late(SECTION, part.name):
                with report.checking(SECTION, f"{named(info, part)}, round trip"):
                    check_round_trip(report, named(info, part), part, device)
                release()
    for model in models(found):
        if not report.late(SECTION, model.name):
            with report.checking(SECTION, f"{model.name}, loss"):
                check_loss(report, model, device)
            release()


def named(info: CheckpointInfo, part: CheckpointInfo) -> str:
    """Return how lines name a part: in a folder of several the file is called as everywhere."""
    return f"{info.path.name}: {part.path.parent.name}" if info.parts else part.path.name


def models(found: Sequence[CheckpointInfo]) -> Iterable[Model]:
    """Yield each transformer with the VAE and text encoder of its own folder or file, or with the first ones here."""
    everything = [part for info in found for part in info.parts or (info,)]
    for info in found:
        for transformer in (part for part in info.parts or (info,) if part.kind == "transformer"):
            chosen = [
                next((part for part in (*info.parts, *everything) if part.kind == kind), None)
                for kind in ("autoencoder", "text_encoder")
            ]
            if chosen[0] is not None and chosen[1] is not None:
                yield Model(named(info, transformer), transformer, chosen[0], chosen[1])


def judge(report: Report, info: CheckpointInfo, what: str, expected: str, got: str, right: bool) -> None:
    """Add a line, without a verdict for a model that may be right in a world of its own, as a trained small one is."""
    decoder = DECODERS.get(info.variant)  # a small DC-AE has the layout's name too
    released = decoder and info.headers["decoder.conv_in.weight"].shape[0] == decoder.widths[-1]
    released = released or info.variant in VARIANTS or BUNDLED in info.path.parents
    report.add(SECTION, what, expected, got, (RIGHT if right else WRONG) if released else NOTED)


def known_image() -> tuple[torch.Tensor, str]:
    """Return the committed image [1, 3, H, W] in [-1, 1], and what it shows."""
    from PIL import Image

    with Image.open(EXPECTED) as image:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        return pixels / 127.5 - 1, json.loads(image.info["sana"])["prompt"]


def check_round_trip(report: Report, what: str, info: CheckpointInfo, device: torch.device) -> None:
    """An image to latents and back: how many dB of it are left, and whether strips are the undivided decode."""
    model = load_autoencoder(info.path, device)
    image, _ = known_image()
    image = image.to(device)
    latents = encode_images(model, image)
    back = decode_latents(model, latents, "whole")
    error = float((back.clamp(-1, 1) - image).square().mean())
    decibels = 10 * np.log10(4 / error) if error > 0 else 99.0
    expected = f"{FLOOR:.0f} dB or more"
    judge(report, info, f"{what}, round trip", expected, f"{decibels:.1f} dB", bool(decibels >= FLOOR))
    away = float((decode_latents(model, latents, "strips") - back).abs().max())
    report.judge(SECTION, f"{what}, strips", "at most 0.001 from the undivided decode", f"{away:.1e}", away <= 1e-3)


@torch.no_grad()
def check_loss(report: Report, model: Model, device: torch.device) -> None:
    """The loss of the committed image at half of the noise, beside that of a model that knows nothing."""
    what = model.name
    image, prompt = known_image()
    autoencoder = load_autoencoder(model.autoencoder.path, device)
    x0 = encode_images(autoencoder, image.to(device)).float() * latent_scale(model.autoencoder)
    del autoencoder
    encoder = load_text_encoder(model.text_encoder.path, device, widest(device))
    text = instruction_text(encoder.reference)
    count = len(encoder.tokenizer.encode(text))
    report.note(SECTION, f"{what}, tokens of the instruction", str(count))
    embeds, mask = encode_prompts(encoder, [prompt])
    del encoder
    release()
    transformer = load_transformer(model.transformer.path, device, widest(device))
    if transformer.config.guidance_embeds:
        report.skip(SECTION, f"{what}, loss", "SANA-Sprint is distilled, its loss says nothing")
        return
    n = noise(*x0.shape, seed=0).to(device)
    x, timestep = torch.lerp(x0, n, 0.5).to(transformer.dtype), torch.full((1,), 500.0, device=device)
    constants = prepare(transformer, embeds.to(transformer.dtype), mask, *x.shape[-2:])
    predicted = velocity(transformer, x, model_timestep(transformer, timestep), constants).float()
    loss, ignorant = (float((one - (n - x0)).square().mean()) for one in (predicted, torch.zeros_like(n)))
    allowed = LEARNT * ignorant
    judge(report, model.transformer, f"{what}, loss", f"below {allowed:.2f}", f"{loss:.2f}", loss < allowed)
    report.note(SECTION, f"{what}, shift", f"{shift_of(model.transformer):g}")


def widest(device: torch.device) -> torch.dtype:
    """Return the type that the models are tried in."""
    from ..runtime.accelerator import has_bf16

    return torch.bfloat16 if device.type != "cpu" and has_bf16(device) else torch.float32
