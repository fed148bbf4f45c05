"""Text generation with Gemma 2. SANA's text encoder is the whole of Gemma 2 except its output layer.

The output layer shares its weight with the token embedding (Gemma 2 technical report, section 2).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InputError, VersionError
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_text
from .text import LONGEST_TEXT, Tokenizer

if TYPE_CHECKING:
    from transformers import Gemma2Model

START, END = "<start_of_turn>", "<end_of_turn>"


def read_request(tokenizer: Tokenizer, text: str, template: bool = True, system: str = "") -> list[int]:
    """Return the token ids, BOS first, of a request. Gemma 2 writes its answer after them.

    With `template`, `text` becomes the user's turn of a conversation, unless it has turn tokens already. `system` is an
    instruction. Gemma 2 has no system turn, so `system` begins the user's turn.
    """
    check_text("text", text)
    check_text("system_prompt", system)
    use_template = template and not text.startswith(START)
    if system and not use_template:
        raise InputError(
            "system_prompt: got a text for a prompt without Gemma 2's template, expected none; disconnect it, "
            f"or turn on use_default_template and remove {START} from the prompt"
        )
    if use_template:
        parts = [part.strip() for part in (system, text) if part.strip()]
        text = f"{START}user\n" + "\n\n".join(parts) + f"{END}\n{START}model\n"
    if len(text) > LONGEST_TEXT:
        raise InputError(f"text: got {len(text)} characters, expected at most {LONGEST_TEXT}; shorten it")
    bos = tokenizer.encode("")
    marks = {mark: tokenizer.find(mark) for mark in (START, END)}
    ids = list(bos)
    # The marks are special tokens. sentencepiece would not recognise all of them in a text.
    for part in re.split(f"({START}|{END})", text):
        mark = marks.get(part)
        ids += tokenizer.encode(part)[len(bos) :] if mark is None else [mark]
    return ids


def stop_tokens(tokenizer: Tokenizer, model: Gemma2Model) -> set[int]:
    """Return the token ids that end a text of `model`."""
    ends = model.config.eos_token_id
    turn_end = tokenizer.find(END)
    return {*(ends if isinstance(ends, list) else [ends]), *([] if turn_end is None else [turn_end])}


def most_likely(logits: torch.Tensor, written: Sequence[int]) -> int:
    """Return the id with the largest of `logits` [V]."""
    return int(logits.argmax())


class Placement(NamedTuple):
    """Where a model computes, if its weights may be on other devices."""

    # None: the device of the embedding.
    device: torch.device | None = None
    # A function from the last hidden state to logits. None: a product with the weight of the embedding.
    head: Callable[[torch.Tensor], torch.Tensor] | None = None


WHERE_WEIGHTS_ARE = Placement()


@torch.no_grad()
def write_tokens(
    model: Gemma2Model,
    ids: Sequence[int],
    length: int,
    stop: Collection[int],
    choose: Callable[[torch.Tensor, Sequence[int]], int] = most_likely,
    report: Poll = no_poll,
    placed: Placement = WHERE_WEIGHTS_ARE,
) -> list[int]:
    """Generate at most `length` token ids after `ids`. Returns them without the final id, which is one of `stop`.

    `choose` selects an id from its logits [V], float32 on the CPU, and the ids written so far. `report` is called for
    each id, and cancels by raising. Generation also ends at the model's last position.
    """
    from transformers import DynamicCache, __version__

    room = model.config.max_position_embeddings - len(ids)
    if room < 1:
        raise InputError(f"prompt: got {len(ids)} tokens, expected fewer than {room + len(ids)}; shorten the prompt")
    weight = model.embed_tokens.weight
    try:
        cache = DynamicCache(config=model.config)
    except TypeError:
        # In older versions, the cache cannot distinguish layers with a sliding window.
        raise VersionError(
            f"transformers: got {__version__}, expected 4.56 or newer for Generate Text; update it"
        ) from None
    # transformers 5.40 removes past_key_values, which older versions read.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    written: list[int] = []
    tokens = torch.tensor([list(ids)], device=placed.device or weight.device)
    for _ in range(min(length, room)):
        states = model(tokens, use_cache=True, **{name: cache}).last_hidden_state[:, -1]
        logits = placed.head(states) if placed.head else torch.nn.functional.linear(states, weight)
        cap = model.config.final_logit_softcapping
        logits = torch.tanh(logits / cap) * cap
        token = choose(logits[0].float().cpu(), written)
        report()
        if token in stop:
            break
        written.append(token)
        tokens = tokens.new_tensor([[token]])
    return written
