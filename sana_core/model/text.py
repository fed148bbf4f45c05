"""Prompts to embeddings: the last hidden states of Gemma 2, with SANA's instruction before the prompt.

It also generates text, as a second part. SANA's text encoder is the whole of Gemma 2 except its output layer, which
shares its weight with the token embedding (Gemma 2 technical report, section 2).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import CheckpointError, InputError, VersionError
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_text, check_whole
from ..runtime.text import get_logger
from .known_models import MAX_TOKENS
from .reference import DIFFUSERS_VIDEO, NVIDIA, RULES

if TYPE_CHECKING:
    from transformers import Gemma2Model

logger = get_logger(__name__)

# Characters beyond this number are not tokenized, because that takes long. The tokens that a model reads have fewer.
LONGEST_TEXT = 100_000
# The largest motion score of a video's prompt. NVIDIA's examples have 10 to 30.
MOST_MOTION = 100
# The instruction before the prompt in SANA's training: section 3.1 of the paper, chi_prompt in NVIDIA's configurations.
INSTRUCTION = (
    "Given a user prompt, generate an {quote}Enhanced prompt{quote} that provides detailed visual descriptions "
    "suitable for image generation. Evaluate the level of detail in the user prompt:",
    "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
    "relationships to create vivid and concrete scenes.",
    "- If the prompt is already detailed, refine and enhance the existing details slightly without overcomplicating.",
    "Here are examples of how to transform or refine prompts:",
    "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
    "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.",
    "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
    "lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass "
    "skyscrapers.",
    "Please generate only the enhanced description for the prompt below and avoid including any additional "
    "commentary or evaluations:",
    "User Prompt: ",
)
# The instruction of diffusers' pipelines for SANA-Video (pipelines/sana_video/pipeline_sana_video.py).
VIDEO_INSTRUCTION = (
    INSTRUCTION[0].replace("image generation", "video generation"),
    "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, motion, and temporal "
    "relationships to create vivid and dynamic scenes.",
    *INSTRUCTION[2:4],
    "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat slowly settling into a curled position, "
    "peacefully falling asleep on a warm sunny windowsill, with gentle sunlight filtering through surrounding pots of "
    "blooming red flowers.",
    "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
    "lamps gradually lighting up, a diverse crowd of people in colorful clothing walking past, and a double-decker bus "
    "smoothly passing by towering glass skyscrapers.",
    *INSTRUCTION[6:],
)
# Users of NVIDIA's demo set the size with these marks. The demo cuts the prompt at the first one.
MARK = re.compile(r"--(?:aspect_ratio|ar|hw)")


class Tokenizer(NamedTuple):
    """Functions between text and token ids, the padding token, and the content of the tokenizer's file."""

    # Text to token ids, BOS first: a function that `checked_encode` returns.
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    # The id of a special token such as <end_of_turn>, or None.
    find: Callable[[str], int | None]
    pad_token: int
    # spiece_model or tokenizer_json: the name of `content` in single-file text encoders.
    kind: str
    content: bytes


def checked_encode(encode: Callable[[str], list[int]], vocabulary: int, name: str) -> Callable[[str], list[int]]:
    """Return `encode` for the first LONGEST_TEXT characters of a text. Ids of `vocabulary` or more are refused.

    Every tokenizer is wrapped in this. On a GPU, an id beyond the rows of the embedding would end the process.
    """

    def tokens(text: str) -> list[int]:
        ids = encode(text[:LONGEST_TEXT])
        if not all(0 <= token < vocabulary for token in ids):
            raise CheckpointError(
                f"{name}: got tokens from {min(ids)} to {max(ids)}, expected 0 to {vocabulary - 1}; use the model's "
                "own tokenizer"
            )
        return ids

    return tokens


class TextEncoder(NamedTuple):
    """A tokenizer and a language model. The last hidden states of the model are the embeddings."""

    tokenizer: Tokenizer
    model: Gemma2Model
    # The codebase whose handling of prompts is used, see reference.py.
    reference: str = NVIDIA


def instruction_text(reference: str) -> str:
    """Return the instruction of `reference` as one text. The prompt follows it.

    diffusers writes 'Enhanced prompt' where the original has "Enhanced prompt". The two quotes are different tokens.
    """
    lines = VIDEO_INSTRUCTION if reference == DIFFUSERS_VIDEO else INSTRUCTION
    return "\n".join(lines).format(quote=RULES[reference].quote)


