"""Bytes that generating an image takes, stage by stage, before anything is loaded.

Weights are counted from the configurations of the published models. Activations are those of the forwards: so many maps
of the model's width, as measured on a CPU; benchmarks/memory.json holds measured and predicted side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TypedDict

import torch

from .decode.plan import Planner
from .decode.run import TILES
from .decode.stages import Stages
from .errors import InputError
from .model.known_models import (
    DECODERS,
    ENCODER_PARAMETERS,
    MAX_TOKENS,
    TEXT_HIDDEN,
    TEXT_PARAMETERS,
    TEXT_WIDTH,
    VARIANTS,
    Architecture,
    Decoder,
)
from .model.latents import CHANNELS, DOWNSCALE, latent_shape
from .runtime.checks import check_name


class StagePlan(TypedDict):
    """Bytes of a stage."""

    weights: int
    activations: int


class DecodePlan(StagePlan):
    """Bytes of the decode; `methods` has the activations of each way to do it, None where one cannot work."""

    methods: Mapping[str, int | None]


class MemoryPlan(TypedDict):
    """What `plan_memory` and `plan_video` have in common."""

    variant: str
    width: int
    height: int
    batch: int
    dtype: str
    text: StagePlan
    transformer: StagePlan
    decode: DecodePlan
    peak: int
    smallest: int
    fits: dict[int, bool]


class ImagePlan(MemoryPlan):
    """What `plan_memory` returns."""

    vae: str


# names of weights to their shapes
Shapes = Mapping[str, tuple[int, ...]]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CARDS = (4, 6, 8, 12, 16, 24)  # GiB
# what the driver and the kernels take of a GPU
CONTEXT = 600 * 10**6
INSTRUCTION_TOKENS = 280
# maps [batch, positions, width] alive at once in a block, the gated feed-forward's among them: on the CPU, and on an
# accelerator with the fused kernels (13.2 without)
MAPS, FUSED_MAPS = 12.0, 10.5
# on the CPU in bf16, a reordered copy of a block's largest weight beside fewer maps
MAPS_BESIDE_WEIGHT = 7.3
FIXED = 4_500_000
EMBEDDED = 4096 // DOWNSCALE  # from this many latents on a model surely has a position embedding, in fp32


def count(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def transformer_parameters(model: Architecture) -> int:
    """Return how many parameters a SANA transformer has."""
    width, hidden = model.width, 5 * model.width // 2
    square = width**2 + width  # a layer from the width to itself, with its bias
    # the table of a block, its two attentions, of which one has no bias for query, key and value, and their norms
    block = 6 * width + (8 * square - 3 * width) + 4 * width * model.qk_norm
    # and its feed-forward
    block += 2 * hidden * (width + 1) + 2 * hidden * (9 + 1) + hidden * width
    # where there is guidance, it is embedded as the time is
    embedders = (2 if model.guidance_embeds else 1) * ((256 + 1) * width + square) + 6 * square
    captions = (TEXT_WIDTH + 1) * width + square + width
    ends = (CHANNELS + 1) * width + 2 * width + (width + 1) * CHANNELS
    return model.layers * block + embedders + captions + ends


def stages_of(decoder: Decoder) -> Stages:
    """Return the stages of a released decoder."""
    return Stages(decoder.widths, decoder.layers, decoder.local, decoder.scales, decoder.shuffles)


def text_bytes(batch: int, item: int) -> int:
    """Return what encoding `batch` prompts behind the instruction takes beyond Gemma's weights."""
    tokens = MAX_TOKENS + INSTRUCTION_TOKENS
    return batch * tokens * (6 * TEXT_WIDTH + 3 * TEXT_HIDDEN + 8 * tokens) * item


def transformer_bytes(
    model: Architecture,
    height: int,
    width: int,
    batch: int,
    dtype: torch.dtype,
    accelerator: bool,
) -> int:
    """Return what a step takes beyond the weights, prompt and negative prompt together; sides in latents.

    The keys and values of both are kept for all steps and blocks, and so is the position embedding of a large image.
    """
    passes = 1 if model.guidance_embeds else 2
    prompts = 2 * model.layers * passes * MAX_TOKENS * model.width * dtype.itemsize
    unit = batch * passes * height * width * model.width * dtype.itemsize
    block = (FUSED_MAPS if accelerator else MAPS) * unit
    if dtype == torch.bfloat16 and not accelerator:
        block = max(block, MAPS_BESIDE_WEIGHT * unit + 5 * model.width**2 * dtype.itemsize)
    position = height * width * model.width * torch.float32.itemsize if max(height, width) >= EMBEDDED else 0
    return int(prompts + block) + position + FIXED


def plan_memory(
    variant: str,
    width: int,
    height: int,
    batch: int = 1,
    dtype: str = "bfloat16",
    accelerator: bool = True,
    vae: str = "dc-ae-f32c32",
) -> ImagePlan:
    """Return the bytes of each stage of generating images of `width` x `height` pixels, decoded by `vae`.

    The activations of "decode" are those of what "auto" takes. "peak" is the most that has to be on the GPU at once
    when each stage's weights are there alone, "smallest" the same with the smallest decode, "fits" says for GPUs of 4
    to 24 GiB whether that is possible. Raises InputError for an unknown variant, dtype or VAE, and for wrong sizes.
    """
    check_name("variant", variant, VARIANTS)
    check_name("dtype", dtype, DTYPES)
    check_name("vae", vae, DECODERS)
    model, kind = VARIANTS[variant], DTYPES[dtype]
    decoder = DECODERS[vae]
    _, _, rows, columns = latent_shape(width, height, batch)
    text: StagePlan = {"weights": TEXT_PARAMETERS * kind.itemsize, "activations": text_bytes(batch, kind.itemsize)}
    transformer: StagePlan = {
        "weights": transformer_parameters(model) * kind.itemsize,
        "activations": transformer_bytes(model, rows, columns, batch, kind, accelerator),
    }
    planner = Planner(stages_of(decoder), rows, columns, kind, accelerator)
    decode = plan_decode(planner, decoder, kind.itemsize)
    largest = [stage["weights"] + stage["activations"] for stage in (text, transformer, decode)]
    smallest = max(*largest[:2], decode["weights"] + planner.floor().peak_bytes)
    return {
        "variant": variant,
        "vae": vae,
        "width": width,
        "height": height,
        "batch": batch,
        "dtype": dtype,
        "text": text,
        "transformer": transformer,
        "decode": decode,
        "peak": max(largest),
        "smallest": smallest,
        "fits": {card: smallest + CONTEXT <= card * 2**30 for card in CARDS},
    }


def plan_decode(planner: Planner, decoder: Decoder, item: int) -> DecodePlan:
    """Return the bytes of decoding an image by each method, with weights of `item` bytes."""
    strips, whole = planner.strips(float("inf")).peak_bytes, None
    with suppress(InputError):
        whole = planner.whole().peak_bytes
    return {
        "weights": (decoder.parameters + ENCODER_PARAMETERS) * item,
        "activations": strips,
        "methods": {
            "whole": whole,
            "tiles": planner.tiles(TILES.size // DOWNSCALE, TILES.overlap // DOWNSCALE).peak_bytes,
            "strips": strips,
            "smallest": planner.floor().peak_bytes,
        },
    }


def fitting_cards(plan: MemoryPlan) -> str:
    """Return the smallest GPU that `plan` fits, as text."""
    cards = [card for card, fits in plan["fits"].items() if fits]
    return f"fits a GPU of {cards[0]} GB" if cards else f"needs more than {CARDS[-1]} GB"
