"""Broken headers, indexes, configs, tokenizers and .pth files: they load, or one line says which file is broken."""

import io
import json
import shutil
import zipfile
from pathlib import Path

import layouts
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from mutations import changed_bytes, changed_json

import sana_core
from sana_core.checkpoints.convert import convert_checkpoint
from sana_core.checkpoints.load import shift_of
from sana_core.checkpoints.schemas import read_preview

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "demo" / "sana-tiny"
LOADERS = {
    "transformer": sana_core.load_transformer,
    "vae": sana_core.load_autoencoder,
    "text_encoder": sana_core.load_text_encoder,
}
FILES = {name: next((CHECKPOINT / name).glob("*.safetensors")) for name in LOADERS}


def header_of(file):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length], len(content) - 8 - length


HEADERS = {name: header_of(file) for name, file in FILES.items()}
CONFIGS = {name: json.loads((CHECKPOINT / name / "config.json").read_text()) for name in LOADERS}
SCHEDULER = json.loads((CHECKPOINT / "scheduler" / "scheduler_config.json").read_text())
PREVIEW = json.loads((CHECKPOINT / "preview.json").read_text())
TOKENIZER = (CHECKPOINT / "tokenizer" / "tokenizer.json").read_bytes()
SETTINGS = json.loads((CHECKPOINT / "tokenizer" / "tokenizer_config.json").read_text())
MODEL_INDEX = json.loads((CHECKPOINT / "model_index.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the checkpoint, of which each test breaks one file, and mends it."""
    return shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("fuzz") / "model")


def write_header(file: Path, header: bytes, size: int) -> Path:
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + size)
    return file


def use(path, load):
    info = sana_core.inspect_checkpoint(path)
    load(path)
    return info


def with_file(file, content, survives, action, *names):
    before = file.read_bytes()
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        survives(action, *names)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("name", LOADERS)
@given(data=st.data())
def test_headers_of_changed_json(survives, folder, name, data):
    header, size = HEADERS[name]
    header = data.draw(changed_json(json.loads(header))).encode()
    file = write_header(folder / name / "other.safetensors", header, size)
    try:
        survives(lambda: use(file, LOADERS[name]), "other.safetensors", "config.json")
    finally:
        file.unlink()


@given(data=st.data(), name=st.sampled_from(list(LOADERS)))
def test_headers_of_changed_bytes(survives, folder, name, data):
    header, size = HEADERS[name]
    file = folder / name / "other.safetensors"
    file.write_bytes(data.draw(changed_bytes(len(header).to_bytes(8, "little") + header)) + bytes(size))
    try:
        survives(lambda: use(file, LOADERS[name]), "other.safetensors")
    finally:
        file.unlink()


@given(content=st.binary(max_size=200), suffix=st.sampled_from([".safetensors", ".sft", ".pth"]))
def test_any_bytes(survives, tmp_path_factory, content, suffix):
    file = tmp_path_factory.getbasetemp() / f"any{suffix}"
    file.write_bytes(content)
    survives(lambda: use(file, sana_core.load_transformer), file.name)


@pytest.mark.parametrize("name", LOADERS)
@given(data=st.data())
def test_configurations(survives, folder, name, data):
    content = data.draw(changed_json(CONFIGS[name]) | changed_bytes(json.dumps(CONFIGS[name]).encode()))
    file = folder / name / "config.json"
    with_file(file, content, survives, lambda: use(folder, LOADERS[name]), f"{name}/")


@given(content=changed_json(SCHEDULER) | changed_bytes(json.dumps(SCHEDULER).encode()))
def test_schedulers(survives, folder, content):
    file = folder / "scheduler" / "scheduler_config.json"
    with_file(file, content, survives, lambda: shift_of(sana_core.inspect_checkpoint(folder)), "scheduler_config.json")


@given(content=changed_json(MODEL_INDEX) | changed_bytes(json.dumps(MODEL_INDEX).encode()))
def test_model_indexes(survives, folder, content):
    with_file(folder / "model_index.json", content, survives, lambda: sana_core.inspect_checkpoint(folder), "model")