class TokenizedPrompt(NamedTuple):
    """The token ids of a prompt."""

    # BOS first.
    ids: list[int]
    # The length to which `ids` are padded.
    length: int
    # The number of tokens of the prompt without the instruction, BOS included.
    tokens: int
    # A line for the user about the part that was cut, or "".
    note: str


def with_motion(prompt: str, score: int) -> str:
    """Return `prompt` with the end that NVIDIA's script gives to prompts of videos, as " motion score: 10.".

    A prompt that has a score keeps it. `score` is 0 to 100; 0: no score.
    """
    check_whole("motion_score", score, 0, MOST_MOTION)
    has_score = "motion score:" in prompt.lower()
    return prompt if has_score or not score else f"{prompt.strip()} motion score: {int(score)}."


def read_prompt(
    encode: Callable[[str], list[int]],
    prompt: str,
    instruction: bool = True,
    max_tokens: int = MAX_TOKENS,
    reference: str = NVIDIA,
) -> TokenizedPrompt:
    """Tokenize `prompt` as `reference` does: NVIDIA's app/sana_pipeline.py, or diffusers' SanaPipeline.

    `encode` converts text to token ids, BOS first. diffusers strips every prompt and converts it to lower case.
    NVIDIA's code strips a prompt after the instruction, and cuts it at a mark such as --ar 16:9. It does not change a
    prompt without the instruction, such as a negative prompt. Tokens beyond `max_tokens`, BOS included, are cut.
    """
    check_text("text", prompt)
    notes = []
    before, length = "", max_tokens
    lower_case = RULES[reference].lower_case
    if lower_case:
        prompt = prompt.lower().strip()
    if instruction:
        before = instruction_text(reference)
        # With this length, BOS and the last max_tokens - 1 positions contain the whole prompt. See `select_tokens`.
        length = len(encode(before)) + max_tokens - 2
        mark = None if lower_case else MARK.search(prompt)
        if mark:
            notes.append(f"everything from {prompt[mark.start() :][:20]!r} on was cut: width and height set the size")
            prompt = prompt[: mark.start()]
        prompt = prompt.strip()
    ids = encode(before + prompt)
    tokens = len(ids) - length + max_tokens
    cut = tokens - max_tokens
    if cut > 0:
        count = f"more than {cut}" if len(before + prompt) > LONGEST_TEXT else f"{cut} of {tokens}"
        notes.append(f"{count} tokens were cut: SANA reads {max_tokens}")
    return TokenizedPrompt(ids[:length], length, tokens, "; ".join(notes))


def tokenize(
    tokenizer: Tokenizer,
    prompts: list[str],
    instruction: bool = True,
    max_tokens: int = MAX_TOKENS,
    reference: str = NVIDIA,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask, both int64 [B, L], padded on the right. A prompt that is cut causes a warning.

    Without the instruction, L is `max_tokens`. With it, L is `max_tokens` - 2 plus the instruction's tokens, BOS
    included.
    """
    readings = [read_prompt(tokenizer.encode, prompt, instruction, max_tokens, reference) for prompt in prompts]
    for prompt, reading in zip(prompts, readings, strict=True):
        if reading.note:
            logger.warning("text: %s (the prompt that begins %a)", reading.note, prompt[:40])
    padded = [ids + [tokenizer.pad_token] * (length - len(ids)) for ids, length, *_ in readings]
    mask = [[1] * len(ids) + [0] * (length - len(ids)) for ids, length, *_ in readings]
    return torch.tensor(padded), torch.tensor(mask)


def select_tokens(states: torch.Tensor, max_tokens: int = MAX_TOKENS) -> torch.Tensor:
    """Return BOS and the last `max_tokens` - 1 positions of `states` [B, L, ...], without the instruction."""
    return torch.cat([states[:, :1], states[:, states.shape[1] - max_tokens + 1 :]], dim=1)


def encode_prompts(
    encoder: TextEncoder, prompts: str | list[str], instruction: bool = True, max_tokens: int = MAX_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings [B, max_tokens, C] in the model's dtype and their mask [B, max_tokens].

    SANA expects the instruction before a positive prompt, even an empty one, but not before a negative prompt. Tokens
    beyond `max_tokens` are cut, with a warning in the log. Raises InputError for characters that cannot be encoded.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    tokenized = tokenize(encoder.tokenizer, prompts, instruction, max_tokens, encoder.reference)
    ids, mask = (tensor.to(encoder.model.device) for tensor in tokenized)
    with torch.no_grad():
        states = encoder.model(ids, attention_mask=mask).last_hidden_state
    return select_tokens(states, max_tokens), select_tokens(mask, max_tokens)


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
