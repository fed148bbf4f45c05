"""Gemma's tokenizer, from a folder or from inside the text encoder's file, and the checks of tokenizers.

The libraries tokenizers and sentencepiece limit neither time nor memory: a short file can make them multiply a prompt
until the memory is full, which ends the process, or compare a prompt with a regular expression for hours. So a
tokenizer.json may only have the few kinds of steps that tokenizers of Gemma and CLIP have, and few of them. A
sentencepiece model may only replace characters by short texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ..errors import CheckpointError, MissingFileError
from ..model.text import Tokenizer
from ..runtime.text import Json, brief, shown
from .checkpoint import Checkpoint
from .files import REDOWNLOAD, parse_json, read_bytes, read_json
from .headers import tensor_bytes
from .schemas import refuse_code

PAD_TOKEN, BOS_TOKEN = 0, 2  # Gemma's
# Gemma's tokenizer.json has 34 MB. Python's objects of a JSON file take several times its size.
LARGEST_TOKENIZER = 64_000_000
# The kinds of steps in each section. "Sequence" contains other steps.
STEPS = {
    "normalizer": "BertNormalizer Lowercase NFC NFD NFKC NFKD Prepend Replace Sequence Strip StripAccents",
    "pre_tokenizer": "BertPreTokenizer ByteLevel Digits Metaspace Punctuation Sequence Split Whitespace",
    "post_processor": "BertProcessing ByteLevel RobertaProcessing Sequence TemplateProcessing",
    "decoder": "BPEDecoder ByteFallback ByteLevel Fuse Metaspace Replace Sequence Strip WordPiece",
}
INNER_STEPS = ("normalizers", "pretokenizers", "processors", "decoders")
# CLIP's tokenizer has 3 normalizers. Each step may double the text.
MOST_STEPS = 4
# Characters of one step or added token as JSON. A template of Gemma's has 500.
LONGEST_STEP = 2000
# Gemma has fewer than 300.
MOST_ADDED = 10_000
MODELS = ("BPE", "WordLevel")
LONGEST_AFFIX = 20
# Fields of sentencepiece_model.proto
NORMALIZERS, CHARACTER_MAP = (3, 5), 2
# The longest replacement in Unicode's NFKC has 33 bytes.
LONGEST_REPLACEMENT = 100
# \s, \p{L} and escaped punctuation, but no calls of the expression itself and no references
ESCAPE = re.compile(r"\\(?:[pP]\{\^?\w+\}|[sSdDwWnrt]|[^\w\s])", re.ASCII)


def load_tokenizer(part: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a text encoder: from its file, its folder, or tokenizer/ beside that folder."""
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
    """Return the tokenizer in the tokenizer.json `name`. The text encoder has `vocabulary` rows.

    Only the tokenizers library reads it, because transformers would first look for code beside it.
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
    except BaseException as error:  # the library has no exception class, and a Rust panic is no Exception
        raise CheckpointError(f"{name}: tokenizers cannot read it ({brief(error)}); {REDOWNLOAD}") from None
    check_tokens(name, begin, fast.get_vocab_size(), vocabulary)
    return Tokenizer(
        lambda text: fast.encode(text).ids, fast.decode, fast.token_to_id, PAD_TOKEN, "tokenizer_json", content
    )


def sentencepiece_tokenizer(content: bytes, name: str, vocabulary: int) -> Tokenizer:
    """Return the tokenizer in a serialised sentencepiece model, which single-file text encoders contain."""
    from sentencepiece import SentencePieceProcessor

    check_sentencepiece(content, name)
    try:
        processor = SentencePieceProcessor(model_proto=content, add_bos=True)
        begin = processor.encode("")
    except Exception as error:
        raise CheckpointError(f"{name}: sentencepiece cannot read it ({brief(error)}); {REDOWNLOAD}") from None
    check_tokens(name, begin, processor.get_piece_size(), vocabulary)

    def find(token: str) -> int | None:
        piece_id = processor.piece_to_id(token)
        return None if piece_id == processor.unk_id() else piece_id

    return Tokenizer(processor.encode, processor.decode, find, PAD_TOKEN, "spiece_model", content)


def check_tokens(name: str, begin: list[int], words: int, vocabulary: int) -> None:
    """Check the tokens of an empty text, `begin`, and the number of tokens, `words`."""
    if begin != [BOS_TOKEN]:
        raise CheckpointError(
            f"{name}: got tokens {brief(begin)} for an empty text, expected Gemma's [{BOS_TOKEN}]; "
            "use gemma-2-2b-it's tokenizer"
        )
    if words > vocabulary:
        raise CheckpointError(
            f"{name}: got {words} tokens, expected at most the text encoder's {vocabulary}; use that model's own"
        )


def checked_tokenizer(content: bytes, name: str) -> str:
    """Return the text of the tokenizer.json `name` for the tokenizers library."""
    document = parse_json(content, name)
    for section, kinds in STEPS.items():
        steps = list(steps_of(document.get(section), f"{name}: {section}"))
        if len(steps) > MOST_STEPS:
            raise refused(f"{name}: {section}", f"{len(steps)} steps", f"at most {MOST_STEPS}")
        for step in steps:
            check_step(step, kinds.split(), f"{name}: {section}")
    added = document.get("added_tokens")
    if isinstance(added, list):
        longest = max((len(json.dumps(token)) for token in added), default=0)
        if len(added) > MOST_ADDED or longest > LONGEST_STEP:
            got = f"{len(added)}, the longest of {longest} characters"
            raise refused(f"{name}: added_tokens", got, f"at most {MOST_ADDED} of {LONGEST_STEP} characters")
    model = document.get("model")
    if not isinstance(model, dict) or "type" in model:
        check_model(model, f"{name}: model")
        return content.decode()
    # Old files of CLIPs do not name the kind, and the library would try all kinds.
    document["model"] = {"type": "BPE", **model}
    check_model(document["model"], f"{name}: model")
    return json.dumps(document)


def steps_of(step: object, name: str) -> Iterator[Json]:
    """Yield `step` if there is one, and the steps in it."""
    if step is None:
        return
    if not isinstance(step, dict):
        raise refused(name, brief(step), "an object")
    yield {key: value for key, value in step.items() if key not in INNER_STEPS}
    for key in INNER_STEPS:
        inner = step.get(key, [])
        if not isinstance(inner, list):
            raise refused(name, f"{key}: {brief(inner)}", "a list of steps")
        for one in inner:
            yield from steps_of(one, name)


def check_step(step: Json, kinds: list[str], name: str) -> None:
    """Raise CheckpointError for a step of another kind, and for one that could multiply a text or never end."""
    kind = step.get("type")
    if kind not in kinds:
        raise refused(name, f"the step {brief(kind)}", f"one of {', '.join(kinds)}")
    if len(json.dumps(step)) > LONGEST_STEP:
        raise refused(name, f"a {kind} of {len(json.dumps(step))} characters", f"at most {LONGEST_STEP}")
    for field in ("content", "prepend"):
        if len(str(step.get(field, ""))) > 1:
            raise refused(name, f"{kind} with {field}: {brief(step[field])}", "one character")
    pattern = step.get("pattern")
    regex = pattern.get("Regex", "") if isinstance(pattern, dict) else ""
    if not is_quick(str(regex)):
        raise refused(name, f"the pattern {brief(regex)}", "one without groups and with at most two of * + ?")
    template = step.get("single")
    if isinstance(template, list) and sum("Sequence" in piece for piece in template if isinstance(piece, dict)) > 1:
        raise refused(name, "a template that repeats the text", "the text once")
    if kind == "TemplateProcessing" and not isinstance(template, list):
        raise refused(name, f"the template {brief(template)}", "a list")


def is_quick(regex: str) -> bool:
    """Whether the time to search a text for `regex` cannot grow exponentially."""
    unescaped = ESCAPE.sub("", regex)
    return not re.search(r"[(){}\\]", unescaped) and len(re.findall(r"[*+?]", unescaped)) <= 2


def check_model(model: object, name: str) -> None:
    """Raise CheckpointError for a model of another kind, random merges, and long affixes."""
    if not isinstance(model, dict) or model.get("type") not in MODELS:
        got = brief(model.get("type") if isinstance(model, dict) else model)
        raise refused(name, got, " or ".join(MODELS))
    if model.get("dropout"):
        raise refused(name, f"dropout: {brief(model['dropout'])}", "none")
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(str(model.get(field))) > LONGEST_AFFIX:
            raise refused(name, f"{field}: {brief(model[field])}", f"at most {LONGEST_AFFIX} characters")


def refused(name: str, got: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{name}: got {got}, expected {expected}, as in tokenizers of Gemma and CLIP; {REDOWNLOAD}")


def check_sentencepiece(content: bytes, name: str) -> None:
    """Raise CheckpointError for a sentencepiece model that replaces a character by a long text.

    A map of characters is the size of an index in 4 bytes, the index, and the replacements, which end with 0.
    """
    try:
        models = [spec for field, spec in protobuf_fields(content) if field in NORMALIZERS]
        maps = [value for spec in models for field, value in protobuf_fields(spec) if field == CHARACTER_MAP]
    except (IndexError, ValueError) as error:
        raise CheckpointError(f"{name}: sentencepiece cannot read it ({brief(error)}); {REDOWNLOAD}") from None
    for character_map in maps:
        replacements = character_map[4 + int.from_bytes(character_map[:4], "little") :]
        longest = max(map(len, replacements.split(b"\0")))
        if longest > LONGEST_REPLACEMENT:
            raise refused(name, f"a character replaced by {longest} bytes", f"at most {LONGEST_REPLACEMENT}")


def protobuf_fields(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and value of each field of a protobuf message. A number yields no bytes.

    Raises IndexError or ValueError for a broken message.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number is too long")

    while at < len(content):
        field, kind = divmod(varint(), 8)
        if kind == 0:
            varint()
            yield field, b""
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            if kind != 2:
                raise ValueError(f"a field has the kind {kind}")
            size = varint()
        if at + size > len(content):
            raise ValueError("a field is longer than the file")
        yield field, content[at : at + size]
        at += size
