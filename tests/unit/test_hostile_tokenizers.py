"""Tokenizers that would fill the memory, never end or fail at a prompt, in folders of scorers and of text encoders."""

import io
import json

import pytest
import sentencepiece
import torch
from bounded import bounded
from clips import PROMPT, byte_tokenizer, save_clip
from sentencepiece.sentencepiece_model_pb2 import ModelProto

import sana_core
from sana_core.batch.best import load_scorer
from sana_core.checkpoints.tokenizer import sentencepiece_tokenizer
from sana_core.errors import CheckpointError


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def several(steps, name="normalizers"):
    return {"type": "Sequence", name: steps}


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def template(count):
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * count
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
STEPS = {
    "each letter becomes 50, five times": ("normalizer", several([replace({"String": "a"}, "a" * 50)] * 5)),
    "doubled three times": ("normalizer", several([replace({"Regex": ""}, "a")] * 3)),
    "doubled in nested steps": ("normalizer", several([several([replace({"Regex": ""}, "a")] * 2)] * 13)),
    "prefixes": ("normalizer", several([{"type": "Prepend", "prepend": "a" * 1000}])),
    "characters by a table of the file": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
    "bytes as letters": ("pre_tokenizer", several([BYTES] * 26, "pretokenizers")),
    "repeated group": ("pre_tokenizer", split("(a+)+$")),
    "two repeats": ("pre_tokenizer", split("[^q]*[^q]*q$")),
    "calls itself": ("pre_tokenizer", split(r"a\g<0>?b")),
    "the text many times": ("post_processor", template(200_000)),
    "decoded letters become 50": ("decoder", several([replace({"String": "a"}, "a" * 50)] * 5, "decoders")),
    "no step": ("normalizer", [1]),
    "a step of no kind": ("decoder", {"type": "none such"}),
    "padding": ("padding", {"strategy": {"Fixed": 10**9}}),
}


def model(**fields):
    return lambda document: document["model"].update(fields)


