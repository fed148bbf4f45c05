"""Broken headers, indexes, .pth files and bytes: they load, or one line names the broken file."""

import io
import json
import zipfile
from pathlib import Path

import layouts
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from mutations import changed_bytes, changed_json, with_file
from small import LOADERS

import sana_core
from sana_core.batch.png import encode_png, is_damaged, read_entry
from sana_core.commands.convert import convert_checkpoint


@pytest.fixture(scope="module")
def headers(small):
    """Of each component the header, and the number of the bytes behind it."""
    return {name: header_of(next((small / name).glob("*.safetensors"))) for name in LOADERS}


def header_of(file):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length], len(content) - 8 - length


def write_header(file: Path, header: bytes, size: int) -> Path:
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + size)
    return file


def use(path, load):
    info = sana_core.inspect_checkpoint(path)
    load(path)
    return info


@pytest.mark.parametrize("name", LOADERS)
@given(data=st.data())
def test_headers_of_changed_json(survives, folder, headers, name, data):
    header, size = headers[name]
    header = data.draw(changed_json(json.loads(header))).encode()
    file = write_header(folder / name / "other.safetensors", header, size)
    try:
        survives(lambda: use(file, LOADERS[name]), "other.safetensors", "config.json")
    finally:
        file.unlink()


@given(data=st.data(), name=st.sampled_from(list(LOADERS)))
def test_headers_of_changed_bytes(survives, folder, headers, name, data):
    header, size = headers[name]
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


PNG = encode_png(torch.zeros(3, 8, 8), "a red circle", 7, {"steps": 1})


@given(content=changed_bytes(PNG))
def test_pictures_of_a_batch(survives, content):
    def look():
        return read_entry(content), is_damaged(content)

    entry, _ = survives(look)
    assert entry is None or isinstance(entry, dict)


@given(data=st.data(), name=st.sampled_from(list(LOADERS)))
def test_convert(survives, folder, headers, tmp_path_factory, name, data):
    header, size = headers[name]
    file = write_header(folder / name / "other.sft", data.draw(changed_json(json.loads(header))).encode(), size)
    target = tmp_path_factory.getbasetemp() / "converted.safetensors"
    try:
        survives(lambda: convert_checkpoint(file, target), "other.sft", "config.json")
    finally:
        file.unlink()
        target.unlink(missing_ok=True)
