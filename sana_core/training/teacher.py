"""Which models the consistency loss is for, and the model that teaches one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints import find_part, inspect_checkpoint, load_transformer
from ..checkpoints.load import build_module
from ..errors import InputError
from .settings import FLOW, Loss, Settings

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

# of a configuration, what a teacher has to have as its pupil has it
SHARED = ("in_channels", "caption_channels")


def check_loss_fits(config: Any, loss: Loss) -> None:
    """Raise InputError unless `loss` is for the transformer with `config`, and its teacher too; only headers are read.

    Raises CheckpointError or MissingFileError for a teacher that is no SANA.
    """
    if loss.kind == FLOW:
        if config.guidance_embeds:
            raise InputError(
                "model: got a SANA-Sprint model, which this loss would undo; train the SANA it came from, or in a "
                "settings file set loss.kind to consistency"
            )
        return
    if not config.guidance_embeds:
        raise InputError(
            "model: got one that is not SANA-Sprint with loss consistency, expected SANA-Sprint; set loss.kind to flow"
        )
    if not loss.teacher:
        return
    own: Any = build_module(find_part(inspect_checkpoint(loss.teacher), "transformer")).config
    if own.guidance_embeds:
        raise InputError("teacher: got a SANA-Sprint model, expected the SANA that it came from; name that")
    for name in SHARED:
        if own[name] != config[name]:
            raise InputError(
                f"teacher: got {name} {own[name]}, expected the model's {config[name]}; name the SANA it came from"
            )


def load_teacher(settings: Settings, device: torch.device) -> SanaTransformer2DModel | None:
    """Return the teacher, frozen, None where there is none. Raises as `load_transformer` does."""
    if not settings.loss.teacher:
        return None
    dtype = getattr(torch, settings.dtype)
    return load_transformer(settings.loss.teacher, device, dtype, reference=settings.reference).requires_grad_(False)
