"""Scorers of images, against transformers' own CLIPModel and CLIPProcessor as PickScore's page uses them."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from bounded import bounded
from clips import PROMPT, save_clip
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextModel,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipModel,
)

from sana_core.batch.best import load_scorer
from sana_core.checkpoints.headers import read_header
from sana_core.errors import CheckpointError, InputError, MissingFileError
from sana_core.runtime.cancellation import Polled
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
        image, text = (item / item.norm(dim=-1, keepdim=True) for item in (image, text))
        return model.logit_scale.exp() * (text @ image.T)[0]


def test_a_lone_surrogate_in_the_prompt_is_refused(folder):
    with pytest.raises(InputError, match="^prompt: contains half a character .* at position 2; write the text again$"):
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
    with pytest.raises(CheckpointError, match=f"config.json: model_type is {kind}, which no CLIP has; use a CLIP"):
        load_scorer(tmp_path / "other")


def test_a_half_under_the_name_of_the_whole_is_named(folder):
    CLIPTextModel(CLIPModel.from_pretrained(folder).config.text_config).save_pretrained(folder.parent / "text")
    (folder / "model.safetensors").write_bytes((folder.parent / "text" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"clip: no \S+.*; the file is incomplete"):
        load_scorer(folder)


@pytest.mark.parametrize(
    "name, spoil, error, message",
    [
        *((name, Path.unlink, MissingFileError, name) for name in ("config.json", "tokenizer.json")),
        ("preprocessor_config.json", Path.unlink, MissingFileError, "preprocessor_config.json"),
        # Pickled weights are not read.
        ("model.safetensors", lambda file: file.rename(file.with_suffix(".bin")), MissingFileError, "clip: no model.s"),
        ("model.safetensors", lambda file: file.write_bytes(b"\0" * 100), CheckpointError, "s: corrupt or incomplete"),
    ],
)
def test_a_folder_that_is_not_whole_is_named(folder, name, spoil, error, message):
    with pytest.raises(CheckpointError, match="model.safetensors: got one file, expected a folder"):
        load_scorer(folder / "model.safetensors")
    spoil(folder / name)
    with pytest.raises(error, match=message):
        load_scorer(folder)


def change(file, fields):
    """Replace fields of a JSON file; "a/b" is the field b of the section a."""
    content = json.loads(file.read_text())
    for name, value in fields.items():
        section, _, field = name.rpartition("/")
        (content[section] if section else content)[field] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "name, fields, message",
    [
        (
            "config.json",
            {"text_config/num_hidden_layers": 10**6},
            r"no text_model.encoder.layers.999999\.\S+; the",
        ),
        ("config.json", {"text_config/num_hidden_layers": 200}, r"no text_model.encoder.layers.199\.\S+; the file"),
        ("config.json", {"text_config/vocab_size": 10**7}, r"token_embedding.weight is .*, expected \[10000000, 32"),
        ("config.json", {"vision_config/image_size": 20_000}, "image_size is 20000, which no CLIP has"),
        ("config.json", {"vision_config/num_attention_heads": 5}, "config.json: transformers cannot use it"),
        ("config.json", {"vision_config/hidden_act": "none such"}, "config.json: transformers cannot use it"),
        ("config.json", {"vision_config": "none such"}, "vision_config is none such, expected an object"),
        ("config.json", {"text_config/auto_map": {"AutoModel": "mine.Model"}}, "text_config: got auto_map"),
        ("config.json", {"auto_map": {"AutoModel": "mine.Model"}}, "config.json: got auto_map"),
        (
            "config.json",
            {"quantization_config": {"quant_method": "torchao"}},
            "quantization_config is .*, which no CLIP has; use",
        ),
        ("preprocessor_config.json", {"crop_size": 20_000}, "crop_size is 20000, which no CLIP has"),
        ("preprocessor_config.json", {"crop_size": 64}, "makes images of 64 x 64 pixels, expected 32 x 32"),
        ("preprocessor_config.json", {"do_center_crop": False}, r"makes images of \d+ x \d+ pixels, expected 32 x 32"),
        ("preprocessor_config.json", {"image_std": [0, 1, 1]}, r"image_std is \[0, 1, 1\], which no CLIP has"),
        (
            "tokenizer_config.json",
            {"truncation_side": "left"},
            "truncation_side is left, which no CLIP has; use",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_named_at_once(folder, name, fields, message):
    change(folder / name, fields)
    with bounded(size=3 * 10**8), pytest.raises(CheckpointError, match=message) as caught:
        load_scorer(folder)
    assert str(caught.value).startswith("clip") and "; " in str(caught.value)


def test_fields_and_files_that_transformers_would_act_on_change_nothing(folder, tmp_path):
    image = torch.zeros(1, 3, 32, 32)
    expected = load_scorer(folder).score(image, PROMPT)
    kernel = "somebody/kernel"
    sections = {
        f"{section}/{name}attn_implementation": kernel
        for section in ("text_config", "vision_config")
        for name in ("", "_")
    }
    names = {"attn_implementation": kernel, "_attn_implementation": kernel, "dtype": "float64"}
    change(folder / "config.json", {**names, **sections})
    tokens = {"0": {"content": "house"}}
    change(folder / "tokenizer_config.json", {"tokenizer_class": "Mine", "added_tokens_decoder": tokens})
    names = {"image_processor_type": "Mine", "feature_extractor_type": "Mine"}
    change(folder / "preprocessor_config.json", names)
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(tmp_path), "peft_type": "LORA"})
    )
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {"size": {"shortest_edge": 20_000}}}))
    (folder / "chat_template.jinja").write_text("{{ 9**9**9 }}")
    assert torch.equal(load_scorer(folder).score(image, PROMPT), expected)


def test_duplicated_sections_are_read_as_transformers_reads_them(folder):
    image = torch.zeros(1, 3, 32, 32)
    expected = load_scorer(folder).score(image, PROMPT)
    config = json.loads((folder / "config.json").read_text())
    again = {"text_config": {}, "text_config_dict": config["text_config"], "vision_config_dict": None}
    change(folder / "config.json", again)
    assert torch.equal(load_scorer(folder).score(image, PROMPT), expected)
    torch.testing.assert_close(expected, published(folder, image, PROMPT), atol=1e-3, rtol=1e-4)


def test_shards_are_read_from_the_folder_alone(folder, tmp_path):
    expected = load_scorer(folder)
    score = expected.score(torch.zeros(1, 3, 32, 32), PROMPT)
    (tmp_path / "other").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "other" / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    for shard in ("../other/model.safetensors", str(tmp_path / "other" / "model.safetensors")):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(expected.model.state_dict(), shard)}))
        with pytest.raises(CheckpointError, match="expected safetensors files of its own folder"):
            load_scorer(folder)
    (folder / "a.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(expected.model.state_dict(), "a.safetensors")}))
    assert torch.equal(load_scorer(folder).score(torch.zeros(1, 3, 32, 32), PROMPT), score)


def test_weights_of_gigabytes_in_other_shapes_are_not_read(folder):
    headers = read_header(folder / "model.safetensors").headers
    entries, end = {}, 0
    for name, header in headers.items():
        sides = [10**6, 1000] if name == "text_projection.weight" else header.shape
        entries[name] = {"dtype": "F32", "shape": sides, "data_offsets": [end, end + 4 * prod(sides)]}
        end += 4 * prod(sides)
    text = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    with (
        bounded(size=3 * 10**8),
        pytest.raises(CheckpointError, match=r"text_projection.weight is \[1000000, 1000\]"),
    ):
        load_scorer(folder)


def test_weights_that_are_not_finite_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "logit_scale": torch.tensor(float("nan"))}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="clip: 1 of 1 values in logit_scale are NaN or infinite"):
        load_scorer(folder)


class Cancelled(BaseException):
    pass


def test_loading_and_scoring_are_cancelled_between_two_operations(folder):
    scorer, calls = load_scorer(folder), []

    def poll():
        calls.append(None)
        if len(calls) > 20:
            raise Cancelled

    for action in (lambda: load_scorer(folder), lambda: scorer.score(torch.zeros(1, 3, 32, 32), PROMPT)):
        calls.clear()
        with pytest.raises(Cancelled), Polled(poll):
            action()
    assert torch.equal(load_scorer(folder).model.logit_scale, scorer.model.logit_scale)
