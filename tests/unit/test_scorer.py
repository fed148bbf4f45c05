"""Scorers of images, against transformers' own CLIPModel and CLIPProcessor as PickScore's page uses them."""

import json

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTextModel,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipModel,
)

from sana_core.errors import CheckpointError, MissingFileError
from sana_core.picture_files import levels
from sana_core.scorer import load_scorer

PROMPT = "a red house and a blue boat"


def save_clip(folder, seed=0):
    """A small CLIP with random weights, its scale 100 as PickScore_v1's, saved by transformers."""
    words = {
        word: number for number, word in enumerate(["<pad>", "<start>", "<end>", "<unk>", *sorted({*PROMPT.split()})])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<start>", 1), ("<end>", words["<end>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(words), "max_position_embeddings": 16, "eos_token_id": words["<end>"]}
    config = CLIPConfig(
        text_config={**sizes, **tokens, "pad_token_id": 0, "bos_token_id": 1},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    model = CLIPModel(config)
    with torch.no_grad():
        model.logit_scale.fill_(torch.tensor(100.0).log())
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    CLIPProcessor(CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32), fast).save_pretrained(folder)
    # as the published folders have it; newer transformers keep the same in processor_config.json
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    return model


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
