"""Several prompts as one CONDITIONING."""

from __future__ import annotations

from typing import TYPE_CHECKING

import comfy.model_management
import torch

if TYPE_CHECKING:
    import comfy.sd


def encode_list(clip: comfy.sd.CLIP, prompts: list[str], instruction: bool) -> list:
    """Return the CONDITIONING of `prompts`, one row of embeddings each; a prompt has the same row in any list.

    Raises ValueError for a prompt of more than 300 tokens.
    """
    rows = []
    for prompt in prompts:
        comfy.model_management.throw_exception_if_processing_interrupted()
        ((embeds, rest),) = clip.encode_from_tokens_scheduled(clip.tokenize(prompt, instruction=instruction))
        rows.append((embeds, rest["attention_mask"]))
    embeds, mask = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return [[embeds, {**rest, "attention_mask": mask}]]