@given(content=changed_json(PREVIEW) | changed_bytes(json.dumps(PREVIEW).encode()))
def test_previews(survives, folder, content):
    file = folder / "preview.json"
    with_file(file, content, survives, lambda: read_preview(file), "preview.json")


@given(content=changed_json(json.loads(TOKENIZER)) | changed_bytes(TOKENIZER))
def test_tokenizers(survives, folder, content):
    def encode():
        encoder = sana_core.load_text_encoder(folder)
        sana_core.encode_prompts(encoder, ["a red circle"], instruction=False)

    with_file(folder / "tokenizer" / "tokenizer.json", content, survives, encode, "tokenizer.json")


@given(content=changed_json(SETTINGS) | changed_bytes(json.dumps(SETTINGS).encode()))
def test_tokenizers_settings(survives, folder, content):
    file = folder / "tokenizer" / "tokenizer_config.json"
    with_file(file, content, survives, lambda: sana_core.load_text_encoder(folder), "tokenizer_config.json")


@given(data=st.data())
def test_sentencepiece_models(survives, tmp_path_factory, spiece, data):
    folder = tmp_path_factory.getbasetemp() / "spiece"
    if not folder.exists():
        model = layouts.gemma(vocabulary=600)
        layouts.save(model.state_dict(), folder / "gemma.safetensors")
    (folder / "tokenizer.model").write_bytes(data.draw(changed_bytes(spiece)))
    survives(lambda: sana_core.load_text_encoder(folder / "gemma.safetensors"), "tokenizer.model")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "sana"
    model = layouts.transformer()
    model.save_pretrained(folder, max_shard_size="10MB")
    return folder


@given(data=st.data())
def test_indexes(survives, sharded, data):
    index = next(sharded.glob("*.index.json"))
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    content["weight_map"] = {
        name: data.draw(st.sampled_from([shard] * 9 + [shards[0], index.name, "config.json", "../sana/" + shard]))
        for name, shard in content["weight_map"].items()
    }
    text = data.draw(changed_json(content) | changed_bytes(json.dumps(content).encode()))
    with_file(index, text, survives, lambda: sana_core.inspect_checkpoint(sharded), "sana/")


def saved(document) -> bytes:
    stream = io.BytesIO()
    torch.save(document, stream)
    return stream.getvalue()


PTH = saved({"state_dict": {"a.weight": torch.ones(3, 4), "b": torch.ones(2).bfloat16()}, "epoch": 3})
MEMBERS = {
    name.partition("/")[2]: zipfile.ZipFile(io.BytesIO(PTH)).read(name)
    for name in zipfile.ZipFile(io.BytesIO(PTH)).namelist()
}


@given(content=changed_bytes(PTH))
@example(content=PTH)
def test_pth_of_changed_bytes(survives, tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "bytes.pth"
    file.write_bytes(content)
    survives(lambda: use(file, sana_core.load_transformer), file.name)


@given(content=changed_bytes(MEMBERS["data.pkl"]), packing=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
def test_pth_of_changed_pickles(survives, tmp_path_factory, content, packing):
    file = tmp_path_factory.getbasetemp() / "pickle.pth"
    with zipfile.ZipFile(file, "w", packing) as archive:
        for name, member in {**MEMBERS, "data.pkl": content}.items():
            archive.writestr(f"archive/{name}", member)
    survives(lambda: use(file, sana_core.load_transformer), file.name)


@given(data=st.data(), name=st.sampled_from(list(LOADERS)))
def test_convert(survives, folder, tmp_path_factory, name, data):
    header, size = HEADERS[name]
    file = write_header(folder / name / "other.sft", data.draw(changed_json(json.loads(header))).encode(), size)
    target = tmp_path_factory.getbasetemp() / "converted.safetensors"
    try:
        survives(lambda: convert_checkpoint(file, target), "other.sft", "config.json")
    finally:
        file.unlink()
        target.unlink(missing_ok=True)
