"""Text from outside in errors, logs and nodes, and the type of JSON objects.

Names of files, prompts and the content of files may contain anything: half surrogates, line breaks, megabytes. Every
SanaError and every line of a log passes through `one_line`, so its caller may insert any value.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from reprlib import Repr
from typing import Any

# A JSON object: a configuration, an index or metadata.
Json = dict[str, Any]

# Most characters of an error or of a line in a log. An error that lists the choices of a loader is long.
LONGEST_LINE = 2000
# Most characters of a line in a command's results.
LONGEST_RESULT = 10_000
# Characters that stay at the end of a line that is too long, because errors end with their remedy.
TAIL = 400
# Names that a list of tensors has.
LISTED = 3


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Return `text` as one line that any log can write. ComfyUI runs no more graphs after it fails to write its log.

    A text of more than `longest` characters loses its middle. Then unprintable characters are escaped as in Python:
    line breaks, marks that reverse the direction, and half surrogates. Characters that stdout or stderr cannot encode
    are escaped too.
    """
    if len(text) > longest:
        tail = min(TAIL, longest // 2)
        text = f"{text[: longest - tail - 5]} ... {text[-tail:]}"
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def write_lines(*lines: object, flush: bool = False) -> None:
    """Write the results of a command to stdout. `flush`: before the command ends, so that a pipe shows its progress."""
    for line in lines:
        sys.stdout.write(f"{one_line(str(line), LONGEST_RESULT)}\n")
    if flush:
        sys.stdout.flush()


def shown(file: Path) -> str:
    """Return the name of a file for errors, with its folder: file names in diffusers' folders are all the same."""
    return f"{file.parent.name}/{file.name}"


def brief(value: object, length: int = 60) -> str:
    """Return `value` for an error: in ASCII, on one line, no longer than `length`.

    An error of the operating system becomes its reason, without its number and the name of the file.
    """
    if isinstance(value, OSError) and value.strerror:
        value = value.strerror
    if not isinstance(value, str | Exception):
        # The repr of a nested value takes exponential time if its parts are shared.
        shortened = Repr()
        shortened.maxlevel, shortened.maxstring, shortened.maxother = 3, 10 * length, 10 * length
        value = shortened.repr(value)
    text = ascii(" ".join(str(value)[: 10 * length].split()))[1:-1]
    return text if len(text) <= length else f"{text[: length - 3]}..."


def first_few(names: Iterable[str]) -> str:
    """Return the first of `names` in order for an error or a note, and the number of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return ", ".join(brief(name, 90) for name in ordered[:LISTED]) + more


class OneLineLogger(logging.LoggerAdapter):
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            self.logger.log(level, "%s", one_line(str(msg) % args if args else str(msg)), **kwargs)


def get_logger(name: str) -> OneLineLogger:
    return OneLineLogger(logging.getLogger(name), {})
