"""The prompts of a long batch, some at a time: the first image comes early, and the embeddings stay few."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..errors import InputError
from ..model.text import check_characters
from .plan import Chunk

# prompts that are encoded before the first image: a CPU takes long for one, an accelerator changes models for them
FIRST_ON_CPU = 8
FIRST = 64
# each window has twice the prompts of the one before, up to 1.4 GB of embeddings of Gemma 2 in fp32
LARGEST = 512


def check_prompts(prompts: Iterable[str]) -> None:
    """Raise InputError, with the number of the prompt, for what no encoding can carry."""
    for number, prompt in enumerate(prompts, 1):
        try:
            check_characters(prompt)
        except InputError as error:
            raise InputError(f"prompt {number}: {error}") from None


def first_window(device: torch.device) -> int:
    """Return how many prompts `device` encodes before it generates."""
    return FIRST_ON_CPU if device.type == "cpu" else FIRST


def windows(chunks: Iterable[Chunk], first: int) -> Iterator[list[Chunk]]:
    """Yield the chunks in their order, `first` prompts at a time, then twice as many, and so on up to 512.

    A chunk is never divided, so what is generated together does not depend on the windows.
    """
    limit, seen = first, set[int]()
    window: list[Chunk] = []
    for chunk in chunks:
        own = {image.prompt for image in chunk}
        if window and len(seen | own) > limit:
            yield window
            limit, window, seen = min(2 * limit, LARGEST), [], set()
        window.append(chunk)
        seen |= own
    if window:
        yield window


def prompts_of(window: Iterable[Chunk], prompts: Sequence[str]) -> list[str]:
    """Return each different prompt of a window once."""
    return list(dict.fromkeys(prompts[image.prompt] for chunk in window for image in chunk))
