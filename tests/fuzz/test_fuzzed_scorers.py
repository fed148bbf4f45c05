"""Broken folders of scorers: they score an image, or one line names the folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from clips import PROMPT
from hypothesis import given
from hypothesis import strategies as st
from mutations import NUMBERS, VALUES, changed_bytes, changed_json, with_file

from sana_core.batch.best import load_scorer

JSON_FILES = ("config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json")
# These fields make transformers download code, read other folders or choose other classes.
ODD_FIELDS = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "auto_map",
    "quantization_config",
    "text_config_dict",
    "vision_config_dict",
    "dtype",
    "torch_dtype",
    "transformers_weights",
    "tokenizer_class",
    "image_processor_type",
    "truncation_side",
    "is_encoder_decoder",
    "base_model_tp_plan",
)
ODD_FILES = ("adapter_config.json", "processor_config.json", "generation_config.json", "chat_template.jinja")
IMAGE = torch.linspace(-1, 1, 3 * 40 * 32).reshape(1, 3, 40, 32)


@pytest.fixture(scope="module")
def sharded(clip, tmp_path_factory):
    """The same CLIP, with an index of its one shard."""
    folder = shutil.copytree(clip, tmp_path_factory.mktemp("sharded") / "clip")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    weight_map = {name: "model-00001-of-00001.safetensors" for name in load_scorer(clip).model.state_dict()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def changed_fields(content: bytes):
    """Strategy: the JSON object `content` with one to four fields replaced, at its top or in a section."""

    def change(changes):
        document = json.loads(content)
        sections = [document, *(value for value in document.values() if isinstance(value, dict))]
        for section, choice, name, value in changes:
            place = sections[section % len(sections)]
            names = [*place, *ODD_FIELDS] if name is None else [name]
            place[names[choice % len(names)]] = value
        return json.dumps(document)

    numbers = NUMBERS | st.sampled_from([3, 8, 16, 20_000, 65_536, 10**6])
    sizes = st.dictionaries(st.sampled_from(["shortest_edge", "longest_edge", "height", "width"]), numbers, max_size=2)
    names = st.none() | st.sampled_from(ODD_FIELDS)
    values = numbers | sizes | VALUES | st.sampled_from(["someone/kernel", "gelu", "relu", "none such", "left"])
    change_of_one = st.tuples(st.integers(0, 3), st.integers(0, 99), names, values)
    return st.lists(change_of_one, min_size=1, max_size=4).map(change)


def score(folder: Path):
    return load_scorer(folder).score(IMAGE, PROMPT)


@pytest.mark.parametrize("name", JSON_FILES)
@given(data=st.data())
def test_json_files(survives, clip, name, data):
    content = (clip / name).read_bytes()
    strategy = changed_json(json.loads(content)) | changed_bytes(content) | changed_fields(content)
    with_file(clip / name, data.draw(strategy), survives, lambda: score(clip), "clip")


@given(data=st.data())
def test_weights(survives, clip, data):
    file = clip / "model.safetensors"
    with_file(file, data.draw(changed_bytes(file.read_bytes())), survives, lambda: score(clip), "clip")


@given(data=st.data())
def test_indexes(survives, sharded, data):
    file = sharded / "model.safetensors.index.json"
    content = changed_json(json.loads(file.read_bytes())) | changed_bytes(file.read_bytes())
    with_file(file, data.draw(content), survives, lambda: score(sharded), "clip")


@given(name=st.sampled_from(ODD_FILES), content=st.text(max_size=40) | VALUES.map(json.dumps))
def test_other_files_change_nothing(survives, clip, name, content):
    expected = score(clip)
    (clip / name).write_text(content, encoding="utf-8", errors="replace")
    try:
        assert torch.equal(survives(lambda: score(clip)), expected)
    finally:
        (clip / name).unlink()
