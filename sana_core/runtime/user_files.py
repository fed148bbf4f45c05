"""Reads files that a user names on the command line, other than model files."""

from __future__ import annotations

from pathlib import Path
from stat import S_ISREG

from ..errors import MissingFileError, ReadError


def read_user_file(field: str, file: Path, expected: str, max_bytes: int = -1) -> bytes:
    """Return the content of `file`, or its first `max_bytes` bytes.

    Errors begin with `field` and contain `expected`, a description of a right file. Raises MissingFileError, and
    ReadError for anything but a readable file.
    """
    shown = f"{str(file):.240}"
    try:
        if file.is_dir():
            raise ReadError(f"{field}: got the folder {shown}, expected {expected}; name a file")
        # Opening a pipe waits until another program writes into it, and /dev/zero never ends.
        if not S_ISREG(file.stat().st_mode):
            raise ReadError(f"{field}: got {shown}, a pipe, socket or device, expected {expected}; name a file")
        with file.open("rb") as stream:
            return stream.read(max_bytes)
    except FileNotFoundError:
        raise MissingFileError(f"{field}: no such file {shown}, expected {expected}; check its spelling") from None
    except ReadError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ReadError(f"{field}: {shown} cannot be read ({reason}); check its permissions") from None
