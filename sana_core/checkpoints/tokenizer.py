"""Gemma's tokenizer, from a folder or from inside the text encoder's file."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import CheckpointError, MissingFileError
from ..model.text import Tokenizer
from .detect import CheckpointInfo
from .files import REDOWNLOAD, brief, read_bytes, read_json, shown
from .headers import read_tensors
from .schemas import refuse_code

PAD_TOKEN, BOS_TOKEN = 0, 2  # Gemma's
# Gemma's tokenizer.json has 34 MB
LARGEST_TOKENIZER = 200_000_000


def load_tokenizer(info: CheckpointInfo) -> Tokenizer:
    """Return the tokenizer of a text encoder: from inside its file, from its folder, or from tokenizer/ beside that.

    Raises MissingFileError where there is none, CheckpointError for one that is broken, not Gemma's, or larger than the
    text encoder's vocabulary.
    """
    tokenizer, words, name = find_tokenizer(info)
    vocabulary = info.headers["embed_tokens.weight"].shape[0]
    if words > vocabulary:
        raise CheckpointError(
            f"{name}: got {words} tokens, expected at most the text encoder's {vocabulary}; use that model's own"
        )
    return tokenizer


def find_tokenizer(info: CheckpointInfo) -> tuple[Tokenizer, int, str]:
    """Return the tokenizer, the number of its tokens, and its name for errors."""
    inside = {target: origin.name for target, origin in info.origins.items()}
    if "spiece_model" in inside:
        name = f"{info.name}: spiece_model"
        return *sentencepiece_tokenizer(stored_bytes(info, inside["spiece_model"]), name), name
    if "tokenizer_json" in inside:
        name = f"{info.name}: tokenizer_json"
        return *json_tokenizer(stored_bytes(info, inside["tokenizer_json"]), name), name
    folder = info.path.parent
    for place in (folder, folder.parent / "tokenizer"):
        for file_name, build in (("tokenizer.json", json_tokenizer), ("tokenizer.model", sentencepiece_tokenizer)):
            file = place / file_name
            if file.exists():
                check_settings(place / "tokenizer_config.json")
                return *build(read_bytes(file, LARGEST_TOKENIZER), shown(file)), shown(file)
    raise MissingFileError(
        f"{info.name}: no tokenizer in the file, and no tokenizer.json or tokenizer.model beside it; put the one of "
        "gemma-2-2b-it by Efficient-Large-Model on Hugging Face into the same folder"
    )


def check_settings(file: Path) -> None:
    """Raise CheckpointError for settings that name code of their own; whoever made them means another tokenizer."""
    if file.exists():
        refuse_code(shown(file), read_json(file))


def stored_bytes(info: CheckpointInfo, name: str) -> bytes:
    """Return a tensor of bytes from the text encoder's file. Raises CheckpointError for another tensor."""
    header = info.weights.headers[name]
    if header.dtype != torch.uint8 or len(header.shape) != 1 or header.size > LARGEST_TOKENIZER:
        raise CheckpointError(f"{info.name}: {brief(name)} is no tensor of a tokenizer's bytes; {REDOWNLOAD}")
    return read_tensors(info.weights, [name])[name].numpy().tobytes()


def json_tokenizer(content: bytes, name: str) -> tuple[Tokenizer, int]:
    """Return the tokenizer that a tokenizer.json describes, and the number of its tokens; `name` is the file's.

    The tokenizers library reads it alone: transformers would look for code beside it first. Raises CheckpointError.
    """
    from tokenizers import Tokenizer as FastTokenizer

    try:
        fast = FastTokenizer.from_str(content.decode())
        fast.no_padding()
        fast.no_truncation()
        begin = fast.encode("").ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises no kind of its own, and a panic of its Rust is no Exception
        raise CheckpointError(f"{name}: tokenizers cannot read it ({brief(error)}); {REDOWNLOAD}") from None
    check_begin(name, begin)
    tokenizer = Tokenizer(
        lambda text: fast.encode(text).ids, fast.decode, fast.token_to_id, PAD_TOKEN, "tokenizer_json", content
    )
    return tokenizer, fast.get_vocab_size()


def sentencepiece_tokenizer(content: bytes, name: str) -> tuple[Tokenizer, int]:
    """As `json_tokenizer`, for a serialised sentencepiece model, which is how single-file text encoders carry it."""
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_proto=content, add_bos=True)
        begin = processor.encode("")
    except Exception as error:
        raise CheckpointError(f"{name}: sentencepiece cannot read it ({brief(error)}); {REDOWNLOAD}") from None
    check_begin(name, begin)

    def find(token: str) -> int | None:
        found = processor.piece_to_id(token)
        return None if found == processor.unk_id() else found

    tokenizer = Tokenizer(processor.encode, processor.decode, find, PAD_TOKEN, "spiece_model", content)
    return tokenizer, processor.get_piece_size()


def check_begin(name: str, tokens: list[int]) -> None:
    """Raise CheckpointError unless `tokens`, those of an empty text, are Gemma's."""
    if tokens != [BOS_TOKEN]:
        raise CheckpointError(
            f"{name}: got tokens {brief(tokens)} for an empty text, expected Gemma's [{BOS_TOKEN}]; "
            "use gemma-2-2b-it's tokenizer"
        )
