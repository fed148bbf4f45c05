"""Gemma's tokenizer from every place where it may be stored, scorers' tokenizers, and the resulting embeddings."""

import json
import random
from pathlib import Path

import layouts
import pytest
import sentencepiece
import torch
from clips import byte_tokenizer, save_clip, word_tokenizer
from tokenizers import Tokenizer
from transformers import CLIPTokenizer, PreTrainedTokenizerFast

import sana_core
from sana_core.checkpoints.tokenizer import json_tokenizer, sentencepiece_tokenizer
from sana_core.model.text import LONGEST_TEXT

PROMPTS = ["a red circle", "two  spaces, a tab\tand \U0001f3d4", "line\nbreak <bos> <end>", ""]


def as_tensor(content):
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.fixture
def single_file(tmp_path, spiece):
    """Gemma 2 in one file, its tokenizer inside, as ComfyUI's own encoders are."""
    model = layouts.gemma(vocabulary=600)
    tensors = {f"model.{key}": value.half() for key, value in model.state_dict().items()}
    return layouts.save({**tensors, "spiece_model": as_tensor(spiece)}, tmp_path / "gemma_2_2b_it_elm_fp16.safetensors")


def test_a_single_file_carries_its_tokenizer(single_file, spiece):
    info = sana_core.inspect_checkpoint(single_file)
    assert (info.kind, info.variant) == ("text_encoder", "gemma-2-custom-64")
    encoder = sana_core.load_text_encoder(single_file)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=spiece)
    for prompt in PROMPTS:
        assert encoder.tokenizer.encode(prompt) == [2, *theirs.encode(prompt)]
    embeds, mask = sana_core.encode_prompts(encoder, PROMPTS[:1])
    assert embeds.isfinite().all() and mask[0].sum() > 3
    model = layouts.gemma(vocabulary=600).half().float()
    for (key, a), (_, b) in zip(encoder.model.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("place", ["inside", "beside", "folder"])
def test_the_tokenizer_is_the_same_wherever_it_lies(checkpoint, tmp_path, place):
    reference = sana_core.load_text_encoder(checkpoint)
    content = (checkpoint / "tokenizer" / "tokenizer.json").read_bytes()
    tensors = sana_core.checkpoints.headers.read_file(checkpoint / "text_encoder" / "model.safetensors")
    metadata = {"config": (checkpoint / "text_encoder" / "config.json").read_text()}
    if place == "inside":
        tensors["tokenizer_json"] = as_tensor(content)
    else:
        folder = tmp_path if place == "beside" else tmp_path.parent / "tokenizer"
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_bytes(content)
        config = json.loads((checkpoint / "tokenizer" / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    file = layouts.save(tensors, tmp_path / "gemma.safetensors", **metadata)
    encoder = sana_core.load_text_encoder(file, reference="diffusers")
    for prompt in PROMPTS:
        assert encoder.tokenizer.encode(prompt) == reference.tokenizer.encode(prompt)
    ours, theirs = (sana_core.encode_prompts(item, PROMPTS[:2])[0] for item in (encoder, reference))
    assert torch.equal(ours, theirs)


def test_a_tokenizer_model_beside_the_file_is_read(single_file, spiece, tmp_path):
    tensors = sana_core.checkpoints.headers.read_file(single_file)
    del tensors["spiece_model"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.model").write_bytes(spiece)
    encoder = sana_core.load_text_encoder(layouts.save(tensors, tmp_path / "other" / "gemma.safetensors"))
    assert encoder.tokenizer.encode("a red circle")[0] == 2


@pytest.mark.parametrize("name, width", [("gemma-2-2b", 2304), ("gemma-2-9b", 3584), ("gemma-2-27b", 4608)])
def test_the_size_of_gemma_is_named(tmp_path, name, width):
    tensors = {
        "layers.0.pre_feedforward_layernorm.weight": torch.zeros(width),
        "embed_tokens.weight": torch.zeros(2, width),
        "layers.0.mlp.gate_proj.weight": torch.zeros(2, width),
        "layers.0.self_attn.q_proj.weight": torch.zeros(2, width),
        "layers.0.self_attn.k_proj.weight": torch.zeros(2, width),
    }
    assert sana_core.inspect_checkpoint(layouts.save(tensors, tmp_path / "g.safetensors")).variant == name


def test_a_sentencepiece_model_that_is_none_is_named(single_file, spiece, tmp_path):
    tensors = sana_core.checkpoints.headers.read_file(single_file)
    tensors["spiece_model"] = as_tensor(spiece[: len(spiece) // 2 + 1])
    file = layouts.save(tensors, tmp_path / "broken.safetensors")
    with pytest.raises(
        ValueError, match="/broken.safetensors: spiece_model: sentencepiece cannot read it .*; download"
    ):
        sana_core.load_text_encoder(file)


def test_a_token_is_found_by_its_whole_name(single_file, checkpoint, spiece):
    """What a chat's template needs: the id of <bos>, and that another is not there."""
    theirs = sentencepiece.SentencePieceProcessor(model_proto=spiece)
    ours = sana_core.load_text_encoder(single_file).tokenizer
    name = theirs.id_to_piece(theirs.bos_id())
    assert ours.find(name) == theirs.bos_id() == 2
    assert ours.find("<no such token>") is None and ours.pad_token == 0
    assert sana_core.load_text_encoder(checkpoint).tokenizer.find("<no such token>") is None


def test_a_tokenizer_may_have_fewer_tokens_than_the_model_and_none_more(single_file, tmp_path):
    """Gemma's own embedding has a few rows that no token uses."""
    tensors = sana_core.checkpoints.headers.read_file(single_file)
    name = "model.embed_tokens.weight"
    for rows, works in ((600, True), (599, False)):
        file = layouts.save({**tensors, name: tensors[name][:rows].clone()}, tmp_path / f"{rows}.safetensors")
        if works:
            assert sana_core.load_text_encoder(file).model.config.vocab_size == rows
        else:
            with pytest.raises(ValueError, match="got 600 tokens, expected at most the model's 599; use the"):
                sana_core.load_text_encoder(file)


DEMO = Path(__file__).parents[2] / "demo"
LETTERS = [
    "abcdefghijklmnopqrstuvwxyz",
    "ABCXYZ",
    "  \t\n\r\u00a0\u2003\u200b\x1c\x1f\x85\0",
    "0123456789",
    "'\".,!?-_<>|",
    "\u96ea\u306e\u5c71\u4e2d\u6587",
    "\U0001f3d4\U0001f600\U0001f468\u200d",
    "\u00e9\u0301\u0308e\u1100\u1161\u11a8\U0001d160",
    "\u0130\u03a3\u00df",
    "\u2581",
    "\u05d0\u0627\u0629",
]
PARTS = ["it's", "we'll", "don't ", "  a red house ", "a Blue boat.", "x" * 300, "\n\n\n", "\t\t", "<|StartOfText|>"]


def random_texts(special, count=2000):
    """Texts of letters of several scripts, of any character, and of `special` tokens."""
    numbers = random.Random(0)
    for _ in range(count):
        text = ""
        for _ in range(numbers.randint(0, 12)):
            kind = numbers.random()
            if kind < 0.2:
                text += numbers.choice(special)
            elif kind < 0.3:
                text += numbers.choice(PARTS)
            elif kind < 0.4:
                text += chr(numbers.choice([numbers.randrange(0xD800), numbers.randrange(0xE000, 0x110000)]))
            else:
                text += "".join(numbers.choices(numbers.choice(LETTERS), k=numbers.randint(1, 7)))
                text += numbers.choice(["", " ", "  "])
        yield text


def unpadded(content):
    fast = Tokenizer.from_str(content.decode())
    fast.no_padding()
    return fast


@pytest.mark.parametrize("folder", ["checkpoint", "posters"])
def test_tokens_of_gemma_are_those_of_the_steps_in_the_file(checkpoint, folder):
    folder = checkpoint if folder == "checkpoint" else DEMO / "sana-posters"
    content = (folder / "tokenizer" / "tokenizer.json").read_bytes()
    ours, theirs = json_tokenizer(content, "tokenizer.json", 2000), unpadded(content)
    for text in random_texts(["<bos>", "<unk>", "<mask>", "<0x41>"]):
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids), ascii(text)


def test_tokens_of_gemma_with_runs_of_newlines_are_those_of_the_steps_in_the_file(checkpoint):
    """Gemma 2 has added tokens that are not special: runs of newlines and tabs. Some are not in the vocabulary here."""
    document = json.loads((checkpoint / "tokenizer" / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    marks = ["<start_of_turn>", "\n\n", "\n\n\n", "\t\t", "\u2581\u2581\u2581", "<unused0>", "House"]
    for number, mark in enumerate(marks, len(document["model"]["vocab"])):
        kind = {"special": mark.startswith("<s"), "normalized": mark == "House"}
        document["added_tokens"].append({"id": number, "content": mark, **flags, **kind})
    content = json.dumps(document).encode()
    ours, theirs = json_tokenizer(content, "tokenizer.json", 2000), unpadded(content)
    assert ours.find("<start_of_turn>") == theirs.token_to_id("<start_of_turn>") == len(document["model"]["vocab"])
    for text in random_texts(["<bos>", *marks]):
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids), ascii(text)


def tokenizer_of(folder, vocabulary):
    """The function by which a scorer reads a text."""
    file = folder / "tokenizer.json"
    return json_tokenizer(file.read_bytes(), "tokenizer.json", vocabulary).encode


@pytest.mark.parametrize("form", ["new", "old"])
def test_tokens_of_clip_are_those_of_transformers(tmp_path, form):
    theirs = byte_tokenizer()
    theirs.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    if form == "old":
        # As openai/clip-vit-large-patch14
        del document["model"]["type"]
        document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenize = tokenizer_of(tmp_path, len(theirs))
    loaded = CLIPTokenizer.from_pretrained(tmp_path)
    for text in random_texts(["<|startoftext|>", "<|endoftext|>"]):
        ids = tokenize(text)
        assert ids == loaded(text).input_ids == theirs(text).input_ids, ascii(text)


def test_tokens_of_the_demo_s_scorer_are_those_of_the_steps_in_the_file(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    for folder in (DEMO / "sana-posters-scorer", tmp_path):
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenize = tokenizer_of(folder, len(theirs))
        for text in random_texts(list(theirs.get_vocab())):
            assert tokenize(text) == theirs(text).input_ids, ascii(text)


UNITS = ["a red house ", "circle", "\U0001f3d4\u96ea", "x", "\n", "a. "]


@pytest.mark.parametrize("kind", ["tokenizer_json", "spiece_model"])
def test_the_tokens_that_sana_reads_are_those_of_the_whole_text(checkpoint, spiece, kind):
    content = (checkpoint / "tokenizer" / "tokenizer.json").read_bytes()
    if kind == "tokenizer_json":
        ours, fast = json_tokenizer(content, kind, 1000), unpadded(content)
        theirs = lambda text: fast.encode(text).ids  # noqa: E731
    else:
        ours = sentencepiece_tokenizer(spiece, kind, 1000)
        theirs = sentencepiece.SentencePieceProcessor(model_proto=spiece, add_bos=True).encode
    for unit in UNITS:
        for length in (LONGEST_TEXT - 1, LONGEST_TEXT + 1, 2 * LONGEST_TEXT):
            text = (unit * length)[:length]
            assert ours.encode(text)[:5000] == theirs(text)[:5000]


def test_the_tokens_that_a_scorer_reads_are_those_of_the_whole_text(tmp_path):
    for number, theirs in enumerate((byte_tokenizer(), word_tokenizer())):
        save_clip(tmp_path / str(number), tokenizer=theirs)
        tokenize = tokenizer_of(tmp_path / str(number), len(theirs))
        for unit in UNITS[:3]:
            for length in (LONGEST_TEXT - 1, LONGEST_TEXT + 1, 2 * LONGEST_TEXT):
                text = (unit * length)[:length]
                # Longer texts are cut in characters first, and no CLIP reads more than 77 tokens.
                assert tokenize(text)[:76] == theirs(text).input_ids[:76]
