"""Prompts to embeddings: the last hidden states of Gemma 2, with SANA's instruction before the prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import Gemma2Model

MAX_TOKENS = 300


class Tokenizer(NamedTuple):
    """A function from text to token ids, BOS first; the id that fills up; and what it was made of."""

    encode: Callable[[str], list[int]]
    pad_token: int
    kind: str  # spiece_model or tokenizer_json: the name under which single-file text encoders hold `content`
    content: bytes


class TextEncoder(NamedTuple):
    """A tokenizer and the decoder-only language model whose last hidden states are the embeddings."""

    tokenizer: Tokenizer
    model: Gemma2Model


def instruction_text() -> str:
    """Return the instruction that SANA was trained with (SANA paper, section 3.1), as the installed diffusers has it.

    diffusers writes 'Enhanced prompt' where the original has "Enhanced prompt"; the quotes are other tokens.
    """
    from diffusers import SanaPipeline

    lines = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    return "\n".join(lines).replace("'Enhanced prompt'", '"Enhanced prompt"')


def check_characters(text: str) -> None:
    """Raise ValueError for half of a character of two, which JSON can carry and no encoding can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text: holds half a character (a lone surrogate) at position {error.start}; write the text again"
        ) from None


def tokenize(
    tokenizer: Tokenizer, prompts: list[str], instruction: bool = True, max_tokens: int = MAX_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask, both int64 [B, L], padded on the right.

    L is `max_tokens`, or with the instruction that many less 2 after the instruction's own tokens (BOS included), so
    that BOS and the last `max_tokens` - 1 positions hold the whole prompt. Raises ValueError for a longer prompt, and
    as `check_characters` does.
    """
    for prompt in prompts:
        check_characters(prompt)
    prefix, length = "", max_tokens
    if instruction:
        prefix = instruction_text()
        length = len(tokenizer.encode(prefix)) + max_tokens - 2
    tokens = [tokenizer.encode(prefix + prompt) for prompt in prompts]
    for ids in tokens:
        if len(ids) > length:
            raise ValueError(
                f"text: got {len(ids) - length + max_tokens} tokens, SANA reads at most {max_tokens}; "
                "shorten the prompt"
            )
    padded = torch.tensor([row + [tokenizer.pad_token] * (length - len(row)) for row in tokens])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in tokens])
    return padded, mask


def select_tokens(states: torch.Tensor, max_tokens: int = MAX_TOKENS) -> torch.Tensor:
    """Keep BOS and the last `max_tokens` - 1 positions of `states` [B, L, ...]; the instruction drops out."""
    return torch.cat([states[:, :1], states[:, states.shape[1] - max_tokens + 1 :]], dim=1)


def encode_prompts(
    encoder: TextEncoder, prompts: list[str], instruction: bool = True, max_tokens: int = MAX_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings [B, max_tokens, C] in the model's dtype and their mask [B, max_tokens].

    SANA wants the instruction with the positive prompt and without it the negative one. Raises ValueError for a
    prompt of more than `max_tokens` tokens.
    """
    ids, mask = (t.to(encoder.model.device) for t in tokenize(encoder.tokenizer, prompts, instruction, max_tokens))
    with torch.no_grad():
        states = encoder.model(ids, attention_mask=mask).last_hidden_state
    return select_tokens(states, max_tokens), select_tokens(mask, max_tokens)
