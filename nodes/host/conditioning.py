"""Several prompts as one CONDITIONING."""

from __future__ import annotations

from typing import TYPE_CHECKING

import comfy.model_management
import torch

from .clip import encode
from .core_nodes import ENCODED

if TYPE_CHECKING:
    import comfy.sd


def encode_list(clip: comfy.sd.CLIP, prompts: list[str], instruction: bool) -> tuple[list, list[str]]:
    """Return the CONDITIONING of `prompts`, one row of embeddings each, and what was cut, a line for each cut prompt.

    A prompt has the same row in any list. Raises InputError for a CLIP that is not Gemma 2, and for characters that
    cannot be encoded.
    """
    rows, notes = [], []
    for number, prompt in enumerate(prompts, 1):
        comfy.model_management.throw_exception_if_processing_interrupted()
        ((embeds, rest),), reading = encode(clip, prompt, instruction)
        if reading.note:
            notes.append(f"prompt {number}: {reading.note}")
        rows.append((embeds, rest["attention_mask"]))
    embeds, mask = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return [[embeds, {**rest, "attention_mask": mask, ENCODED: None}]], notes
