"""Prompts that come from files and text fields."""

import runpy

import pytest
from setup import ROOT

from sana_core import InputError
from sana_core.batch.prompts import read_prompts, split_prompts

# str.splitlines splits at these as well.
INSIDE = {
    "line separator": "\u2028",
    "paragraph separator": "\u2029",
    "next line": "\x85",
    "vertical tab": "\x0b",
    "form feed": "\x0c",
    "file separator": "\x1c",
    "group separator": "\x1d",
    "record separator": "\x1e",
}
# What a file contains: its prompts.
FILES = {
    "unix": ("a cat\na dog\n", ["a cat", "a dog"]),
    "windows": ("a cat\r\na dog\r\n", ["a cat", "a dog"]),
    "old mac": ("a cat\ra dog\r", ["a cat", "a dog"]),
    "mixed": ("a cat\r\n\r\na dog\n\ra bird", ["a cat", "a dog", "a bird"]),
    "mark": ("\ufeffa cat\na dog", ["a cat", "a dog"]),
    "marks of joined files": ("\ufeffa cat\n\ufeffa dog\n  \ufeff a bird", ["a cat", "a dog", "a bird"]),
    "only a mark in a line": ("a cat\n\ufeff\na dog", ["a cat", "a dog"]),
    "spaces": ("  a cat \n\t\n \u3000\na dog\u00a0", ["a cat", "a dog"]),
    "separators at the ends": ("\u2028a cat\x0c\n\x85\na dog\u2029", ["a cat", "a dog"]),
    "hash": ("# a cat\na dog", ["# a cat", "a dog"]),
    "mark inside": ("a\ufeffcat", ["a\ufeffcat"]),
}
example_client = runpy.run_path(str(ROOT / "docs" / "examples" / "queue_prompts.py"))["read_prompts"]


@pytest.mark.parametrize("read", [read_prompts, example_client], ids=["batch", "example client"])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_a_prompt_with_another_separator_stays_one_prompt(tmp_path, read, inside):
    file = tmp_path / "prompts.txt"
    file.write_bytes(f"a cat{inside}on a mat\r\na dog\n".encode())
    assert read(file) == [f"a cat{inside}on a mat", "a dog"]


@pytest.mark.parametrize("read", [read_prompts, example_client], ids=["batch", "example client"])
@pytest.mark.parametrize("content, prompts", FILES.values(), ids=FILES)
def test_lines_of_a_file_are_its_prompts(tmp_path, read, content, prompts):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content.encode())
    assert read(file) == prompts


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n\ufeff\n", "\u2028\x85\x0c"])
def test_a_file_without_prompts_is_refused(tmp_path, content):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content.encode())
    with pytest.raises(InputError, match="^prompts: .*prompts.txt holds no prompt; write one a line$"):
        read_prompts(file)
    with pytest.raises(SystemExit, match="got no prompt, expected one a line"):
        example_client(file)
    assert split_prompts(content) == []
