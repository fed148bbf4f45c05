"""What the config of a SANA transformer decides: how it is sampled."""

from __future__ import annotations

from typing import Any, NamedTuple

from .errors import InputError

# of SANA's demo and of diffusers' pipelines
GUIDANCE = 4.5
# the sampler of SANA-Sprint, which was distilled for it
SPRINT = "scm"


class Defaults(NamedTuple):
    """What SANA's authors sample a model with, besides its shift; `sampler` is a name in SAMPLERS."""

    sampler: str
    steps: int
    guidance: float


def model_defaults(config: Any) -> Defaults:
    """Return the defaults of the transformer with `config`: SANA-Sprint's or SANA's."""
    return Defaults(SPRINT, 2, GUIDANCE) if config.guidance_embeds else Defaults("flow_dpmpp_2m", 20, GUIDANCE)


def check_sampler(config: Any, name: str) -> None:
    """Raise InputError if the model with `config` and the sampler `name` are not made for each other."""
    if config.guidance_embeds and name != SPRINT:
        raise InputError(f"sampler: got {name} for a SANA-Sprint model, expected {SPRINT}; use SANA Sprint")
    if name == SPRINT and not config.guidance_embeds:
        raise InputError(
            f"sampler: got {name} for a model that is not SANA-Sprint; use SANA Sampler with flow_dpmpp_2m"
        )
