"""Read a file, or a part of it such as the member of a tar, with errors that name it."""

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
    """Open the bytes at `place`. Yields a stream and the number of bytes. Errors call the file `name`.

    Raises InputError if it is no regular file or has more than `largest` bytes.
    """
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
    """Return the bytes at `place`."""
    with opened_range(place, name, largest) as (stream, length):
        data = stream.read(length) if length else b""
    if len(data) < length:
        raise ReadError(f"{name}: got {len(data)} bytes, expected {length}; the file was cut short, copy it again")
    return data
