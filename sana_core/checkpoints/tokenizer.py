"""Gemma's tokenizer, from a folder or from inside the text encoder's file."""

from __future__ import annotations

from ..errors import CheckpointError, MissingFileError
from ..model.text import Tokenizer
from ..runtime.text import brief, shown
from .checkpoint import Checkpoint
from .files import REDOWNLOAD, read_bytes, read_json
from .headers import tensor_bytes
from .schemas import refuse_code
from .tokenizer_schema import check_sentencepiece, checked_tokenizer

PAD_TOKEN, BOS_TOKEN = 0, 2  # Gemma's
# Gemma's tokenizer.json has 34 MB. Python's objects of a JSON file take several times its size.
LARGEST_TOKENIZER = 64_000_000


def load_tokenizer(part: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a text encoder: from inside its file, from its folder, or from tokenizer/ beside that.

    Raises MissingFileError where there is none, CheckpointError for one that is broken, not Gemma's, or larger than the
    text encoder's vocabulary, and for settings that name code of their own; whoever made them means another tokenizer.
    """
    vocabulary, folder = part.headers["embed_tokens.weight"].shape[0], part.path.parent
    for target, build in (("spiece_model", sentencepiece_tokenizer), ("tokenizer_json", json_tokenizer)):
        if target in part.origins:
            content = tensor_bytes(part.weights, part.origins[target].name, LARGEST_TOKENIZER, "a tokenizer")
            return build(content, f"{part.name}: {target}", vocabulary)
    for place in (folder, folder.parent / "tokenizer"):
        for name, build in (("tokenizer.json", json_tokenizer), ("tokenizer.model", sentencepiece_tokenizer)):
            file, settings = place / name, place / "tokenizer_config.json"
            if file.exists():
                if settings.exists():
                    refuse_code(shown(settings), read_json(settings))
                return build(read_bytes(file, LARGEST_TOKENIZER), shown(file), vocabulary)
    raise MissingFileError(
        f"{part.name}: no tokenizer in the file, and no tokenizer.json or tokenizer.model beside it; put the one of "
        "gemma-2-2b-it by Efficient-Large-Model on Hugging Face into the same folder"
    )


def json_tokenizer(content: bytes, name: str, vocabulary: int) -> Tokenizer:
    """Return the tokenizer that the tokenizer.json `name` describes, of a text encoder of that `vocabulary`.

    The tokenizers library reads it alone: transformers would look for code beside it first. Raises CheckpointError.
    """
    from tokenizers import Tokenizer as FastTokenizer

    text = checked_tokenizer(content, name)
    try:
        fast = FastTokenizer.from_str(text)
        fast.no_padding()
        fast.no_truncation()
        begin = fast.encode("").ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises no kind of its own, and a panic of its Rust is no Exception
        raise CheckpointError(f"{name}: tokenizers cannot read it ({brief(error)}); {REDOWNLOAD}") from None
    check_tokens(name, begin, fast.get_vocab_size(), vocabulary)
    return Tokenizer(
        lambda text: fast.encode(text).ids, fast.decode, fast.token_to_id, PAD_TOKEN, "tokenizer_json", content
    )


def sentencepiece_tokenizer(content: bytes, name: str, vocabulary: int) -> Tokenizer:
    """As `json_tokenizer`, for a serialised sentencepiece model, which is how single-file text encoders carry it."""
    from sentencepiece import SentencePieceProcessor

    check_sentencepiece(content, name)
    try:
        processor = SentencePieceProcessor(model_proto=content, add_bos=True)
        begin = processor.encode("")
    except Exception as error:
        raise CheckpointError(f"{name}: sentencepiece cannot read it ({brief(error)}); {REDOWNLOAD}") from None
    check_tokens(name, begin, processor.get_piece_size(), vocabulary)

    def find(token: str) -> int | None:
        found = processor.piece_to_id(token)
        return None if found == processor.unk_id() else found

    return Tokenizer(processor.encode, processor.decode, find, PAD_TOKEN, "spiece_model", content)


def check_tokens(name: str, begin: list[int], words: int, vocabulary: int) -> None:
    """Raise CheckpointError unless `begin`, those of an empty text, are Gemma's, and `words` no more than rows."""
    if begin != [BOS_TOKEN]:
        raise CheckpointError(
            f"{name}: got tokens {brief(begin)} for an empty text, expected Gemma's [{BOS_TOKEN}]; "
            "use gemma-2-2b-it's tokenizer"
        )
    if words > vocabulary:
        raise CheckpointError(
            f"{name}: got {words} tokens, expected at most the text encoder's {vocabulary}; use that model's own"
        )
