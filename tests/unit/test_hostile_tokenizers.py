"""Files tokenizer.json that would fill the memory or never end, in folders of scorers and of text encoders."""

import io
import json
import re

import pytest
import sentencepiece
import torch
from bounded import bounded
from clips import PROMPT, save_clip
from tokenizers import Tokenizer
from transformers import CLIPTokenizer, GemmaTokenizer

import sana_core
from sana_core.batch.scorer import load_scorer
from sana_core.checkpoints.tokenizer import check_sentencepiece, checked_tokenizer, sentencepiece_tokenizer
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
HOSTILE = {
    "each letter becomes 50, five times": ("normalizer", several([replace({"String": "a"}, "a" * 50)] * 5)),
    "doubled 26 times": ("normalizer", several([replace({"Regex": ""}, "a")] * 26)),
    "doubled in nested steps": ("normalizer", several([several([replace({"Regex": ""}, "a")] * 2)] * 13)),
    "prefixes": ("normalizer", several([{"type": "Prepend", "prepend": "a" * 1000}])),
    "bytes as letters": ("normalizer", several([{"type": "ByteLevel"}] * 3)),
    "characters by a table of the file": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
    "bytes as letters again": ("pre_tokenizer", several([BYTES] * 26, "pretokenizers")),
    "repeated group": ("pre_tokenizer", split("(a+)+$")),
    "many repeats": ("pre_tokenizer", split("a*a*a*a*b")),
    "calls itself": ("pre_tokenizer", split(r"a\g<0>?b")),
    "counted repeats": ("normalizer", replace({"Regex": "a{1,99999}"}, "b")),
    "the text many times": ("post_processor", template(200_000)),
    "the text twice": ("post_processor", several([template(2)] * 3, "processors")),
    "decoded letters become 50": ("decoder", several([replace({"String": "a"}, "a" * 50)] * 5, "decoders")),
    "all pieces of a word": ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", -1.0]]}),
    "random merges": ("model", {"type": "BPE", "dropout": 0.5, "vocab": {"a": 0}, "merges": []}),
    "a long prefix": ("model", {"type": "BPE", "continuing_subword_prefix": "p" * 10**6, "vocab": {}, "merges": []}),
    "a model of no kind": ("model", {"vocab": [["<unk>", -1.0]], "merges": [], "type": None}),
    "no step": ("normalizer", [1]),
    "a step without a kind": ("normalizer", {"normalizers": []}),
    "added tokens": ("added_tokens", [{"id": 1, "content": "a" * 10_000}]),
}


@pytest.fixture
def clip(tmp_path):
    save_clip(tmp_path / "clip")
    return tmp_path / "clip"


def change(file, section, value):
    file.write_text(json.dumps({**json.loads(file.read_text()), section: value}))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_of_a_scorer_is_refused(clip, name):
    section, value = HOSTILE[name]
    change(clip / "tokenizer.json", section, value)
    with bounded(), pytest.raises(CheckpointError, match=rf"^clip/tokenizer.json: {section}: got .*; download it"):
        load_scorer(clip)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_of_a_text_encoder_is_refused(checkpoint, tmp_path, name):
    section, value = HOSTILE[name]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "text_encoder").symlink_to(checkpoint / "text_encoder")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    file.write_bytes((checkpoint / "tokenizer" / "tokenizer.json").read_bytes())
    change(file, section, value)
    part = tmp_path / "text_encoder" / "model.safetensors"
    with bounded(), pytest.raises(CheckpointError, match=rf"tokenizer.json: {section}: got .*; download it again$"):
        sana_core.load_text_encoder(part)


def test_the_tokenizers_of_clip_and_gemma_are_unchanged():
    words = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2, "r": 3, "e": 4, "d</w>": 5, "re": 6}
    gemma = {word: number for number, word in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "a", "\u2581"])}
    for tokenizer in (CLIPTokenizer(vocab=words, merges=[("r", "e")]), GemmaTokenizer(vocab=gemma, merges=[])):
        text = tokenizer.backend_tokenizer.to_str()
        assert checked_tokenizer(text.encode(), "tokenizer.json") == text


def test_a_model_without_a_kind_is_read_as_bpe():
    """Tokenizers that were saved before version 0.11 do not name the kind."""
    words = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2, "r": 3, "e": 4, "d</w>": 5, "re": 6}
    document = json.loads(CLIPTokenizer(vocab=words, merges=[("r", "e")]).backend_tokenizer.to_str())
    named = Tokenizer.from_str(json.dumps(document))
    del document["model"]["type"]
    old = Tokenizer.from_str(checked_tokenizer(json.dumps(document).encode(), "tokenizer.json"))
    assert old.encode("a red").ids == named.encode("a red").ids
    document["model"]["merges"] = 5
    text = checked_tokenizer(json.dumps(document).encode(), "tokenizer.json")
    with pytest.raises(Exception, match=re.compile("merges|integer|untagged", re.IGNORECASE)):
        Tokenizer.from_str(text)


def test_a_prompt_of_a_scorer_takes_little_memory(clip):
    """The steps that are allowed double a long prompt a few times at most."""
    change(clip / "tokenizer.json", "normalizer", several([replace({"Regex": ""}, "a")] * 3))
    with bounded():
        load_scorer(clip).score(torch.zeros(1, 3, 32, 32), PROMPT * 3000)


def trained(rules, tmp_path):
    """A sentencepiece model of Gemma's kind that replaces characters by the `rules`, lines of numbers."""
    (tmp_path / "rules.tsv").write_text(rules)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a red house", "a blue boat"] * 20),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        model_type="bpe",
        normalization_rule_tsv=str(tmp_path / "rules.tsv"),
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
    )
    return model.getvalue()


def test_a_sentencepiece_model_with_a_long_replacement_is_refused(tmp_path):
    short = trained("61\t62 62 62\n", tmp_path)
    assert sentencepiece_tokenizer(short, "tokenizer.model", 100).encode("a")[0] == 2
    long = trained("61\t" + "62 " * 100_000 + "\n", tmp_path)
    with pytest.raises(CheckpointError, match=r"^tokenizer.model: got a character replaced by \d+ bytes, expected at"):
        sentencepiece_tokenizer(long, "tokenizer.model", 100).encode("a" * 100_000)


def test_the_maps_of_characters_that_sentencepiece_has_are_accepted(tmp_path):
    for rule in ("identity", "nmt_nfkc_cf", "nfkc"):
        model = io.BytesIO()
        sentences = iter(["a red house", "a blue boat"] * 20)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=model,
            vocab_size=40,
            hard_vocab_limit=False,
            normalization_rule_name=rule,
        )
        check_sentencepiece(model.getvalue(), "tokenizer.model")
