"""Descriptions of files by files.py, and quotes of values in errors."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sana_core import CheckpointError, MissingFileError, ReadError
from sana_core.checkpoints.files import opened, parse_json, read_bytes
from sana_core.checkpoints.headers import write_tensors
from sana_core.runtime.text import brief


@pytest.mark.parametrize(
    "value, text",
    [
        ("plain", "plain"),
        ("two\nlines  and\ttabs", "two lines and tabs"),
        ("\u00fc\ud800", "\\xfc\\ud800"),
        ("a" * 100, "a" * 57 + "..."),
        ("a" * 10**7, "a" * 57 + "..."),
        (ValueError("what"), "what"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_what_an_error_quotes_is_short_and_in_ascii(value, text):
    assert brief(value) == text


def test_a_quoted_value_whose_parts_are_shared_takes_no_time():
    value = ()
    for _ in range(100):
        value = (value, value)
    assert len(brief(value)) <= 60


def test_a_key_that_stands_twice_is_refused():
    with pytest.raises(CheckpointError, match=r"^a/b: not JSON \(a key stands twice in it\); download it again$"):
        parse_json('{"a": {"b": 1, "b": 2}}', "a/b")


def test_a_byte_order_that_is_not_utf_8_is_refused():
    with pytest.raises(CheckpointError, match="^a/b: not JSON"):
        parse_json('{"a": 1}'.encode("utf-16"), "a/b")


def test_a_file_of_text_has_a_largest_size(tmp_path):
    (tmp_path / "a.json").write_bytes(b" " * 11)
    with pytest.raises(CheckpointError, match="/a.json: got 11 bytes, expected at most 10; download it again$"):
        read_bytes(tmp_path / "a.json", 10)


def test_a_file_that_is_gone_and_one_that_cannot_be_read(tmp_path):
    with pytest.raises(MissingFileError, match="/gone: no such file; refresh the list, or download it again$"):
        read_bytes(tmp_path / "gone", 10)
    (tmp_path / "file").touch()
    with (
        pytest.raises(ReadError, match=r"/below: cannot be read \(Not a directory\); see its rights"),
        opened(tmp_path / "file" / "below"),
    ):
        pass


def test_tensors_are_written_as_the_library_writes_them(tmp_path):
    tensors = {
        "wide": torch.arange(6.0).reshape(2, 3).T,
        "narrow": torch.ones(3, dtype=torch.bfloat16),
        "number": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "codes": torch.arange(5, dtype=torch.uint8),
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    write_tensors(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    metadata = {"z": "1", "a": '"\u00e9\n', "m": json.dumps({"b": 1})}
    write_tensors(tmp_path / "ours", tensors, metadata)
    assert load_file(tmp_path / "ours").keys() == tensors.keys()
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == metadata
