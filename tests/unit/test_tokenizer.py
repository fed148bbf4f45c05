"""Gemma's tokenizer from every place where it may be stored, and the resulting embeddings."""

import json

import layouts
import pytest
import sentencepiece
import torch

import sana_core

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
            with pytest.raises(ValueError, match="got 600 tokens, expected at most the text encoder's 599; use that"):
                sana_core.load_text_encoder(file)
