"""Files that a user names, or parts of them such as the member of a tar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import IO, NamedTuple

from ..errors import InputError, MissingFileError, ReadError, SanaError
from .atomic_files import reason_of

# Bytes. A whole file is read into memory.
LARGEST_FILE = 1 << 30


class FileRange(NamedTuple):
    """A file, or the part of it that contains a tar's member."""

    file: Path
    start: int = 0
    # None: to the end of the file.
    length: int | None = None


@contextmanager
def opened_range(place: FileRange, name: str, largest: int = LARGEST_FILE) -> Iterator[tuple[IO[bytes], int]]:
    """Open the bytes at `place`. Yields a stream and the number of bytes. Errors call the file `name`."""
    from PIL.ContainerIO import ContainerIO

    try:
        status = place.file.stat()
        if not S_ISREG(status.st_mode):
            # Opening a pipe would block for ever.
            raise InputError(f"{name}: got a folder, pipe or device, expected a regular file; put the file there")
        length = status.st_size - place.start if place.length is None else place.length
        if length > largest:
            raise InputError(f"{name}: got {length} bytes, expected at most {largest}; make it smaller")
        with place.file.open("rb") as stream:
            yield ContainerIO(stream, place.start, length), length
    except SanaError:
        raise
    except FileNotFoundError:
        raise MissingFileError(f"{name}: no such file; see its spelling, and whether it was moved") from None
    except OSError as error:
        raise ReadError(
            f"{name}: cannot be read ({reason_of(error)}); see its rights, its links and its disk"
        ) from None


def read_range(place: FileRange, name: str, largest: int = LARGEST_FILE) -> bytes:
    with opened_range(place, name, largest) as (stream, length):
        data = stream.read(length) if length else b""
    if len(data) < length:
        raise ReadError(f"{name}: got {len(data)} bytes, expected {length}; the file was cut short, copy it again")
    return data


def read_user_file(field: str, file: Path, expected: str, max_bytes: int = -1) -> bytes:
    """Return the content of `file`, or its first `max_bytes` bytes.

    Errors begin with `field` and contain `expected`, a description of a right file.
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
        raise ReadError(f"{field}: {shown} cannot be read ({reason_of(error)}); check its permissions") from None
