"""Prompts that come from files and text fields."""

import argparse
import json
import runpy

import pytest
from setup import ROOT

from sana_core import InputError
from sana_core.batch.folder import claims_of
from sana_core.batch.plan import batch_images
from sana_core.batch.prompts import OPTIONS, Prompt, column_name, read_prompts, split_prompts
from sana_core.commands.options import add_settings

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


def read_texts(file):
    return [prompt.text for prompt in read_prompts(file)]


example_client = runpy.run_path(str(ROOT / "docs" / "examples" / "queue_prompts.py"))["read_prompts"]


@pytest.mark.parametrize("reader", [read_texts, example_client], ids=["batch", "example client"])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_a_prompt_with_another_separator_stays_one_prompt(tmp_path, reader, inside):
    file = tmp_path / "prompts.txt"
    file.write_bytes(f"a cat{inside}on a mat\r\na dog\n".encode())
    assert reader(file) == [f"a cat{inside}on a mat", "a dog"]


@pytest.mark.parametrize("reader", [read_texts, example_client], ids=["batch", "example client"])
@pytest.mark.parametrize("content, prompts", FILES.values(), ids=FILES)
def test_lines_of_a_file_are_its_prompts(tmp_path, reader, content, prompts):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content.encode())
    assert reader(file) == prompts


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n\ufeff\n", "\u2028\x85\x0c"])
def test_a_file_without_prompts_is_refused(tmp_path, content):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content.encode())
    with pytest.raises(InputError, match="^prompts: .*prompts.txt holds no prompt; write one a line$"):
        read_prompts(file)
    with pytest.raises(SystemExit, match="got no prompt, expected one a line"):
        example_client(file)
    assert split_prompts(content) == []


def write(folder, name, content):
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


CAT, DOG = Prompt("a cat, sitting", 3), Prompt("a dog")
TABLES = {
    "one column": ("prompt\na cat\na dog\n", [Prompt("a cat"), DOG]),
    "quotes": ('prompt,seed\n"a cat, sitting",3\na dog,\n', [CAT, DOG]),
    "mark and windows": ('\ufeffprompt,seed\r\n"a cat, sitting",3\r\na dog\r\n', [CAT, DOG]),
    "old mac": ('prompt,seed\r"a cat, sitting",3\ra dog,\r', [CAT, DOG]),
    "semicolons": ("prompt;seed\na cat, sitting;3\na dog;\n", [CAT, DOG]),
    "tabs": ("prompt\tseed\na cat, sitting\t3\na dog\t\n", [CAT, DOG]),
    "other order": ('seed,prompt\n3,"a cat, sitting"\n,a dog\n', [CAT, DOG]),
    "capitals and spaces": ('Prompt , SEED\n" a cat, sitting ", 3 \n a dog,\n', [CAT, DOG]),
    "empty rows": ('prompt,seed\n\n"a cat, sitting",3\n,\n  ,\na dog,\n\n', [CAT, DOG]),
    "other columns": ('id,prompt,seed,note\n1,"a cat, sitting",3,good\n2,a dog,,\n', [CAT, DOG]),
    "seeds of a spreadsheet": ('prompt,seed\n"a cat, sitting",3.0\na dog,\n', [CAT, DOG]),
    "caption": ('caption,seed\n"a cat, sitting",3\na dog,\n', [CAT, DOG]),
    "prompt and text": ('text,prompt,seed\nx,"a cat, sitting",3\ny,a dog,\n', [CAT, DOG]),
    "empty settings": ('prompt,seed,width,negative_prompt\n"a cat, sitting",3,,\na dog,,, \n', [CAT, DOG]),
    "lines in quotes": ('prompt\n"two\nlines"\n', [Prompt("two\nlines")]),
    "quotes in quotes": ('prompt\n"a ""nice"" cat"\n', [Prompt('a "nice" cat')]),
    "separators": ("prompt\na cat\u2028on a mat\x85\na\x0cdog", [Prompt("a cat\u2028on a mat"), Prompt("a\x0cdog")]),
    "largest seed": (f"prompt,seed\na dog,{2**64 - 1}\n", [Prompt("a dog", 2**64 - 1)]),
}
JSON_LINES = {
    "objects": ('{"prompt": "a cat, sitting", "seed": 3}\n{"prompt": "a dog"}\n', [CAT, DOG]),
    "texts": ('"a cat"\n"a dog"', [Prompt("a cat"), DOG]),
    "mark, windows, empty lines": (
        '\ufeff{"prompt": "a cat, sitting", "seed": 3}\r\n\r\n {"prompt": " a dog "}',
        [CAT, DOG],
    ),
    "null": ('{"prompt": "a dog", "seed": null, "width": null, "negative": ""}', [DOG]),
    "seed as text": ('{"Prompt": "a cat, sitting", "Seed": "3"}\n"a dog"', [CAT, DOG]),
    "seed as float": ('{"prompt": "a cat, sitting", "seed": 3.0}\n"a dog"', [CAT, DOG]),
    "text": ('{"text": "a dog", "image": "a.png", "tags": ["x"]}', [DOG]),
    "lines": ('{"prompt": "two\\nlines"}', [Prompt("two\nlines")]),
    "separators": ('{"prompt": "a\u2028cat\x85x"}\n"a dog"', [Prompt("a\u2028cat\x85x"), DOG]),
    "escapes": ('{"prompt": "\\u732b"}', [Prompt("\u732b")]),
}


