"""Bytes that drawing a picture takes, stage by stage, before anything is loaded.

Weights are counted from the configurations of the published models. Activations are those of the forwards: so many maps
of the model's width, as measured on a CPU; benchmarks/memory.json holds measured and predicted side by side.
"""

from __future__ import annotations

from typing import Any

import torch

from .checkpoints.released import VARIANTS, Architecture
from .decode.plan import Planner
from .decode.stages import Stages
from .errors import InputError
from .latents import DOWNSCALE, picture_shape

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CARDS = (4, 6, 8, 12, 16, 24)  # GiB
# what the driver and the kernels take of a card
CONTEXT = 600 * 10**6
WIDTHS = (128, 256, 512, 512, 1024, 1024)
ENCODER, GEMMA = 153_027_104, 2_614_341_888
# stages and parameters of the decoder; the encoder is the same
DECODERS = {
    "dc-ae-f32c32": (Stages(WIDTHS, (3,) * 6, 3, 32, 32, 2, False), 159_223_171),
    "dc-ae-lite-f32c32": (Stages(WIDTHS, (0, 3, 5, 4, 4, 4), 6, 32, 32, 1, True), 268_154_124),
}
TEXT_WIDTH, TEXT_HIDDEN, TEXT_TOKENS, INSTRUCTION_TOKENS = 2304, 9216, 300, 280
# maps [batch, positions, width] alive at once in a block, the gated feed-forward's among them; on an accelerator in 16
# bits the linear attention's fp32 copies besides
MAPS, ACCELERATOR_MAPS = 12.0, {torch.float32: 12.0, torch.bfloat16: 13.7, torch.float16: 13.7}
# on the CPU in bf16, a reordered copy of a block's largest weight beside fewer maps
MAPS_BESIDE_WEIGHT = 7.3
FIXED = 4_500_000


def transformer_parameters(model: Architecture) -> int:
    """Return how many parameters a SANA transformer has."""
    width, hidden = model.width, 5 * model.width // 2
    attention = 4 * width**2 + width + 4 * width**2 + 4 * width
    feed_forward = width * 2 * hidden + 2 * hidden + 2 * hidden * 9 + 2 * hidden + hidden * width
    block = attention + feed_forward + 6 * width + (4 * width if model.qk_norm else 0)
    embeds = 32 * width + width + TEXT_WIDTH * width + width + width**2 + width + width
    time = 256 * width + width + width**2 + width + width * 6 * width + 6 * width
    guidance = 256 * width + width + width**2 + width if model.guidance_embeds else 0
    return model.layers * block + embeds + time + guidance + width * 32 + 32 + 2 * width


def text_bytes(batch: int, item: int) -> int:
    """Return what encoding `batch` prompts behind the instruction takes beyond Gemma's weights."""
    tokens = TEXT_TOKENS + INSTRUCTION_TOKENS
    return batch * tokens * (6 * TEXT_WIDTH + 3 * TEXT_HIDDEN + 8 * tokens) * item


def transformer_bytes(
    model: Architecture, height: int, width: int, batch: int, dtype: torch.dtype, accelerator: bool
) -> int:
    """Return what a step takes beyond the weights, prompt and negative prompt together; sides in latents.

    The keys and values of both are kept for all steps and blocks.
    """
    passes = 1 if model.guidance_embeds else 2
    prompts = 2 * model.layers * passes * TEXT_TOKENS * model.width * dtype.itemsize
    unit = batch * passes * height * width * model.width * dtype.itemsize
    block = (ACCELERATOR_MAPS[dtype] if accelerator else MAPS) * unit
    if dtype == torch.bfloat16 and not accelerator:
        block = max(block, MAPS_BESIDE_WEIGHT * unit + 5 * model.width**2 * dtype.itemsize)
    return int(prompts + block) + FIXED


def plan_memory(
    variant: str,
    width: int,
    height: int,
    batch: int = 1,
    dtype: str = "bfloat16",
    accelerator: bool = True,
    vae: str = "dc-ae-f32c32",
) -> dict[str, Any]:
    """Return the bytes of each stage of drawing pictures of `width` x `height` pixels, decoded by `vae`.

    "text", "transformer" and "decode" have "weights" and "activations"; "decode" has those of each method, None where
    a method cannot work, and the activations of what "auto" takes. "peak" is the most that has to be on the card at
    once when each stage's weights are there alone, "smallest" the same with the smallest decode, "fits" says for cards
    of 4 to 24 GiB whether that is possible. Raises InputError for an unknown variant, dtype or VAE, or sizes SANA has
    not.
    """
    if variant not in VARIANTS:
        raise InputError(f"variant: got {variant!r}, expected one of {', '.join(VARIANTS)}")
    if dtype not in DTYPES:
        raise InputError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    if vae not in DECODERS:
        raise InputError(f"vae: got {vae!r}, expected one of {', '.join(DECODERS)}")
    model, kind = VARIANTS[variant], DTYPES[dtype]
    decoder_stages, decoder = DECODERS[vae]
    _, _, rows, columns = picture_shape(width, height, batch)
    stages: dict[str, dict[str, Any]] = {
        "text": {"weights": GEMMA * kind.itemsize, "activations": text_bytes(batch, kind.itemsize)},
        "transformer": {
            "weights": transformer_parameters(model) * kind.itemsize,
            "activations": transformer_bytes(model, rows, columns, batch, kind, accelerator),
        },
    }
    methods = decode_methods(Planner(decoder_stages, rows, columns, kind, accelerator))
    stages["decode"] = {
        "weights": (decoder + ENCODER) * kind.itemsize,
        "activations": methods["strips"],
        "methods": methods,
    }
    largest = [stage["weights"] + stage["activations"] for stage in stages.values()]
    smallest = max(*largest[:2], stages["decode"]["weights"] + methods["smallest"])
    return {
        "variant": variant,
        "vae": vae,
        "width": width,
        "height": height,
        "batch": batch,
        "dtype": dtype,
        **stages,
        "peak": max(largest),
        "smallest": smallest,
        "fits": {card: smallest + CONTEXT <= card * 2**30 for card in CARDS},
    }


def decode_methods(planner: Planner) -> dict[str, int | None]:
    """Return the bytes beyond weights and pictures of each way to decode one picture."""
    try:
        whole: int | None = planner.whole().peak_bytes
    except ValueError:
        whole = None
    strips = planner.fitting(float("inf"))
    assert strips is not None  # anything fits infinity
    return {
        "whole": whole,
        "tiles": planner.tiles(1024 // DOWNSCALE, 128 // DOWNSCALE).peak_bytes,
        "strips": strips.peak_bytes,
        "smallest": planner.floor().peak_bytes,
    }


def fitting_cards(plan: dict[str, Any]) -> str:
    """Return the smallest card that `plan` fits, in words."""
    cards = [card for card, fits in plan["fits"].items() if fits]
    return f"fits a card of {cards[0]} GB" if cards else f"needs more than {CARDS[-1]} GB"
