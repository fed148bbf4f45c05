"""Prompts of a batch: the lines of a text, or of a file."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import InputError
from ..runtime.user_files import read_user_file

BOM = "\ufeff"


def split_prompts(text: str) -> list[str]:
    """Return the lines of `text` that are not empty, without a byte order mark and without spaces at their ends.

    Only \\n, \\r\\n and \\r end a line. str.splitlines would also split a prompt at U+2028, U+0085 and the control
    characters VT, FF and FS, which web pages and PDFs contain.
    """
    # Files that were joined can have a byte order mark in any line.
    lines = [line.strip().removeprefix(BOM).strip() for line in re.split(r"\r\n|\r|\n", text)]
    return [line for line in lines if line]


def read_prompts(file: Path) -> list[str]:
    """Return the prompts in `file`, one from each line.

    Raises InputError if there are none and if the file is not UTF-8, MissingFileError, and ReadError.
    """
    content = read_user_file("prompts", file, "a text file with one prompt a line")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"prompts: {file} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    prompts = split_prompts(text)
    if not prompts:
        raise InputError(f"prompts: {file} holds no prompt; write one a line")
    return prompts