@pytest.mark.parametrize("ending", [".csv", ".CSV", ".tsv"])
@pytest.mark.parametrize("content, prompts", TABLES.values(), ids=TABLES)
def test_a_table_has_prompts_and_seeds(tmp_path, ending, content, prompts):
    assert read_prompts(write(tmp_path, f"p{ending}", content)) == prompts


@pytest.mark.parametrize("content, prompts", JSON_LINES.values(), ids=JSON_LINES)
def test_json_lines_and_json_lists_have_prompts_and_seeds(tmp_path, content, prompts):
    for name in ("p.jsonl", "p.ndjson"):
        assert read_prompts(write(tmp_path, name, content)) == prompts
    lines = [line for line in content.removeprefix("\ufeff").split("\n") if line.strip()]
    assert read_prompts(write(tmp_path, "p.json", f"[{', '.join(lines)}]\n")) == prompts


SHARED = {
    "width": "--width and --height",
    "Height": "--width and --height",
    "resolution": "--width and --height",
    "negative": "--negative-prompt",
    "Negative Prompt": "--negative-prompt",
    "negative_prompt": "--negative-prompt",
    "steps": "--steps",
    "num-inference-steps": "--steps",
    "cfg scale": "--guidance",
    "guidance": "--guidance",
    "sampler": "--sampler",
    "count": "--count",
    "lora": "--lora",
    "model": "--checkpoint",
}


@pytest.mark.parametrize("column, option", SHARED.items(), ids=SHARED)
def test_settings_that_all_images_share_are_refused_by_name(tmp_path, column, option):
    name = column_name(column)
    refusal = (
        f"line 2: got {name} 7, expected only prompt and seed, .*; remove {name} and use {option}, with a batch for"
    )
    with pytest.raises(InputError, match=f"^prompts: p.csv {refusal}"):
        read_prompts(write(tmp_path, "p.csv", f"prompt,{column}\na cat,7\n"))
    with pytest.raises(InputError, match=f"^prompts: p.jsonl {refusal}"):
        read_prompts(write(tmp_path, "p.jsonl", '{"prompt": "a"}\n' + json.dumps({"prompt": "b", column: 7})))


def test_every_setting_of_a_batch_is_refused_as_a_column():
    parser = argparse.ArgumentParser()
    add_settings(parser)
    settings = {action.dest for action in parser._actions} - {"help"}
    assert settings <= OPTIONS.keys()
    assert {option.removeprefix("--").replace("-", "_") for option in OPTIONS.values()} >= settings - {
        "width",
        "height",
    }


