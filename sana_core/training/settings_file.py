"""A training run's TOML file as TrainingSettings, with the nearest name for a key that nothing reads."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from ..errors import InputError
from ..runtime.text import Json
from ..runtime.user_files import read_user_file
from .settings import Place, TrainingSettings, check_settings

LARGEST_FILE = 1_000_000
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
SINGLE_QUOTES = "write a path with backslashes in single quotes, or with /"


def read_settings(file: Path) -> TrainingSettings:
    """Return the settings in the TOML file `file`, whose paths are relative to its folder.

    Raises MissingFileError, ReadError, and InputError for what is no TOML, an unknown or missing key, and values that
    are out of range.
    """
    data = read_user_file("settings", file, "a TOML file as in recipes/", LARGEST_FILE + 1)
    settings = parse(TrainingSettings, parse_toml(data, file.name), file.name, file.parent)
    try:
        return check_settings(settings)
    except InputError as error:
        raise type(error)(f"{file.name}: {error}") from None


def parse_toml(data: bytes, name: str) -> Json:
    """Return the tables of `data`. Raises InputError, with the file's `name`, for what is no TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    if len(data) > LARGEST_FILE:
        raise InputError(f"{name}: got more than {LARGEST_FILE} bytes, expected a TOML file; name another")
    try:
        # Windows editors put a byte order mark before the text.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: got a file that is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    try:
        return tomllib.loads(text)
    # a deep nesting ends in RecursionError
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        has_backslash = line is not None and "\\" in text.split("\n")[int(line[1]) - 1]
        remedy = SINGLE_QUOTES if has_backslash else "correct that line"
        raise InputError(f"{name}: not TOML ({str(error) or 'nested too deeply'!s:.80}); {remedy}") from None


def parse(kind: type, table: object, name: str, folder: Path) -> Any:
    """Return `table` as the dataclass `kind`, tables within it as its fields' dataclasses, places as those in `folder`;
    `name` is for errors."""
    if not isinstance(table, Mapping):
        raise InputError(f"{name}: got {table!r:.40}, expected a table; see recipes/")
    known = get_type_hints(kind, include_extras=True)
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.0)[0]
            raise InputError(f"{name}: got the key {key!r:.40}, which nothing reads; the nearest is {near}")
    needed = {each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING}
    for key in sorted(needed - table.keys()):
        raise InputError(f"{name}: {key} is missing; add it")
    return kind(**{key: parse_value(known[key], value, f"{name}: {key}", folder) for key, value in table.items()})


def parse_value(kind: Any, value: object, name: str, folder: Path) -> Any:
    if get_origin(kind) is Annotated:
        found = parse_value(get_args(kind)[0], value, name, folder)
        if kind != Place or not found:
            return found
        if CONTROL.search(found):
            # "D:\new\train" in double quotes
            raise InputError(f"{name}: got {found!r:.80}, a path with a control character; {SINGLE_QUOTES}")
        return str(folder / found)
    if is_dataclass(kind) and isinstance(kind, type):
        return parse(kind, value, name, folder)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        # one word stands for a list of one
        values = [value] if inner in (str, Place) and isinstance(value, str) else value
        if is_dataclass(inner) and isinstance(value, Mapping):
            raise InputError(f"{name}: got [phase], expected a list of tables; write [[phase]]")
        if not isinstance(values, list):
            raise InputError(f"{name}: got {value!r:.40}, expected a list; put it into brackets")
        return tuple(parse_value(inner, each, name, folder) for each in values)
    kinds = [each for each in get_args(kind) or (kind,) if each is not type(None)]
    if kinds[0] is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kinds[0]:
        words = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
        raise InputError(f"{name}: got {value!r:.40}, expected {words[kinds[0]]}; correct it")
    return value