def added(**fields):
    token = {"id": 3, "content": "<x>", "special": True, "normalized": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": False, **fields}
    return lambda document: document.update(added_tokens=[token])


def another_id(document):
    added(content=next(iter(words(document))), id=9)(document)


def words(document):
    return document["model"]["vocab"]


DATA = {
    "all pieces of a word": (model(type="Unigram", vocab=[["<unk>", -1.0]], unk_id=0), "model: got Unigram"),
    "a model of no kind": (model(type=None), "model: got None"),
    "another suffix": (model(end_of_word_suffix="w" * 10**6), "model: got \\w+ w+"),
    "no model": (lambda document: document.update(model=5), "got NoneType, list, list"),
    "no list of merges": (model(merges="merges.txt"), "got dict, str, list"),
    "no unknown token": (model(unk_token="<none>"), "vocab: got no <none>, expected all special tokens"),
    "an unknown token that is none": (model(unk_token=None), "vocab: got no None"),
    "a large id": (
        lambda document: words(document).update(x=10**6),
        "vocab: got the id 1000000, expected",
    ),
    "a negative id": (lambda document: words(document).update(x=-1), "vocab: got the id -1"),
    "an id that is none": (lambda document: words(document).update(x=True), "vocab: got the id True"),
    "a large id of an added token": (added(id=10**6), "vocab: got the id 1000000"),
    "an added token with another id": (another_id, "added_tokens: got .*, expected the vocabulary's"),
    "a long added token": (added(content="a" * 501), "vocab: got a token of 501 characters, expected at most 500"),
    "a long word": (lambda document: words(document).update({"a" * 10**7: 3}), "vocab: got a token of 10000000 ch"),
    "an added token of no text": (added(content=""), "added_tokens: got .*, expected a text"),
    "an added token with the spaces beside it": (added(lstrip=True), "added_tokens: got .*, expected a text"),
    "many added tokens": (lambda document: document.update(added_tokens=[{}] * 2001), "added_tokens: got 2001"),
    "half a character": (lambda document: words(document).update({"\ud800": 3}), "tokenizers cannot read it"),
    "many values": (lambda document: document.update(x=[[]] * 1_250_001), r"got \d+ values, expected at most 2500000"),
}
ONLY_BPE = {
    "a merge of no pieces": (model(merges=[["a", "none such"]]), "tokenizers cannot read it .*none such"),
    "merges of three": (model(merges=["a b c"]), "tokenizers cannot read it"),
    "merges that are numbers": (model(merges=[5]), "tokenizers cannot read it"),
    "a byte of no merges": (model(merges=None), "got dict, NoneType, list"),
}


def change(file, alter):
    document = json.loads(file.read_text())
    alter(document)
    file.write_text(json.dumps(document))


@pytest.fixture
def clip(tmp_path):
    save_clip(tmp_path / "clip")
    return tmp_path / "clip"


@pytest.fixture
def byte_clip(tmp_path):
    save_clip(tmp_path / "clip", tokenizer=byte_tokenizer())
    return tmp_path / "clip"


@pytest.fixture
def part(checkpoint, tmp_path):
    """The weights of a text encoder with a tokenizer that tests change."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "text_encoder").symlink_to(checkpoint / "text_encoder")
    content = (checkpoint / "tokenizer" / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(content)
    return tmp_path / "text_encoder" / "model.safetensors"


LONG = PROMPT * 2000 + "a" * 40_000


@pytest.mark.parametrize("name", STEPS)
def test_steps_in_a_text_encoder_s_tokenizer_have_no_effect(part, tmp_path, name):
    before = sana_core.load_text_encoder(part).tokenizer
    section, value = STEPS[name]
    change(tmp_path / "tokenizer" / "tokenizer.json", lambda document: document.update({section: value}))
    with bounded():
        after = sana_core.load_text_encoder(part).tokenizer
        ids = after.encode(LONG)
        assert ids == before.encode(LONG) and after.decode(ids) == before.decode(ids) == LONG


# A step of each section, for CLIP's own tokenizer.
ONE_OF_EACH = ("prefixes", "bytes as letters", "the text many times", "decoded letters become 50", "padding")


@pytest.mark.parametrize(
    "kind, name", [("clip", name) for name in STEPS] + [("byte_clip", name) for name in ONE_OF_EACH]
)
def test_steps_in_a_scorer_s_tokenizer_have_no_effect(request, kind, name):
    folder, image = request.getfixturevalue(kind), torch.zeros(1, 3, 32, 32)
    expected = load_scorer(folder).score(image, PROMPT)
    section, value = STEPS[name]
    change(folder / "tokenizer.json", lambda document: document.update({section: value}))
    with bounded():
        scorer = load_scorer(folder)
        assert torch.equal(scorer.score(image, PROMPT), expected)
        assert scorer.score(image, LONG).isfinite().all()


@pytest.mark.parametrize("name", DATA | ONLY_BPE)
def test_hostile_data_of_a_text_encoder_s_tokenizer_is_refused(part, tmp_path, name):
    alter, message = (DATA | ONLY_BPE)[name]
    change(tmp_path / "tokenizer" / "tokenizer.json", alter)
    with bounded(), pytest.raises(CheckpointError, match=f"^tokenizer/tokenizer.json: {message}.*; .*download it"):
        sana_core.load_text_encoder(part)


def test_a_merge_of_many_pieces_does_not_fill_the_memory(part, tmp_path):
    change(tmp_path / "tokenizer" / "tokenizer.json", model(merges=[" " * 3 * 10**7]))
    with bounded(size=5 * 10**8), pytest.raises(CheckpointError, match="cannot read it .failed to extract"):
        sana_core.load_text_encoder(part)


# The data of a text encoder's tokenizer, which is BPE too, is above.
SCORERS = [("clip", name) for name in DATA] + [("byte_clip", name) for name in ONLY_BPE]


@pytest.mark.parametrize("kind, name", SCORERS)
def test_hostile_data_of_a_scorer_s_tokenizer_is_refused(request, kind, name):
    folder = request.getfixturevalue(kind)
    alter, message = (DATA | ONLY_BPE)[name]
    change(folder / "tokenizer.json", alter)
    with bounded(), pytest.raises(CheckpointError, match=f"^clip/tokenizer.json: {message}.*; .*download it again$"):
        load_scorer(folder)


@pytest.mark.parametrize("kind", ["clip", "byte_clip"])
def test_ten_megabytes_of_a_prompt_are_scored_as_their_beginning(request, kind):
    folder, image = request.getfixturevalue(kind), torch.zeros(1, 3, 32, 32)
    scorer = load_scorer(folder)
    for text in ("red house ", "x", ". "):
        with bounded(seconds=5, size=2 * 10**8):
            score = scorer.score(image, text * (10**7 // len(text)))
        assert torch.equal(score, scorer.score(image, text * 50))


def trained(**settings):
    """A sentencepiece model of Gemma's kind."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a red house", "a blue boat"] * 20),
        model_writer=model,
        vocab_size=330,
        hard_vocab_limit=False,
        byte_fallback=True,
        model_type="bpe",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
        **settings,
    )
    return ModelProto.FromString(model.getvalue())


