"""The tokenizers of Gemma, in a folder or in the text encoder's file, and of scorers.

A file gives data: a vocabulary, merges and added tokens. The steps in a file (normalizer, patterns, template, decoder)
are a program, which could fill the memory or never end for some prompt. They are not read: the steps of each family are
in this module. transformers 5 builds its tokenizers for Gemma and CLIP in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError, MissingFileError
from ..model.instruction import SPECIAL
from ..model.text import Tokenizer, checked_encode
from ..runtime.text import brief, shown
from .checkpoint import Checkpoint
from .files import REDOWNLOAD, parse_json, read_bytes, read_json
from .headers import tensor_bytes
from .schemas import Check, flag, refuse_code, same

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

PAD_TOKEN, BOS_TOKEN = 0, 2  # Gemma's
# Gemma's tokenizer.json has 34 MB and 2 million values. As Python's objects they take several times that size.
LARGEST_TOKENIZER, MOST_VALUES = 64_000_000, 2_500_000
# Added tokens. Gemma has fewer than 300.
MOST_ADDED = 2000
# Characters of a token. Gemma may write thousands of tokens, and CLIP's longest has 128 characters.
LONGEST_TOKEN = 500
# Fields of an added token.
ADDED: dict[str, Check] = {
    "content": lambda value: type(value) is str and value != "",
    "special": flag,
    "normalized": flag,
    # For each such token in a text, the library would search the text beside it.
    **dict.fromkeys(("single_word", "lstrip", "rstrip"), same(False)),
}
# sentencepiece_model.proto: the last value of a field counts, so these bytes after a model replace its settings.
# NormalizerSpec: no character map, no space before the text, all spaces stay, a space becomes U+2581
NO_CHANGES = b"\x08\x12\x00\x18\x00\x20\x00\x28\x01"
# TrainerSpec: BPE, U+2581 before a word, <unk> is decoded as " \u2047 "
BPE_SETTINGS = b"\x0d\x18\x02\xc0\x01\x00\xe2\x02\x05\x20\xe2\x81\x87\x20"
# In ModelProto: trainer_spec, normalizer_spec, denormalizer_spec
SETTINGS = b"\x12" + BPE_SETTINGS + b"\x1a" + NO_CHANGES + b"\x2a" + NO_CHANGES


def gemma_steps(fast: FastTokenizer) -> None:
    from tokenizers import decoders, normalizers

    fast.normalizer = normalizers.Replace(" ", "\u2581")
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])


def clip_steps(fast: FastTokenizer) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    words = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    split = pre_tokenizers.Split(Regex(words), "removed", invert=True)
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    one_space = normalizers.Replace(Regex(r"\s+"), " ")
    fast.normalizer = normalizers.Sequence([normalizers.NFC(), one_space, normalizers.Lowercase()])


def qwen_steps(fast: FastTokenizer) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(words), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.normalizer, fast.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Sequence([split, level])


def word_steps(fast: FastTokenizer) -> None:
    from tokenizers import normalizers, pre_tokenizers

    fast.normalizer, fast.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()


class Family(NamedTuple):
    # Set the steps of a tokenizer.
    steps: Callable[[FastTokenizer], None]
    # Arguments of the library's model, in addition to the vocabulary, the merges and the unknown token.
    options: dict[str, Any]
    # The tokens before and after each text.
    start: list[str]
    end: list[str]


# CLIP's tokens before and after each text
ENDS = ["<|startoftext|>"], ["<|endoftext|>"]
# All bytes are in the vocabulary, so no token is unknown.
QWEN = Family(qwen_steps, {"unk_token": None}, [], [])
# The type of the model in tokenizer.json, its end_of_word_suffix, and the family
FAMILIES = {
    ("BPE", ""): Family(gemma_steps, {"byte_fallback": True, "fuse_unk": True}, ["<bos>"], []),
    ("BPE", "</w>"): Family(clip_steps, {"end_of_word_suffix": "</w>"}, *ENDS),
    # The scorer of the demo model
    ("WordLevel", ""): Family(word_steps, {}, *ENDS),
}


def load_tokenizer(part: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a text encoder: from its file, its folder, or tokenizer/ beside that folder."""
    vocabulary, folder = part.headers["embed_tokens.weight"].shape[0], part.path.parent
    for target, build in (("spiece_model", sentencepiece_tokenizer), ("tokenizer_json", json_tokenizer)):
        if target in part.origins:
            content = tensor_bytes(part.weights, part.origins[target].name, LARGEST_TOKENIZER, "a tokenizer")
            return check_gemma(build(content, f"{part.name}: {target}", vocabulary), f"{part.name}: {target}")
    for place in (folder, folder.parent / "tokenizer"):
        for name, build in (("tokenizer.json", json_tokenizer), ("tokenizer.model", sentencepiece_tokenizer)):
            file, settings = place / name, place / "tokenizer_config.json"
            if file.exists():
                if settings.exists():
                    refuse_code(shown(settings), read_json(settings))
                return check_gemma(build(read_bytes(file, LARGEST_TOKENIZER), shown(file), vocabulary), shown(file))
    raise MissingFileError(
        f"{part.name}: no tokenizer in the file, and no tokenizer.json or tokenizer.model beside it; put the one of "
        "gemma-2-2b-it by Efficient-Large-Model on Hugging Face into the same folder"
    )