BROKEN = {
    "no heading": (
        "p.csv",
        "a cat, sitting,3\n",
        "p.csv: got no column prompt in the first line, expected a line like",
    ),
    "empty table": ("p.csv", "\n", "p.csv: got no column prompt"),
    "prompt twice": ("p.csv", "prompt,Prompt\na,b\n", "p.csv: got the column prompt twice, expected it once"),
    "comma without quotes": ("p.csv", "prompt,seed\n\na cat, sitting,3\n", "p.csv line 3: got 3 values, expected 2 as"),
    "open quote": ("p.csv", 'prompt\n"a cat\na dog\n', r"p.csv line \d: no row \(unexpected end of data\)"),
    "text behind a quote": ("p.csv", 'prompt\n"a" cat\n', r"p.csv line 2: no row \("),
    "long": ("p.csv", f"prompt\n{'a' * 140_000}\n", r"p.csv line \d: no row \(field larger than field limit"),
    "no prompt": ("p.csv", "prompt,seed\na,1\n,5\n", "p.csv line 3: got None for its prompt, expected a text"),
    "only a heading": ("p.csv", "prompt,seed\n", ".*p.csv holds no prompt"),
    "seed -1": ("p.csv", "prompt,seed\na,-1\n", "p.csv line 2: got seed -1, expected a whole number from 0 to 1844"),
    "seed 1.5": ("p.jsonl", '{"prompt": "a", "seed": 1.5}', "p.jsonl line 1: got seed 1.5, expected a whole"),
    "seed too large": (
        "p.jsonl",
        f'{{"prompt": "a", "seed": {2**64}}}',
        "p.jsonl line 1: got seed 1844674407370955161",
    ),
    "seed true": ("p.jsonl", '{"prompt": "a", "seed": true}', "p.jsonl line 1: got seed True"),
    "seed random": ("p.jsonl", '{"prompt": "a", "seed": "random"}', "p.jsonl line 1: got seed random"),
    "seeds": ("p.jsonl", '{"prompt": "a", "seed": [1, 2]}', r"p.jsonl line 1: got seed \[1, 2\]"),
    "no json": ("p.jsonl", '"a"\na cat\n', r"p.jsonl line 2: no JSON \("),
    "number": ("p.jsonl", "5", "p.jsonl line 1: got 5 for its prompt, expected a text"),
    "prompts": (
        "p.jsonl",
        '{"prompt": ["a", "b"]}',
        r"p.jsonl line 1: got \['a', 'b'\] for its prompt, expected a text",
    ),
    "empty prompt": ("p.jsonl", '{"prompt": " "}', "p.jsonl line 1: got None for its prompt"),
    "half a character": ("p.jsonl", '"\\ud800"', "p.jsonl line 1: contains half a character"),
    "deep": ("p.jsonl", "[" * 100_000, "p.jsonl line 1: its JSON nests too deeply"),
    "object": ("p.json", '{"prompts": ["a"]}', "p.json: got .*, expected a JSON list of prompts"),
    "lines": ("p.json", '"a"\n"b"', r"p.json: no JSON \(Extra data.*; correct it, or name it .jsonl if"),
    "entry": ("p.json", '["a", 5]', "p.json entry 2: got 5 for its prompt"),
    "empty list": ("p.json", "[]", ".*p.json holds no prompt"),
    "utf-16": ("p.csv", "prompt\na\n".encode("utf-16"), ".*p.csv is not UTF-8 at byte 0"),
    "lines as text": ("p.txt", '\n{"prompt": "a"}\n{"prompt": "b"}', ".*p.txt holds JSON, .*; rename it to p.jsonl$"),
    "list as text": ("p.txt", '[\n"a",\n"b"\n]\n', ".*p.txt holds JSON, .*; rename it to p.json$"),
    "table as text": ("p.txt", 'prompt,seed\n"a, b",3\n', ".*p.txt holds a table, .*; rename it to p.csv$"),
    "table without ending": ("p", "Seed;Prompt\n3;a\n", ".*p holds a table, .*; rename it to p.csv$"),
}


@pytest.mark.parametrize("name, content, said", BROKEN.values(), ids=BROKEN)
def test_a_row_that_cannot_be_followed_is_named(tmp_path, name, content, said):
    with pytest.raises(InputError, match=f"^prompts: {said}") as caught:
        read_prompts(write(tmp_path, name, content))
    assert "\n" not in str(caught.value) and str(caught.value).isascii()


@pytest.mark.parametrize(
    "line", ["[1girl, solo]", "{red|blue} cat", '{"subject": "a cat"}', "prompt", "prompt, seed and soil", "5", '"a"']
)
def test_text_that_resembles_json_or_a_table_is_a_prompt(tmp_path, line):
    assert read_texts(write(tmp_path, "p.txt", f"{line}\na dog")) == [line, "a dog"]


def test_columns_that_are_not_used_are_named_once(tmp_path, caplog):
    rows = "".join(f"{number},a cat,x\n" for number in range(5))
    read_prompts(write(tmp_path, "p.csv", f"Id,prompt,Note\n{rows}"))
    assert [record.getMessage() for record in caplog.records] == [
        "prompts: p.csv: id, note not used, only prompt and seed"
    ]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".json", ".jsonl"])
def test_the_example_client_refuses_other_files(tmp_path, ending):
    with pytest.raises(SystemExit, match=f"got a {ending} file, expected a text file with one prompt a line"):
        example_client(write(tmp_path, f"p{ending}", "a cat"))


def test_each_prompt_can_have_its_own_seed():
    images = batch_images(4, 2, [7, 7, 2**64 - 1, 7])
    assert [image.seed for image in images] == [7, 8, 7, 8, 2**64 - 1, 0, 7, 8]
    assert [image.prompt for image in images] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(claims_of(images)) == [(0, 2, 7, 2), (2, 3, 2**64 - 1, 2), (3, 4, 7, 2)]
    with pytest.raises(InputError, match="^seed: got -1"):
        batch_images(2, 1, [3, -1])
