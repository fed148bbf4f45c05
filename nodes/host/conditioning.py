"""Several prompts as one CONDITIONING."""

from __future__ import annotations

from typing import TYPE_CHECKING

import comfy.model_management
import torch

from .clip import encode

if TYPE_CHECKING:
    import comfy.sd


def encode_list(clip: comfy.sd.CLIP, prompts: list[str], instruction: bool) -> list:
    """Return the CONDITIONING of `prompts`, one row of embeddings each; a prompt has the same row in any list.

    Raises as `encode` does.
    """
    rows = []
    for prompt in prompts:
        comfy.model_management.throw_exception_if_processing_interrupted()
        ((embeds, rest),) = encode(clip, prompt, instruction)
        rows.append((embeds, rest["attention_mask"]))
    embeds, mask = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return [[embeds, {**rest, "attention_mask": mask}]]
