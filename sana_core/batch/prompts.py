"""Prompts of a batch: the lines of a text, or the rows of a table or of JSON, which may have seeds as well."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..errors import InputError
from ..runtime.checks import check_text
from ..runtime.text import Json, brief, get_logger
from ..runtime.user_files import read_user_file
from .plan import LARGEST_SEED

logger = get_logger(__name__)

BOM = "\ufeff"
LINE_END = re.compile(r"\r\n|\r|\n")
# Columns of a table and keys of JSON that can hold the prompt. The first one that a row has is used.
PROMPT = ("prompt", "caption", "text")
SEED = "seed"
# Columns with settings that all images of a batch share: the options for them.
OPTIONS = MappingProxyType(
    {
        **dict.fromkeys(("width", "height", "size", "resolution", "aspect_ratio"), "--width and --height"),
        **dict.fromkeys(("negative_prompt", "negative", "negative_text"), "--negative-prompt"),
        **dict.fromkeys(("steps", "num_steps", "num_inference_steps"), "--steps"),
        **dict.fromkeys(("guidance", "guidance_scale", "cfg", "cfg_scale"), "--guidance"),
        **dict.fromkeys(("sampler", "sampler_name"), "--sampler"),
        **dict.fromkeys(("count", "n", "batch_size", "num_images"), "--count"),
        **dict.fromkeys(("lora", "loras"), "--lora"),
        **dict.fromkeys(("checkpoint", "model"), "--checkpoint"),
        **{name: f"--{name.replace('_', '-')}" for name in ("pag_scale", "pag_blocks", "guidance_interval")},
        **{name: f"--{name}" for name in ("reference", "dtype", "compile")},
    }
)
DELIMITERS = (",", ";", "\t")


class Prompt(NamedTuple):
    text: str
    # The seed of its first image. None: the seed of the batch.
    seed: int | None = None


# How errors name a row of a file, and its value: an object with the columns, or a text.
Row = tuple[str, object]


def split_prompts(text: str) -> list[str]:
    """Return the lines of `text` that are not empty, without a byte order mark and without spaces at their ends.

    Only \\n, \\r\\n and \\r end a line. str.splitlines would also split a prompt at U+2028, U+0085 and the control
    characters VT, FF and FS, which web pages and PDFs contain.
    """
    # Files that were joined can have a byte order mark in any line.
    lines = [line.strip().removeprefix(BOM).strip() for line in LINE_END.split(text)]
    return [line for line in lines if line]


def read_prompts(file: Path) -> list[Prompt]:
    """Return the prompts in `file`. READERS has the endings of tables and JSON. Others have one prompt per line."""
    content = read_user_file("prompts", file, "a text file with one prompt a line")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"prompts: {file} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        check_plain(text, file)
        prompts = [Prompt(line) for line in split_prompts(text)]
    else:
        unused: dict[str, None] = {}
        prompts = [prompt_of(where, values, unused) for where, values in reader(text, file.name)]
        if unused:
            logger.warning("prompts: %s: %s not used, only prompt and seed", file.name, brief(", ".join(unused), 200))
    if not prompts:
        raise InputError(f"prompts: {file} holds no prompt; write one a line")
    return prompts


def read_table(text: str, name: str) -> Iterator[Row]:
    """Yield the rows of a table whose first line names the columns. Rows without any value are left out."""
    for delimiter in DELIMITERS:
        # strict: a quote that is never closed is an error. Otherwise, all rows after it would become one prompt.
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        try:
            columns = next(reader, [])
            names = [column_name(column) for column in columns]
            if not set(PROMPT).intersection(names):
                continue
            twice = next((name for name in (*PROMPT, SEED) if names.count(name) > 1), None)
            if twice:
                raise InputError(f"prompts: {name}: got the column {twice} twice, expected it once; remove one")
            for values in reader:
                where = f"prompts: {name} line {reader.line_num}"
                if len(values) > len(columns):
                    raise InputError(
                        f"{where}: got {len(values)} values, expected {len(columns)} as in the first line; put prompts "
                        f'with {delimiter!r} in "quotes"'
                    )
                if any(value.strip() for value in values):
                    yield where, dict(zip(columns, values, strict=False))
            return
        except csv.Error as error:
            raise InputError(f"prompts: {name} line {reader.line_num}: no row ({brief(error)}); correct it") from None
    raise InputError(
        f"prompts: {name}: got no column prompt in the first line, expected a line like prompt,seed; add it"
    )


def read_json_lines(text: str, name: str) -> Iterator[Row]:
    for number, line in enumerate(LINE_END.split(text), 1):
        if line.strip():
            where = f"prompts: {name} line {number}"
            yield where, parse(line, where, "correct it")


def read_json_list(text: str, name: str) -> Iterator[Row]:
    entries = parse(text, f"prompts: {name}", "correct it, or name it .jsonl if each line is JSON")
    if not isinstance(entries, list):
        raise InputError(f"prompts: {name}: got {brief(entries)}, expected a JSON list of prompts; put it in [ ]")
    yield from ((f"prompts: {name} entry {number}", entry) for number, entry in enumerate(entries, 1))


# How files are read, by the ending of their names.
READERS: MappingProxyType[str, Callable[[str, str], Iterator[Row]]] = MappingProxyType(
    {
        ".csv": read_table,
        ".tsv": read_table,
        ".json": read_json_list,
        ".jsonl": read_json_lines,
        ".ndjson": read_json_lines,
    }
)


def parse(text: str, where: str, remedy: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise InputError(f"{where}: its JSON nests too deeply; write it again") from None
    except ValueError as error:
        raise InputError(f"{where}: no JSON ({brief(error)}); {remedy}") from None


def column_name(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def prompt_of(where: str, values: object, unused: dict[str, None]) -> Prompt:
    """Return the prompt in a row. Columns that do not change the image are added to `unused`."""
    row: Json = values if isinstance(values, dict) else {PROMPT[0]: values}
    # Empty columns change nothing.
    filled = {column_name(name): value for name, value in row.items() if value is not None and str(value).strip()}
    column = next((name for name in PROMPT if name in filled), PROMPT[0])
    text = filled.pop(column, None)
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: got {brief(text)} for its prompt, expected a text; write one, or remove it")
    check_text(where, text)
    seed = None if SEED not in filled else seed_of(where, filled.pop(SEED))
    for name in filled:
        if name in OPTIONS:
            raise InputError(
                f"{where}: got {name} {brief(filled[name])}, expected only prompt and seed, because all images of a "
                f"batch share the other settings; remove {name} and use {OPTIONS[name]}, with a batch for each value"
            )
    unused |= dict.fromkeys(filled)
    return Prompt(text.strip(), seed)


def seed_of(where: str, value: object) -> int:
    """Return the seed that a row has, as a number or as text. Spreadsheets write whole numbers like 3.0."""
    digits = re.fullmatch(r"\s*(\d{1,20})(\.0*)?\s*", str(value), re.ASCII)
    if isinstance(value, bool) or digits is None or int(digits[1]) > LARGEST_SEED:
        raise InputError(f"{where}: got seed {brief(value)}, expected a whole number from 0 to {LARGEST_SEED}")
    return int(digits[1])


def check_plain(text: str, file: Path) -> None:
    """Raise InputError for JSON and for a table in a file that has another ending, such as .txt."""
    first = next(iter(split_prompts(text)), "")
    ending = ""
    for ending, content in ((".jsonl", first), (".json", text)):
        if content.lstrip(BOM).lstrip().startswith(("{", "[")):
            try:
                value = json.loads(content)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, list) or any(column_name(name) in PROMPT for name in value):
                raise InputError(
                    f"prompts: {file} holds JSON, expected one prompt a line; rename it to {file.stem}{ending}"
                )
    for delimiter in DELIMITERS:
        columns = {column_name(column) for column in first.split(delimiter)}
        if len(columns) > 1 and PROMPT[0] in columns and columns <= {*PROMPT, SEED, *OPTIONS}:
            raise InputError(f"prompts: {file} holds a table, expected one prompt a line; rename it to {file.stem}.csv")
