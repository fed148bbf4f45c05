"""Prompts that come encoded, by the names that diffusers' pipelines have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..checkpoints import Checkpoint, find_part
from ..checkpoints.load import config_of
from ..errors import InputError
from ..model.forward import check_mask, longest_prompt
from ..model.known_models import MAX_TOKENS, SPRINT
from ..model.reference import RULES
from ..sampling.samplers import find_sampler
from .pipeline import Request, encode_negative, load_encoder
from .plan import Embedding


class Embeds(NamedTuple):
    """Embeddings [P, T, C] and masks [P, T] of P prompts, and of the negative one, whose rows are all the same."""

    prompt_embeds: torch.Tensor | None
    prompt_attention_mask: torch.Tensor | None = None
    negative_prompt_embeds: torch.Tensor | None = None
    negative_prompt_attention_mask: torch.Tensor | None = None

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise InputError for shapes that the model of `checkpoint` does not take, and for a missing mask."""
        width = config_of(find_part(checkpoint, "transformer")).caption_channels
        for name, mask_name in (self._fields[:2], self._fields[2:]):
            embeds, mask = getattr(self, name), getattr(self, mask_name)
            if (embeds is None) != (mask is None):
                raise InputError(
                    f"{mask_name}: got one of it and {name}, expected both, as encode_prompts returns them"
                )
            if embeds is None:
                continue
            if embeds.dim() != 3 or embeds.shape[2] != width or not 0 < embeds.shape[1] <= MAX_TOKENS:
                got = list(embeds.shape)
                raise InputError(f"{name}: got the shape {got}, expected [prompts, up to {MAX_TOKENS} tokens, {width}]")
            if mask.shape != embeds.shape[:2]:
                got, expected = list(mask.shape), list(embeds.shape[:2])
                raise InputError(f"{mask_name}: got the shape {got}, expected {expected}")
            check_mask(mask_name, mask)
        negative = self.negative_prompt_embeds
        if negative is not None and not all(torch.equal(row, negative[0]) for row in negative[1:]):
            raise InputError("negative_prompt_embeds: got different rows, expected one negative prompt for all images")


def encoded_prompts(embeds: Embeds, request: Request) -> tuple[Mapping[str, Embedding], Embedding]:
    """Return {prompt of the request: embedding} and the negative embedding, on the CPU. `embeds` are checked.

    If the negative prompt is needed and missing, the first device encodes the negative prompt of the settings.
    """
    assert embeds.prompt_embeds is not None and embeds.prompt_attention_mask is not None
    settings, texts = request.settings, {}
    rows = zip(request.workload.prompts, embeds.prompt_embeds, embeds.prompt_attention_mask, strict=True)
    for name, row, mask in rows:
        length = longest_prompt(mask[None])
        texts[name] = row[None, :length].to("cpu", copy=True), mask[None, :length].cpu()
    if embeds.negative_prompt_embeds is not None and embeds.negative_prompt_attention_mask is not None:
        return texts, (embeds.negative_prompt_embeds[:1].cpu(), embeds.negative_prompt_attention_mask[:1].cpu())
    guidance = find_sampler(settings.sampler).effective_guidance(RULES[settings.reference], settings.guidance)
    if settings.sampler == SPRINT or guidance == 1:
        # The negative prompt has no pass.
        return texts, next(iter(texts.values()))
    encoder = load_encoder(request.checkpoint, request.devices[0], settings.dtype, settings.reference)
    return texts, encode_negative(encoder, settings.negative_prompt)
