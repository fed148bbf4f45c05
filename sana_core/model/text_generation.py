"""Text that Gemma 2 writes, as a chat model does; SANA's text encoder is all of it but the layer over its tokens.

That layer shares its weight with the embedding of the tokens (Gemma 2 technical report, section 2).
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
from .text import Tokenizer

if TYPE_CHECKING:
    from transformers import Gemma2Model

START, END = "<start_of_turn>", "<end_of_turn>"


def read_request(tokenizer: Tokenizer, text: str, template: bool = True, system: str = "") -> list[int]:
    """Return the token ids, BOS first, of a request. Gemma 2 writes its answer behind them.

    With `template`, `text` becomes the user's turn of a conversation, unless it has turn tokens already. `system` is an
    instruction. Gemma 2 has no system turn, so `system` begins the user's turn. Raises InputError for characters that
    cannot be encoded, and for `system` without the template.
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
    bos = tokenizer.encode("")
    marks = {mark: tokenizer.find(mark) for mark in (START, END)}
    ids = list(bos)
    # they are tokens of their own, which sentencepiece would not all find in a text
    for part in re.split(f"({START}|{END})", text):
        mark = marks.get(part)
        ids += tokenizer.encode(part)[len(bos) :] if mark is None else [mark]
    return ids


def stop_tokens(tokenizer: Tokenizer, model: Gemma2Model) -> set[int]:
    """Return the ids with which a text of `model` ends."""
    ends = model.config.eos_token_id
    found = tokenizer.find(END)
    return {*(ends if isinstance(ends, list) else [ends]), *([] if found is None else [found])}


def most_likely(logits: torch.Tensor, written: Sequence[int]) -> int:
    """Return the id with the largest of `logits` [V]."""
    return int(logits.argmax())


class Placement(NamedTuple):
    """Of a model whose weights are not all where it computes: that device, and what makes logits of the last state."""

    device: torch.device | None = None
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
    """Return at most `length` token ids that `model` writes behind `ids`, without the one of `stop` that ends them.

    `choose` picks each from its logits [V], float32 on the CPU, and the ids written so far. `report` is called for
    each and cancels by raising. Raises InputError for more `ids` than the model has positions; it ends with these.
    Raises VersionError for transformers before 4.56.
    """
    from transformers import DynamicCache, __version__

    room = model.config.max_position_embeddings - len(ids)
    if room < 1:
        raise InputError(f"prompt: got {len(ids)} tokens, expected fewer than {room + len(ids)}; shorten the prompt")
    weight = model.embed_tokens.weight
    try:
        cache = DynamicCache(config=model.config)
    except TypeError:
        # older ones do not tell the cache which layers look at a window only
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