def load_qwen_tokenizer(part: Checkpoint) -> Tokenizer:
    """Return the tokenizer of VIBE's text encoder: from its folder, or tokenizer/ beside that folder."""
    vocabulary, folder = part.headers["language_model.embed_tokens.weight"].shape[0], part.path.parent
    for file in (folder / "tokenizer.json", folder.parent / "tokenizer" / "tokenizer.json"):
        if file.exists():
            tokenizer = json_tokenizer(read_bytes(file, LARGEST_TOKENIZER), shown(file), vocabulary, QWEN)
            missing = [token for token in SPECIAL if tokenizer.find(token) is None]
            if missing:
                raise refused(f"{shown(file)}: vocab", f"no {brief(missing[0])}", "Qwen3-VL's special tokens")
            return tokenizer
    raise MissingFileError(f"{part.name}: no tokenizer/tokenizer.json in its folder; download the folder again, whole")


def check_gemma(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """Return `tokenizer`, or raise CheckpointError if its padding token or its BOS is not Gemma's."""
    tokens = [tokenizer.find("<pad>"), *tokenizer.encode("")]
    if tokens != [PAD_TOKEN, BOS_TOKEN]:
        raise CheckpointError(
            f"{name}: got {brief(tokens)} as <pad> and an empty text, expected Gemma's [{PAD_TOKEN}, {BOS_TOKEN}]; "
            "use gemma-2-2b-it's tokenizer"
        )
    return tokenizer


def json_tokenizer(content: bytes, name: str, vocabulary: int, family: Family | None = None) -> Tokenizer:
    """Return the tokenizer of the tokenizer.json `name`. All its ids must be below `vocabulary`, the model's rows.

    `family` None: the family that the file shows.
    """
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as FastTokenizer

    values = sum(map(content.count, (b",", b"[", b"{")))
    if values > MOST_VALUES:
        raise refused(name, f"{values} values", f"at most {MOST_VALUES}")
    document = parse_json(content, name, None)
    model = document.get("model")
    model = model if isinstance(model, dict) else {}
    # Old files of CLIPs do not contain the type.
    kind, suffix = str(model.get("type", "BPE")), str(model.get("end_of_word_suffix") or "")
    family = family or FAMILIES.get((kind, suffix))
    if not family:
        raise refused(f"{name}: model", brief(f"{kind} {suffix}"), "BPE as in Gemma or CLIP, or WordLevel")
    ids, merges, added = model.get("vocab"), model.get("merges", []), document.get("added_tokens") or []
    if not (isinstance(ids, dict) and isinstance(merges, list) and isinstance(added, list)):
        got = ", ".join(type(part).__name__ for part in (ids, merges, added))
        raise refused(name, got, "an object vocab, a list of merges and a list of added_tokens")
    if len(added) > MOST_ADDED:
        raise refused(f"{name}: added_tokens", str(len(added)), f"at most {MOST_ADDED}")
    for token in added:
        if not isinstance(token, dict) or not all(check(token.get(field)) for field, check in ADDED.items()):
            raise refused(f"{name}: added_tokens", brief(token), "a text that is matched anywhere")
        # The library would choose an id for a token that is not in the vocabulary.
        if ids.setdefault(token["content"], token.get("id")) != token.get("id"):
            raise refused(f"{name}: added_tokens", brief(token), f"the vocabulary's id {brief(ids[token['content']])}")
    unknown = family.options.get("unk_token", str(model.get("unk_token")))
    for token in filter(None, (*family.start, *family.end, unknown)):
        if token not in ids:
            raise refused(f"{name}: vocab", f"no {brief(token)}", "all special tokens")
    wrong = next((value for value in ids.values() if type(value) is not int or not 0 <= value < vocabulary), None)
    if wrong is not None:
        raise refused(f"{name}: vocab", f"the id {brief(wrong)}", f"numbers below the model's {vocabulary}")
    longest = max(map(len, ids))
    if longest > LONGEST_TOKEN:
        raise refused(f"{name}: vocab", f"a token of {longest} characters", f"at most {LONGEST_TOKEN}")
    arguments = {"vocab": ids, "unk_token": unknown, **family.options}
    try:
        if kind == "BPE":
            arguments["merges"] = [tuple(pair.split(" ", 2) if isinstance(pair, str) else pair) for pair in merges]
        fast = FastTokenizer(getattr(models, kind)(**arguments))
        family.steps(fast)
        for special, add in ((True, fast.add_special_tokens), (False, fast.add_tokens)):
            tokens = [token for token in added if token["special"] is special]
            add([AddedToken(token["content"], normalized=token["normalized"], special=special) for token in tokens])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library has no exception class, and a Rust panic is no Exception
        raise CheckpointError(f"{name}: tokenizers cannot read it ({brief(error)}); {REDOWNLOAD}") from None
    start, end = ([ids[token] for token in tokens] for tokens in (family.start, family.end))
    encode = checked_encode(lambda text: [*start, *fast.encode(text).ids, *end], vocabulary, name)
    return Tokenizer(encode, fast.decode, fast.token_to_id, PAD_TOKEN, "tokenizer_json", content)


def sentencepiece_tokenizer(content: bytes, name: str, vocabulary: int) -> Tokenizer:
    """Return the tokenizer in a serialised sentencepiece model, which single-file text encoders contain."""
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_proto=content + SETTINGS, add_bos=True)
        pieces = processor.get_piece_size()
        # `decode` would fail for a piece that is not UTF-8, and `encode` without a token for BOS.
        longest = max(map(len, processor.id_to_piece(list(range(pieces)))))
        processor.encode("")
    except Exception as error:
        raise CheckpointError(f"{name}: sentencepiece cannot read it ({brief(error)}); {REDOWNLOAD}") from None
    if pieces > vocabulary:
        raise refused(name, f"{pieces} tokens", f"at most the model's {vocabulary}")
    if longest > LONGEST_TOKEN:
        raise refused(name, f"a token of {longest} characters", f"at most {LONGEST_TOKEN}")

    def find(token: str) -> int | None:
        piece_id = processor.piece_to_id(token)
        return None if piece_id == processor.unk_id() else piece_id

    def decode(ids: list[int]) -> str:
        # The model may write ids of rows that no token uses.
        return processor.decode([token for token in ids if token < pieces])

    encode = checked_encode(processor.encode, vocabulary, name)
    return Tokenizer(encode, decode, find, PAD_TOKEN, "spiece_model", content)


def refused(name: str, got: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{name}: got {got}, expected {expected}; use the model's own tokenizer, or {REDOWNLOAD}")
