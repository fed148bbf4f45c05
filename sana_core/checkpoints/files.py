"""A model's files as bytes and as JSON: only regular files of bounded size are opened; errors say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG

from ..errors import CheckpointError, MissingFileError, ReadError, SanaError
from ..runtime.text import Json, brief, shown

REDOWNLOAD = "download it again"
INCOMPLETE = f"the file is incomplete, or of another model: {REDOWNLOAD}"
# characters of a file's name in an error
LONGEST_NAME = 240
# configurations and indexes of SANA's models have under 1 MB
LARGEST_TEXT = 16_000_000
LFS_POINTER = b"version https://git-lfs"
WEB_PAGE = (b"<!doctype", b"<html", b"<?xml")
# bytes that tell both
START = 64


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise ReadError with the name of `path` where the operating system refuses an operation in this context.

    Path.exists() raises for a name that is too long and for a path in a folder without permission.
    """
    try:
        yield
    except SanaError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ReadError(
            f"{brief(shown(path), LONGEST_NAME)}: cannot be read ({reason}); see its rights, its links and its disk"
        ) from error


@contextmanager
def opened(file: Path) -> Iterator[tuple[BufferedReader, int]]:
    """Give `file`, open to be read, and its bytes' number.

    Raises MissingFileError, ReadError, and CheckpointError for what is no regular file: to open a pipe would wait for
    ever.
    """
    with readable(file):
        try:
            status = file.stat()
            if not S_ISREG(status.st_mode):
                raise CheckpointError(
                    f"{shown(file)}: got a folder, pipe or device, expected a regular file; put the file there instead"
                )
            with file.open("rb") as stream:
                yield stream, status.st_size
        except FileNotFoundError:
            raise MissingFileError(f"{shown(file)}: no such file; refresh the list, or {REDOWNLOAD}") from None


def read_bytes(file: Path, largest: int) -> bytes:
    """Return what is in `file`.

    Raises MissingFileError, ReadError, and CheckpointError for what is no regular file, for more than `largest` bytes,
    and for what a browser or git puts in a file's place.
    """
    with opened(file) as (stream, size):
        if size > largest:
            raise CheckpointError(f"{shown(file)}: got {size} bytes, expected at most {largest}; {REDOWNLOAD}")
        content = stream.read(largest)
    check_start(file, content[:START])
    return content


def check_start(file: Path, start: bytes) -> None:
    """Raise CheckpointError for what a browser or git puts in a file's place; `start` are its first bytes."""
    if start.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{shown(file)}: got a git-lfs pointer instead of the model; run git lfs pull in its folder, or download "
            "the file in the browser"
        )
    if start.lstrip().lower().startswith(WEB_PAGE):
        raise CheckpointError(
            f"{shown(file)}: got a web page, not the file; {REDOWNLOAD} by its download link, "
            "logged in if it asks for that"
        )


def unique(pairs: list[tuple[str, object]]) -> Json:
    """Return the dict of `pairs`. Raises ValueError for a key that stands twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key stands twice in it")
    return content


def parse_json(text: str | bytes, name: str, make: Callable | None = unique) -> Json:
    """Return the JSON object that `text` is; `name` is how errors call it, `make` a dict of its pairs.

    Raises CheckpointError for anything else, with `unique` also for a key that stands twice.
    """
    try:
        content = json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=make)
    except RecursionError:
        raise CheckpointError(f"{name}: its JSON nests too deeply; {REDOWNLOAD}") from None
    except ValueError as error:
        raise CheckpointError(f"{name}: not JSON ({brief(error)}); {REDOWNLOAD}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: got JSON that is a {type(content).__name__}, expected an object; {REDOWNLOAD}")
    return content


def read_json(file: Path) -> Json:
    """Return the JSON object in `file`.

    Raises CheckpointError for anything else and for more than 16 MB, MissingFileError, and ReadError.
    """
    return parse_json(read_bytes(file, LARGEST_TEXT), shown(file))
