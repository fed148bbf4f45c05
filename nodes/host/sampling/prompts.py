"""Prompts inside the host. Values that depend only on prompts are computed once per sampling, in its first step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from uuid import UUID

import comfy.conds
import torch

from ....sana_core.errors import InputError
from ....sana_core.model.block import Constants, Perturbation
from ....sana_core.model.forward import prepare
from ....sana_core.model.known_models import is_video
from ....sana_core.sampling.guidance import PerturbedAttention
from ....sana_core.video import forward as video


class Prompt:
    """One conditioning of a sampling: embeddings [R, T, C] and mask [R, T], for one image or for R images.

    ComfyUI creates a Prompt for each sampling and deletes it afterwards, together with its cached constants. `keep`
    is False if hooks may change the weights between steps. Then the constants are not cached.
    """

    def __init__(self, field: str, embeds: torch.Tensor, mask: torch.Tensor | None, keep: bool) -> None:
        self.embeds = embeds
        self.mask = torch.ones(embeds.shape[:2], device=embeds.device) if mask is None else mask
        if self.mask.shape != embeds.shape[:2]:
            raise InputError(
                f"{field}: got a mask of shape {list(self.mask.shape)} for embeddings of shape {list(embeds.shape)}; "
                "SANA cannot join prompts, write one text"
            )
        self.field, self.keep = field, keep
        self.perturbed: PerturbedAttention | None = None
        self.copies: dict[PerturbedAttention | Prompt, Prompt] = {}
        self.constants: dict[tuple[object, ...], tuple[Constants, Perturbation | None]] = {}

    @cached_property
    def tokens(self) -> int:
        """The number of unmasked tokens of the longest row. Cached, because reading it waits for the device."""
        return int((self.mask != 0).sum(1).max())

    def perturb(self, attention: PerturbedAttention) -> Prompt:
        """Return this prompt for passes with perturbed attention, the same object each time."""
        if attention not in self.copies:
            self.copies[attention] = Prompt(self.field, self.embeds, self.mask, self.keep)
            self.copies[attention].perturbed = attention
        return self.copies[attention]

    def masked_like(self, other: Prompt) -> Prompt:
        """Return this prompt with the mask of `other`, the same object each time."""
        if other not in self.copies:
            count = max(len(self.embeds), len(other.embeds))
            embeds, mask = self.rows(count)[0], other.rows(count)[1]
            mask = torch.nn.functional.pad(mask, (0, embeds.shape[1] - mask.shape[1]))
            self.copies[other] = Prompt(self.field, embeds, mask, self.keep)
        return self.copies[other]

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings and mask of `count` images, repeated in turn as ComfyUI repeats a batch."""
        index = torch.arange(count, device=self.embeds.device) % len(self.embeds)
        return self.embeds[index], self.mask[index]


class PromptBatch:
    """The prompts of one call of the model. Each prompt has the same number of images."""

    # ComfyUI's id of the LoRAs that are merged into the weights. `SanaModel.apply_model` sets it for each call.
    weights: UUID | None = None

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts

    def to(self, device: torch.device) -> PromptBatch:
        """Return self. ComfyUI calls this, but `constants` already uses the device of the latents."""
        return self

    @torch.compiler.disable
    def constants(self, transformer: torch.nn.Module, x: torch.Tensor) -> tuple[Constants, Perturbation | None]:
        """Return the constants for `x` [B, 32, h, w] or [B, C, T, h, w].

        They are computed for the first call with these prompts, that transformer, its weights and that shape. One
        sampling may call several models: nodes of other packs refine with a second one, or guide with a worse one.
        """
        # A dead reference equals no other one. An id could belong to a later prompt.
        key = (*map(weakref.ref, self.prompts), transformer, self.weights, tuple(x.shape), x.device, x.dtype)
        cache = self.prompts[0].constants
        if key in cache:
            return cache[key]
        embeds, mask, perturbation = self.inputs(x)
        prepare_prompts = video.prepare if is_video(transformer.config) else prepare
        prepared = prepare_prompts(transformer, embeds, mask, *x.shape[2:]), perturbation
        if all(prompt.keep for prompt in self.prompts):
            cache[key] = prepared
        return prepared

    def inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Perturbation | None]:
        """Return embeddings [P, T, C] and mask [P, T] for `x` [B, 32, h, w], and where attention is perturbed."""
        images = len(x) // len(self.prompts)
        # All images of a prompt share one row of keys and values, unless a prompt has a row for each image.
        count = 1 if all(len(prompt.embeds) == 1 for prompt in self.prompts) else images
        longest = max(prompt.embeds.shape[1] for prompt in self.prompts)
        rows = [prompt.rows(count) for prompt in self.prompts]
        pads = [(0, longest - mask.shape[1]) for _, mask in rows]
        embeds = torch.cat(
            [torch.nn.functional.pad(part, (0, 0, *pad)).to(x) for (part, _), pad in zip(rows, pads, strict=True)]
        )
        mask = torch.cat([torch.nn.functional.pad(part, pad).to(x) for (_, part), pad in zip(rows, pads, strict=True)])
        attention = next((prompt.perturbed for prompt in self.prompts if prompt.perturbed), None)
        perturbation = None
        if attention:
            flags = torch.tensor([prompt.perturbed is not None for prompt in self.prompts], device=x.device)
            perturbation = Perturbation(flags.repeat_interleave(images)[:, None, None], attention.blocks)
        return embeds, mask, perturbation


class PromptCondition(comfy.conds.CONDRegular):
    """A Prompt as a condition that ComfyUI can batch. The model gets a PromptBatch."""

    def process_cond(self, batch_size: int, **kwargs) -> PromptCondition:
        return self

    def can_concat(self, other: PromptCondition) -> bool:
        return True

    def concat(self, others: list[PromptCondition]) -> PromptBatch:
        return PromptBatch([self.cond, *(other.cond for other in others)])

    def size(self) -> list[int]:
        return list(self.cond.embeds.shape)
