"""Scorers of images, against transformers' own CLIPModel and CLIPProcessor as PickScore's page uses them."""

import json

import pytest
import torch
from clips import PROMPT, save_clip
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextModel,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipModel,
)

from sana_core.batch.scorer import load_scorer
from sana_core.errors import CheckpointError, InputError, MissingFileError
from sana_core.runtime.image_files import levels


@pytest.fixture
def folder(tmp_path):
    save_clip(tmp_path / "clip")
    return tmp_path / "clip"


def published(folder, images, prompt):
    """The scores of PickScore_v1's page: both embeddings of length 1, their product times exp(logit_scale)."""
    model = CLIPModel.from_pretrained(folder).train(False)
    processor = CLIPImageProcessor.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.no_grad():
        pixels = processor([Image.fromarray(levels(image)) for image in images], return_tensors="pt")["pixel_values"]
        tokens = tokenizer(prompt, padding="max_length", max_length=16, truncation=True, return_tensors="pt")
        image = model.visual_projection(model.vision_model(pixels).pooler_output)
        text = model.text_projection(
            model.text_model(tokens["input_ids"], attention_mask=tokens["attention_mask"]).pooler_output
        )
        image, text = (each / each.norm(dim=-1, keepdim=True) for each in (image, text))
        return model.logit_scale.exp() * (text @ image.T)[0]


def test_half_a_character_in_the_prompt_is_refused(folder):
    with pytest.raises(InputError, match="^prompt: holds half a character .* at position 2; write the text again$"):
        load_scorer(folder).score(torch.zeros(1, 3, 64, 48), "a \ud83d")


def test_scores_are_the_published_ones(folder):
    images = torch.rand(3, 3, 64, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    scores = load_scorer(folder).score(images, PROMPT)
    assert scores.shape == (3,) and scores.std() > 0.1
    torch.testing.assert_close(scores, published(folder, images, PROMPT), atol=1e-3, rtol=1e-4)
    assert torch.equal(load_scorer(folder).score(images[1:2], PROMPT)[0], scores[1])


def test_a_long_prompt_is_cut(folder):
    images = torch.zeros(1, 3, 32, 32)
    assert load_scorer(folder).score(images, " ".join([PROMPT] * 9)).isfinite().all()


def other_model(folder, kind):
    config = CLIPModel.from_pretrained(folder).config
    if kind == "siglip":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return SiglipModel(SiglipConfig(text_config={**sizes, "vocab_size": 9}, vision_config=sizes))
    if kind == "clip_text_model":
        return CLIPTextModel(config.text_config)
    return CLIPVisionModel(config.vision_config)


@pytest.mark.parametrize("kind", ["siglip", "clip_text_model", "clip_vision_model"])
def test_another_model_is_named(folder, tmp_path, kind):
    other_model(folder, kind).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=f"other: got model_type {kind}, expected clip, of text and images"):
        load_scorer(tmp_path / "other")


def test_one_file_is_named(folder):
    with pytest.raises(CheckpointError, match="model.safetensors: got one file, expected a folder"):
        load_scorer(folder / "model.safetensors")


def test_a_half_under_the_name_of_the_whole_is_named(folder):
    CLIPTextModel(CLIPModel.from_pretrained(folder).config.text_config).save_pretrained(folder.parent / "text")
    (folder / "model.safetensors").write_bytes((folder.parent / "text" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"clip: no \S+ and \d+ more; it is not a whole CLIP"):
        load_scorer(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "preprocessor_config.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(MissingFileError, match=name):
        load_scorer(folder)


def test_broken_weights_are_named(folder):
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match="clip: cannot be loaded as CLIP"):
        load_scorer(folder)


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="clip: cannot be loaded as CLIP"):
        load_scorer(folder)


def test_code_of_the_folder_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "mine.Model"}}))
    with pytest.raises(CheckpointError, match="auto_map"):
        load_scorer(folder)
