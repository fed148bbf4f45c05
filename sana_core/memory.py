"""Predicts the memory of generating an image, stage by stage, before anything is loaded.

Weights are counted from the configurations of the published models. Activations are counted in maps of the model's
width. benchmarks/memory.json compares them with measurements on a CPU, tests/unit/test_sampling_memory.py with the
tensors of the released models on an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypedDict

import torch

from .decode.plan import Planner
from .decode.run import TILES
from .decode.stages import Stages
from .errors import InputError
from .model.instruction import MOST_PIXELS, PATCH
from .model.known_models import (
    DECODERS,
    ENCODER_PARAMETERS,
    GPU_SIZES,
    INSTRUCTION_PARAMETERS,
    MAX_TOKENS,
    POSITIONED,
    TEXT_HIDDEN,
    TEXT_PARAMETERS,
    TEXT_WIDTH,
    VARIANTS,
    VIBE,
    WIDTHS,
    Architecture,
    Decoder,
)
from .model.latents import CHANNELS, DOWNSCALE, latent_shape
from .runtime.checks import check_name, check_whole


class StagePlan(TypedDict):
    weights: int
    activations: int


class DecodePlan(StagePlan):
    # Activations of each method. None: the method cannot decode this size.
    methods: Mapping[str, int | None]


class MemoryPlan(TypedDict):
    """The fields that the results of `plan_memory` and `plan_video` share."""

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
    """The result of `plan_memory`."""

    vae: str
    # VIBE only: the encode of the image to edit.
    encode: DecodePlan | None


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Bytes of a GPU that the driver and the kernels use.
CONTEXT = 600 * 10**6
INSTRUCTION_TOKENS = 280
# The most patches of an image that Qwen3-VL reads. Elements that each patch has alive at once in the dtype of the model
# (15 maps of the vision tower's width), and bytes in fp32 (the values of a patch, 3.5 times).
READ_PATCHES, READ_ELEMENTS, READ_BYTES = MOST_PIXELS // PATCH**2, 15 * 1024 + 200, 3.5 * 1536 * 4
ENCODER_STAGES = Stages(WIDTHS, (2, 2, 2, 3, 3, 3), 3, 2, False, True)
# Maps [batch, positions, width] that are alive at once in a block, including the gated feed-forward's. The first number
# is for a CPU, the second for an accelerator with the fused kernels (without them it is 13.2).
MAPS, FUSED_MAPS = 12.0, 10.5
# In bf16 a CPU has fewer maps, but also a reordered copy of the block's largest weight.
MAPS_BESIDE_WEIGHT = 7.3
# Bytes of small tensors and of the rounding by the allocator, on a CPU and on an accelerator.
FIXED, FUSED_FIXED = 4_300_000, 2_700_000


class Passes(NamedTuple):
    """Forwards of the transformer for each image in a step. They run as one batch.

    Guidance needs one pass without the prompt and one with it. Perturbed attention (PAG) adds a pass, and so does the
    image guidance of an edit.
    """

    computed: int
    # Passes whose keys and values are in memory at the same time.
    cached: int


GUIDED = Passes(2, 2)
# Guidance with an interval, and PAG.
MOST_PASSES = Passes(3, 5)


def count_passes(
    guidance: float | None,
    perturbed: bool,
    interval: tuple[float, float] = (0.0, 1.0),
    image_guided: bool = False,
) -> Passes:
    """Return the passes of a step. `guidance` None: the model's default. `interval`: where guidance acts, as shares."""
    guided = (1 + image_guided) * (guidance != 1)
    computed = guided + 1 + perturbed
    if not guided or interval == (0.0, 1.0):
        return Passes(computed, computed)
    # Steps outside of the interval do not compute the passes without a prompt, so their batch is smaller. The keys and
    # values of both batches stay in memory until the last step.
    return Passes(computed, computed + computed - guided)


def is_image_guided(model: Architecture, image_guidance: float | None = None) -> bool:
    """Whether a step has the pass without an image. None: the model's default, which is above 1 for VIBE."""
    return model.edits and (image_guidance is None or image_guidance > 1)


