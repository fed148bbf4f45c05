"""Broken and hostile tokenizers, each in a process: they encode some prompts, or one line names the file."""

import json
import sys

import layouts
import pytest
import torch
from bounded import bounded
from clips import byte_tokenizer, save_clip
from forked import Forked
from hypothesis import given
from hypothesis import strategies as st
from mutations import NUMBERS, VALUES, changed_bytes, changed_json, with_file
from small import BUNDLED

import sana_core
from sana_core.batch.best import load_scorer
from sana_core.checkpoints.tokenizer import SETTINGS

PROMPTS = ["", "a red house", "\u2581 \0\u0130e\u0301 \U0001f3d4<bos><|endoftext|>\n\n", "a" * 200_000, "q ." * 70_000]
REGEX = st.sampled_from(["(a+)+$", "[^q]*[^q]*q$", "", "a{1,99999}", r"a\g<0>?b", "("])
PATTERN = REGEX.map(lambda regex: {"Regex": regex}) | st.sampled_from([{"String": ""}, {"String": "a"}])
REPLACE = st.builds(lambda pattern, text: {"type": "Replace", "pattern": pattern, "content": text}, PATTERN, st.text())
SPLIT = PATTERN.map(lambda pattern: {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
OTHER = st.sampled_from(["NFKD", "ByteLevel", "Metaspace", "Precompiled", "WordPiece", "BertNormalizer", "none such"])
STEP = REPLACE | SPLIT | OTHER.map(lambda kind: {"type": kind}) | VALUES
LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
SEVERAL = st.builds(lambda name, steps: {"type": "Sequence", name: steps}, st.sampled_from(LISTS), st.lists(STEP))
# Letters, marks, surrogates and pieces that the prompts contain.
PIECE = st.sampled_from(["", " ", "a", "\u2581", "\u2581a", "<bos>", "<unk>", "\ud800", "aa" * 400]) | st.text(
    max_size=9
)
FIELD = st.sampled_from(
    ["type", "unk_token", "end_of_word_suffix", "continuing_subword_prefix", "dropout", "fuse_unk", "byte_fallback"]
)
MODELS = st.sampled_from(["BPE", "WordLevel", "WordPiece", "Unigram", "</w>", "<unk>", "##", None, True, 0.5])
FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")


@st.composite
def hostile_json(draw, content: bytes) -> bytes:
    """The tokenizer.json `content` with other steps, words, merges, tokens and fields of the model."""
    document = json.loads(content)
    model, added = document["model"], document["added_tokens"]
    for _ in range(draw(st.integers(1, 4))):
        match draw(st.sampled_from(("steps", "word", "missing", "merges", "token", "flag", "model", "top"))):
            case "steps":
                section = draw(st.sampled_from(["normalizer", "pre_tokenizer", "post_processor", "decoder"]))
                document[section] = draw(STEP | SEVERAL)
            case "word":
                word = draw(st.sampled_from(sorted(model["vocab"])) | PIECE) if model["vocab"] else draw(PIECE)
                model["vocab"][word] = draw(NUMBERS | VALUES | st.integers(0, 800))
            case "missing" if model["vocab"]:
                # The first words are the special tokens, and the next ones are bytes.
                del model["vocab"][draw(st.sampled_from(list(model["vocab"])[:40]))]
            case "merges":
                pair = st.lists(PIECE, min_size=2, max_size=2) | st.builds("{} {}".format, PIECE, PIECE) | VALUES
                pairs = draw(st.lists(pair, max_size=4))
                model["merges"] = draw(
                    st.sampled_from([pairs, [*(model.get("merges") or []), *pairs], None, "merges.txt"])
                )
            case "token":
                token = {"content": draw(PIECE), "id": draw(NUMBERS | st.integers(0, 800))}
                added.append(token | {flag: draw(st.booleans()) for flag in FLAGS})
            case "flag" if added:
                draw(st.sampled_from(added))[draw(st.sampled_from([*FLAGS, "id", "content"]))] = draw(VALUES)
            case "model":
                model[draw(FIELD)] = draw(MODELS | PIECE)
            case "top":
                document[draw(st.sampled_from(["truncation", "padding", "version", "added_tokens"]))] = draw(VALUES)
                break
    return json.dumps(document).encode()


def field(number, value):
    """A field of a protobuf message that contains `value`, as sentencepiece models do."""
    size, length = b"", len(value)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + value


@st.composite
def hostile_sentencepiece(draw, content: bytes) -> bytes:
    """The model `content` with further pieces, settings and maps of characters."""
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            piece = draw(PIECE.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=9))
            kind = draw(st.integers(0, 7))
            content += field(1, field(1, piece) + b"\x15" + draw(st.binary(min_size=4, max_size=4)) + bytes([24, kind]))
        else:
            inner = field(draw(st.integers(1, 15)), draw(st.binary(max_size=40)))
            content += field(draw(st.integers(2, 5)), inner + SETTINGS[draw(st.integers(0, 30)) :])
    return content


def apart(action):
    """Run `action` in a process of its own, and raise its SanaError."""

    def work():
        with bounded():
            try:
                action()
            except sana_core.SanaError as error:
                sys.stdout.write(str(error))
                return 1

    process = Forked(work)
    written, trouble = process.communicate()
    assert process.returncode in (0, 1) and not trouble, (process.returncode, trouble)
    if process.returncode:
        raise sana_core.SanaError(written)


def encode(folder):
    encoder = sana_core.load_text_encoder(folder)
    for prompt in PROMPTS:
        sana_core.encode_prompts(encoder, prompt, instruction=False, max_tokens=20)
    encoder.tokenizer.decode(list(range(800)))


@given(data=st.data())
def test_tokenizers_of_text_encoders(survives, folder, data):
    file = folder / "tokenizer" / "tokenizer.json"
    content = file.read_bytes()
    changed = data.draw(hostile_json(content) | changed_bytes(content) | changed_json(json.loads(content)))
    with_file(file, changed, survives, lambda: apart(lambda: encode(folder)), "tokenizer.json")


@given(content=changed_json(json.loads((BUNDLED / "tokenizer" / "tokenizer_config.json").read_bytes())))
def test_settings_of_tokenizers(survives, folder, content):
    file = folder / "tokenizer" / "tokenizer_config.json"
    with_file(file, content, survives, lambda: sana_core.load_text_encoder(folder), "tokenizer_config.json")


@given(data=st.data())
def test_sentencepiece_models(survives, tmp_path_factory, spiece, data):
    folder = tmp_path_factory.getbasetemp() / "spiece"
    file = folder / "gemma.safetensors"
    if not folder.exists():
        layouts.save(layouts.gemma(vocabulary=610).state_dict(), file)
    (folder / "tokenizer.model").write_bytes(data.draw(hostile_sentencepiece(spiece) | changed_bytes(spiece)))
    survives(lambda: apart(lambda: encode(file)), "tokenizer.model")


@pytest.fixture(scope="module")
def byte_clip(tmp_path_factory):
    """A CLIP with a tokenizer of CLIP's kind."""
    folder = tmp_path_factory.mktemp("scorers") / "clip"
    save_clip(folder, tokenizer=byte_tokenizer())
    return folder


@given(data=st.data())
def test_tokenizers_of_scorers(survives, clip, byte_clip, data):
    folder = data.draw(st.sampled_from([clip, byte_clip]))
    file = folder / "tokenizer.json"
    content = file.read_bytes()
    changed = data.draw(hostile_json(content) | changed_bytes(content) | changed_json(json.loads(content)))

    def score():
        scorer = load_scorer(folder)
        for prompt in PROMPTS:
            assert scorer.score(torch.zeros(1, 3, 32, 32), prompt).isfinite().all()

    with_file(file, changed, survives, lambda: apart(score), "tokenizer.json")