def test_settings_in_a_sentencepiece_model_have_no_effect(tmp_path):
    (tmp_path / "rules.tsv").write_text("61\t" + "62 " * 100_000 + "\n")
    plain = {"remove_extra_whitespaces": False, "add_dummy_prefix": False}
    model = trained(normalization_rule_name="identity", **plain)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString(), add_bos=True)
    text = " A  red house \u00bd\n"
    rules = {"normalization_rule_tsv": str(tmp_path / "rules.tsv")}
    for settings in ({}, {"normalization_rule_name": "nmt_nfkc_cf"}, rules, rules | plain):
        spec = trained(**settings).normalizer_spec
        model.normalizer_spec.CopyFrom(spec)
        model.denormalizer_spec.CopyFrom(spec)
        model.trainer_spec.treat_whitespace_as_suffix = True
        model.trainer_spec.unk_surface = "?" * 1000
        content = model.SerializeToString()
        ours = sentencepiece_tokenizer(content, "tokenizer.model", 1000)
        assert ours.content == content
        ids = theirs.encode(text)
        with bounded():
            assert ours.encode(text) == ids and ours.decode(ids) == text and ours.decode([3]) == theirs.decode([3])
            assert len(ours.encode("a" * 100_000)) <= 100_001


@pytest.mark.parametrize("piece", [b"a\0b", b"\xed\xa0\x80", b"", b"z" * 10**6])
@pytest.mark.parametrize("kind", [1, 4])
def test_a_piece_that_would_end_the_process_is_refused(spiece, piece, kind):
    """Before version 0.2.2 of sentencepiece, a null character in a piece of kind 4 ended the process."""
    sizes = [bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) for size in (len(piece), len(piece) + 6)]
    content = spiece + b"\x0a" + sizes[1] + b"\x0a" + sizes[0] + piece + bytes([0x18, kind])
    with bounded(), pytest.raises(CheckpointError, match="^tokenizer.model: sentencepiece cannot read it .*; download"):
        sentencepiece_tokenizer(content, "tokenizer.model", 1000)


def test_a_sentencepiece_model_that_matches_long_texts_at_each_character_is_refused():
    model = trained()
    for count in range(1, 501):
        model.pieces.add(piece="a" * count + "b", score=0, type=model.SentencePiece.USER_DEFINED)
    with pytest.raises(CheckpointError, match="got a token of 501 characters, expected at most 500"):
        sentencepiece_tokenizer(model.SerializeToString(), "tokenizer.model", 1000)


def test_a_sentencepiece_model_without_its_token_of_bos_is_refused():
    model = trained()
    model.trainer_spec.bos_piece = "<none>"
    with pytest.raises(CheckpointError, match="^tokenizer.model: sentencepiece cannot read it .*BOS"):
        sentencepiece_tokenizer(model.SerializeToString(), "tokenizer.model", 1000)


def test_tokens_beyond_a_sentencepiece_model_are_written_as_nothing(spiece):
    """The embedding may have more rows than the tokenizer has tokens, and Gemma may choose one of them."""
    ours = sentencepiece_tokenizer(spiece, "tokenizer.model", 1000)
    ids = ours.encode("a red circle")[1:]
    assert ours.decode([*ids, 999]) == ours.decode(ids) == "a red circle"
