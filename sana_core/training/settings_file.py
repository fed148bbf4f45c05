"""The TOML file of a training run: reading it as TrainingSettings, and a description of its keys."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from ..errors import InputError
from ..runtime.text import Json
from ..runtime.user_files import read_user_file
from .settings import TABLES, Place, TrainingSettings, check_settings, describe_field

LARGEST_FILE = 1_000_000
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
SINGLE_QUOTES = "write a path with backslashes in single quotes, or with /"
# Columns of the description.
WIDTH = 100
# Larger limits only prevent overflows, and the description leaves them out.
LARGEST_LIMIT = 10**5


def describe_settings() -> str:
    """Return all keys of a settings file with their defaults as TOML, and above each its description and range."""
    lines: list[str] = []
    for table, kind in TABLES.items():
        if table:
            lines += ["", f"# {kind.__doc__ or table}", "[[phase]]" if table == "phase" else f"[{table}]"]
        for row in fields(kind):
            if row.name in TABLES:
                continue
            info = describe_field(f"{table}.{row.name}")
            comment = info.help
            if info.names:
                comment += f" One of {', '.join(info.names)}."
            elif info.low is not None and info.high is not None:
                limit = f"{info.low:g} to {info.high:g}" if info.high <= LARGEST_LIMIT else f"at least {info.low:g}"
                comment += f" Range: {limit}."
            lines += wrap(comment, WIDTH, initial_indent="# ", subsequent_indent="# ")
            if info.default is MISSING:
                lines.append(f'{row.name} = ""  # required')
            else:
                # TOML has no value for "not set".
                lines.append(f"# {row.name} =" if info.default is None else f"{row.name} = {json.dumps(info.default)}")
    return "\n".join(lines)


def read_settings(file: Path) -> TrainingSettings:
    """Return the settings in the TOML file `file`. Paths in it are relative to its folder.

    Raises MissingFileError, ReadError, and InputError for text that is no TOML, for an unknown or missing key, and for
    values that are out of range.
    """
    data = read_user_file("settings", file, "a TOML file as in recipes/", LARGEST_FILE + 1)
    settings = parse(TrainingSettings, parse_toml(data, file.name), file.name, file.parent)
    try:
        return check_settings(settings)
    except InputError as error:
        raise type(error)(f"{file.name}: {error}") from None


def parse_toml(data: bytes, name: str) -> Json:
    """Return the tables of `data`. Errors call the file `name`."""
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
    # RecursionError: tables that are nested too deeply.
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        has_backslash = line is not None and "\\" in text.split("\n")[int(line[1]) - 1]
        remedy = SINGLE_QUOTES if has_backslash else "correct that line"
        raise InputError(f"{name}: not TOML ({str(error) or 'nested too deeply'!s:.80}); {remedy}") from None


def parse(kind: type, table: object, name: str, folder: Path) -> Any:
    """Return `table` as the dataclass `kind`. Its paths are relative to `folder`. Errors call it `name`."""
    if not isinstance(table, Mapping):
        raise InputError(f"{name}: got {table!r:.40}, expected a table; see recipes/")
    hints = get_type_hints(kind, include_extras=True)
    for key in table:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1, 0.0)[0]
            raise InputError(f"{name}: got the key {key!r:.40}, which nothing reads; the nearest is {near}")
    required = {row.name for row in fields(kind) if row.default is MISSING and row.default_factory is MISSING}
    for key in sorted(required - table.keys()):
        raise InputError(f"{name}: {key} is missing; add it")
    return kind(**{key: parse_value(hints[key], value, f"{name}: {key}", folder) for key, value in table.items()})


def parse_value(kind: Any, value: object, name: str, folder: Path) -> Any:
    if get_origin(kind) is Annotated:
        path = parse_value(get_args(kind)[0], value, name, folder)
        if not path:
            return path
        if CONTROL.search(path):
            # For example "D:\new\train" in double quotes.
            raise InputError(f"{name}: got {path!r:.80}, a path with a control character; {SINGLE_QUOTES}")
        return str(folder / path)
    if is_dataclass(kind) and isinstance(kind, type):
        return parse(kind, value, name, folder)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        # A single text is a list of one.
        values = [value] if inner in (str, Place) and isinstance(value, str) else value
        if is_dataclass(inner) and isinstance(value, Mapping):
            raise InputError(f"{name}: got [phase], expected a list of tables; write [[phase]]")
        if not isinstance(values, list):
            raise InputError(f"{name}: got {value!r:.40}, expected a list; put it into brackets")
        return tuple(parse_value(inner, item, name, folder) for item in values)
    plain = next(option for option in get_args(kind) or (kind,) if option is not type(None))
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not plain:
        words = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
        raise InputError(f"{name}: got {value!r:.40}, expected {words[plain]}; correct it")
    return value
