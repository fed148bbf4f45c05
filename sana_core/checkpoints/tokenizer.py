"""Gemma's tokenizer, from a folder or from inside the text encoder's file."""

from __future__ import annotations

from pathlib import Path

from ..text import Tokenizer
from .detect import CheckpointInfo
from .headers import read_tensors

PAD_TOKEN = 0  # Gemma's


def load_tokenizer(info: CheckpointInfo) -> Tokenizer:
    """Return the tokenizer of a text encoder: from inside its file, from its folder, or from tokenizer/ beside that.

    Raises FileNotFoundError where there is none.
    """
    inside = {target: origin.name for target, origin in info.origins.items()}
    if "spiece_model" in inside:
        return sentencepiece_tokenizer(read_bytes(info, inside["spiece_model"]))
    if "tokenizer_json" in inside:
        return json_tokenizer(read_bytes(info, inside["tokenizer_json"]))
    folder = info.path.parent
    for place in (folder, folder.parent / "tokenizer"):
        if (place / "tokenizer.json").is_file():
            return folder_tokenizer(place)
        if (place / "tokenizer.model").is_file():
            return sentencepiece_tokenizer((place / "tokenizer.model").read_bytes())
    raise FileNotFoundError(
        f"{info.name}: no tokenizer in the file, and no tokenizer.json or tokenizer.model beside it; put the one of "
        "gemma-2-2b-it by Efficient-Large-Model on Hugging Face into the same folder"
    )


def read_bytes(info: CheckpointInfo, name: str) -> bytes:
    return bytes(read_tensors(info.weights, [name])[name].tolist())


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that transformers loads from `folder`."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    content = (folder / "tokenizer.json").read_bytes()
    vocabulary = theirs.get_vocab()
    return Tokenizer(
        lambda text: theirs(text).input_ids,
        lambda ids: theirs.decode(ids, skip_special_tokens=True),
        vocabulary.get,
        theirs.pad_token_id,
        "tokenizer_json",
        content,
    )


def json_tokenizer(content: bytes) -> Tokenizer:
    """Return the tokenizer that the text of a tokenizer.json describes."""
    from tokenizers import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_str(content.decode())
    fast.no_padding()
    fast.no_truncation()
    return Tokenizer(
        lambda text: fast.encode(text).ids, fast.decode, fast.token_to_id, PAD_TOKEN, "tokenizer_json", content
    )


def sentencepiece_tokenizer(content: bytes) -> Tokenizer:
    """Return the tokenizer of a serialised sentencepiece model, which is how single-file text encoders carry it."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=content, add_bos=True)

    def find(token: str) -> int | None:
        found = processor.piece_to_id(token)
        return None if found == processor.unk_id() else found

    return Tokenizer(processor.encode, processor.decode, find, PAD_TOKEN, "spiece_model", content)
