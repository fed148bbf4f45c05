"""Released models, as far as a training plan needs them, for a plan before the download."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch

from ..decode.stages import Stages
from ..memory import Shapes, stages_of
from ..model.known_models import (
    DECODERS,
    ENCODER_PARAMETERS,
    TEXT_PARAMETERS,
    VARIANTS,
    WIDTHS,
    Architecture,
)
from ..runtime.cancellation import Poll, no_poll
from .memory_model import MemoryCounter, Report, build_transformer
from .plan import Base

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


@functools.cache
def released_shapes(model: Architecture) -> Shapes:
    """Return the shapes of a transformer's weights by diffusers' names."""
    with torch.device("meta"):
        transformer = build_transformer(model, 1024)
    return {name: tuple(parameter.shape) for name, parameter in transformer.named_parameters()}


def released_base(variant: str, poll: Poll = no_poll, report: Report | None = None) -> Base:
    """Return the released model `variant`, a name in VARIANTS, with Gemma 2 and DC-AE.

    Before a plan counts a step, it calls `poll`, which may cancel, and `report`.
    """
    decoder, model = DECODERS["dc-ae-f32c32"], VARIANTS[variant]
    parameters = decoder.parameters + ENCODER_PARAMETERS
    encoder = Stages(WIDTHS, (2, 2, 2, 3, 3, 3), 3, 2, False, True)
    counter = MemoryCounter(poll, report)
    return Base(model, released_shapes(model), None, TEXT_PARAMETERS, parameters, encoder, stages_of(decoder), counter)
