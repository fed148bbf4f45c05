"""Values as text in errors and logs, and the type of JSON objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# A JSON object: a configuration, an index or metadata.
Json = dict[str, Any]


def shown(file: Path) -> str:
    """Return the name of a file for errors, with its folder: file names in diffusers' folders are all the same."""
    return f"{file.parent.name}/{file.name}"


def brief(value: object, length: int = 60) -> str:
    """Return `value` for an error: in ASCII, on one line, no longer than `length`.

    An error of the operating system becomes its reason, without its number and the name of the file.
    """
    if isinstance(value, OSError) and value.strerror:
        value = value.strerror
    text = str(value) if isinstance(value, str | Exception) else repr(value)[: 10 * length]
    text = ascii(" ".join(text[: 10 * length].split()))[1:-1]
    return text if len(text) <= length else f"{text[: length - 3]}..."
