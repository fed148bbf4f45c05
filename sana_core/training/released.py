"""Released models, as far as a training plan needs them, for a plan before the download."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..decode.stages import Stages
from ..memory import Shapes, stages_of
from ..model.known_models import (
    CROSS_HEADS,
    DECODERS,
    ENCODER_PARAMETERS,
    HEAD_DIM,
    TEXT_PARAMETERS,
    VARIANTS,
    WIDTHS,
    Architecture,
)
from .plan import Base

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

# Names of NVIDIA's repositories: the pattern, and the variant in VARIANTS.
NAMES = (
    (re.compile(r"Sana_600M_"), "0.6B"),
    (re.compile(r"Sana_1600M_"), "1.6B"),
    (re.compile(r"SANA1\.5_(1\.6B|4\.8B)_"), "1.5-{}"),
    (re.compile(r"Sana_Sprint_(0\.6B|1\.6B)_"), "sprint-{}"),
)


def released_variant(path: str) -> str | None:
    """Return the variant of the released model that has the name of this file or folder, None for another name."""
    for pattern, variant in NAMES:
        if match := pattern.match(Path(path).name):
            return variant.format(*match.groups())
    return None


def build_transformer(model: Architecture, pixels: int) -> SanaTransformer2DModel:
    """Return a transformer with random weights, for images of `pixels`."""
    from diffusers import SanaTransformer2DModel

    heads = CROSS_HEADS.get(model.width, model.width // HEAD_DIM)
    # The released model of 4096 px has a position embedding.
    large = {"interpolation_scale": 2.0, "sample_size": 128} if pixels > 2048 else {}
    return SanaTransformer2DModel(
        num_attention_heads=model.width // HEAD_DIM,
        num_layers=model.layers,
        num_cross_attention_heads=heads,
        cross_attention_head_dim=model.width // heads,
        cross_attention_dim=model.width,
        qk_norm="rms_norm_across_heads" if model.qk_norm else None,
        guidance_embeds=model.guidance_embeds,
        **large,
    )


@functools.cache
def released_shapes(model: Architecture) -> Shapes:
    """Return the shapes of a transformer's weights by diffusers' names."""
    with torch.device("meta"):
        transformer = build_transformer(model, 1024)
    return {name: tuple(parameter.shape) for name, parameter in transformer.named_parameters()}


def released_base(variant: str) -> Base:
    """Return the released model `variant`, a name in VARIANTS, with Gemma 2 and DC-AE."""
    decoder, model = DECODERS["dc-ae-f32c32"], VARIANTS[variant]
    parameters = decoder.parameters + ENCODER_PARAMETERS
    encoder = Stages(WIDTHS, (2, 2, 2, 3, 3, 3), 3, 2, False, True)
    return Base(model, released_shapes(model), None, TEXT_PARAMETERS, parameters, encoder, stages_of(decoder))