def count(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def transformer_parameters(model: Architecture) -> int:
    width, hidden = model.width, 5 * model.width // 2
    # A linear layer from the width to the width, with bias.
    square = width**2 + width
    # The scale-shift table and the two attentions of a block with their norms. One attention has no bias for query, key
    # and value.
    block = 6 * width + (8 * square - 3 * width) + 4 * width * model.qk_norm
    # The feed-forward of the block.
    block += 2 * hidden * (width + 1) + 2 * hidden * (9 + 1) + hidden * width
    # Distilled models embed the guidance like the time.
    embedders = (2 if model.guidance_embeds else 1) * ((256 + 1) * width + square) + 6 * square
    captions = (TEXT_WIDTH + 1) * width + square + width
    ends = (CHANNELS * (1 + model.edits) + 1) * width + 2 * width + (width + 1) * CHANNELS
    return model.layers * block + embedders + captions + ends


def quantised_parameters(model: Architecture) -> int:
    """Return the number of weights that *quantise* of SANA Loader stores in one byte.

    They are the products of the attentions and of the feed-forward in every block, without biases.
    """
    return model.layers * (8 * model.width**2 + 3 * (5 * model.width // 2) * model.width)


def quantised_bytes(model: Architecture, dtype: str) -> int:
    """Return the bytes of a transformer that is quantised to int8 or fp8 and otherwise has `dtype`."""
    quantised = quantised_parameters(model)
    return quantised + (transformer_parameters(model) - quantised) * DTYPES[dtype].itemsize


def stages_of(decoder: Decoder) -> Stages:
    return Stages(decoder.widths, decoder.layers, decoder.local, decoder.scales, decoder.shuffles)


def text_bytes(batch: int, item: int) -> int:
    """Return the bytes of encoding `batch` prompts with the instruction, in addition to Gemma 2's weights."""
    tokens = MAX_TOKENS + INSTRUCTION_TOKENS
    return batch * tokens * (6 * TEXT_WIDTH + 3 * TEXT_HIDDEN + 8 * tokens) * item


def transformer_bytes(
    model: Architecture,
    height: int,
    width: int,
    batch: int,
    dtype: torch.dtype,
    accelerator: bool,
    prompts: int = 1,
    passes: Passes = GUIDED,
) -> int:
    """Return the bytes of a step in addition to the weights.

    `height` and `width` are the sides of the latents. `prompts` is the number of different prompts of the images.
    `passes` is ignored for distilled models, which have one pass.
    """
    if model.guidance_embeds:
        passes = Passes(1, 1)
    item = dtype.itemsize
    # Images of one prompt share its keys and values. If any image has another prompt, all images have copies of theirs.
    prompt_rows = passes.cached * (1 if prompts == 1 else batch)
    keys_and_values = 2 * model.layers * prompt_rows * MAX_TOKENS * model.width * item
    rows = passes.computed * batch
    # The scale-shift table of each block with six vectors, its sum with the time of each row, and the embedded time.
    modulation = ((rows + 1) * 6 * model.layers + 7 * rows) * model.width * item
    latents = rows * CHANNELS * (1 + model.edits) * height * width * item
    unit = rows * height * width * model.width * item
    block = (FUSED_MAPS if accelerator else MAPS) * unit
    if dtype == torch.bfloat16 and not accelerator:
        block = max(block, MAPS_BESIDE_WEIGHT * unit + 5 * model.width**2 * item)
    # Models for 2K and more have a position embedding, in fp32. It is not part of the weights.
    position = height * width * model.width * 4 if max(height, width) >= POSITIONED // DOWNSCALE else 0
    fixed = FUSED_FIXED if accelerator else FIXED
    return int(block) + keys_and_values + modulation + latents + position + fixed


def plan_memory(
    variant: str,
    width: int,
    height: int,
    batch: int = 1,
    dtype: str = "bfloat16",
    accelerator: bool = True,
    vae: str = "dc-ae-f32c32",
    prompts: int = 1,
    pag: bool = False,
    image_guidance: float | None = None,
) -> ImagePlan:
    """Return the bytes of each stage of generating `batch` images of `width` x `height` pixels together.

    `prompts` is the number of different prompts of the images, `vae` decodes them. With `pag`, perturbed attention
    adds a pass to each step, and so does VIBE's `image_guidance` above 1. None: the model's default.

    The activations of "decode" belong to the method "auto". "peak" is the largest stage with its weights, if the other
    weights are not on the GPU. "smallest" is the same with the smallest decode. "fits" is whether GPUs of 4 to 24 GiB
    have that much.

    Raises InputError for an unknown variant, dtype or VAE, for numbers out of range, and for image guidance of another
    model than VIBE.
    """
    check_name("variant", variant, VARIANTS)
    check_name("dtype", dtype, DTYPES)
    check_name("vae", vae, DECODERS)
    model, kind = VARIANTS[variant], DTYPES[dtype]
    decoder = DECODERS[vae]
    _, _, rows, columns = latent_shape(width, height, batch)
    check_whole("prompts", prompts, 1, batch)
    if image_guidance is not None and not model.edits:
        raise InputError(f"image_guidance: got it for {variant}, expected {VIBE.name}; leave it out")
    passes = count_passes(None, pag, image_guided=is_image_guided(model, image_guidance))
    text: StagePlan = {"weights": TEXT_PARAMETERS * kind.itemsize, "activations": text_bytes(batch, kind.itemsize)}
    if model.edits:
        activations = int(READ_PATCHES * (READ_ELEMENTS * kind.itemsize + READ_BYTES))
        text = {"weights": INSTRUCTION_PARAMETERS * kind.itemsize, "activations": activations}
    transformer: StagePlan = {
        "weights": transformer_parameters(model) * kind.itemsize,
        "activations": transformer_bytes(model, rows, columns, batch, kind, accelerator, prompts, passes),
    }
    planner = Planner(stages_of(decoder), rows, columns, kind, accelerator)
    decode = plan_decode(planner, decoder, kind.itemsize)
    encoder = Planner(ENCODER_STAGES, rows, columns, kind, accelerator)
    encode = plan_decode(encoder, decoder, kind.itemsize) if model.edits else None
    pixels = [stage for stage in (encode, decode) if stage is not None]
    largest = [stage["weights"] + stage["activations"] for stage in (text, transformer, *pixels)]
    smallest = max(*largest[:2], *(stage["weights"] + (stage["methods"]["smallest"] or 0) for stage in pixels))
    return {
        "variant": variant,
        "vae": vae,
        "width": width,
        "height": height,
        "batch": batch,
        "dtype": dtype,
        "text": text,
        "transformer": transformer,
        "encode": encode,
        "decode": decode,
        "peak": max(largest),
        "smallest": smallest,
        "fits": {size: smallest + CONTEXT <= size * 2**30 for size in GPU_SIZES},
    }


def plan_decode(planner: Planner, decoder: Decoder, item: int) -> DecodePlan:
    """Return the bytes of decoding an image by each method, or of encoding it, with weights of `item` bytes."""
    strips, undivided = planner.strips(float("inf")).peak_bytes, None
    with suppress(InputError):
        undivided = planner.whole().peak_bytes
    methods = {"whole": undivided}
    if not planner.stages.encodes:
        methods["tiles"] = planner.tiles(TILES.size // DOWNSCALE, TILES.overlap // DOWNSCALE).peak_bytes
    methods |= {"strips": strips, "smallest": planner.floor().peak_bytes}
    weights = (decoder.parameters + ENCODER_PARAMETERS) * item
    return {"weights": weights, "activations": strips, "methods": methods}


def fitting_cards(plan: MemoryPlan) -> str:
    """Return the smallest GPU that `plan` fits, as text."""
    sizes = [size for size, fits in plan["fits"].items() if fits]
    return f"fits a GPU of {sizes[0]} GB" if sizes else f"needs a GPU of more than {GPU_SIZES[-1]} GB"
