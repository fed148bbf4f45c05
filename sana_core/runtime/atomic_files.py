"""Atomic files: whole under their name or not there, safe from a power cut, never replacing another unasked."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from os import O_RDONLY, close, fsync
from os import open as open_descriptor
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

from ..errors import ExistingFileError, OutputError

# bytes read at a time
BLOCK = 1 << 24


@contextmanager
def unfinished(path: Path, parts: Path | None = None, replace: bool = False) -> Iterator[Path]:
    """Yield where to write a file, which then appears as `path`: whole and on the disk, or not at all.

    Until then it lies in `parts`, a folder of the same disk; that of `path` without one. Without `replace` a file that
    is at `path` stays, even one that came meanwhile. Raises FileExistsError for it, OSError besides, and leaves nothing
    behind then.
    """
    part = (parts or path.parent) / f".{uuid4().hex}.part"
    try:
        yield part
        sync(part)
        if replace:
            part.replace(path)
        else:
            appear(part, path)
    except OSError as error:
        # a full disk names no file
        if error.errno and not error.filename:
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def appear(part: Path, path: Path) -> None:
    """Give `part` the name `path`, which a rename would take from another file. Raises FileExistsError."""
    try:
        path.hardlink_to(part)
    except FileExistsError:
        raise ExistingFileError(f"out: {path} exists; choose another name, or remove it") from None
    except OSError:
        # a disk without hard links, such as exFAT; a reason of another kind stops the rename too
        check_free([path])
        part.rename(path)


def write_whole(path: Path, data: bytes, parts: Path | None = None, replace: bool = False) -> None:
    """Write `data` to `path`, which has it whole or not at all, by way of the folder `parts`, or its own.

    Raises FileExistsError for a file that is there, unless it is to `replace` it, and OSError.
    """
    with unfinished(path, parts, replace) as part:
        part.write_bytes(data)


def check_free(paths: Iterable[Path]) -> None:
    """Raise FileExistsError for the first of `paths` that is there."""
    for path in paths:
        if path.exists():
            raise ExistingFileError(f"out: {path} exists; choose another folder, or allow it with --overwrite")


def make_folder(path: Path) -> None:
    """Make the folder `path` if it is not there. Raises OutputError with a remedy where nothing can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # a file without a name, so that a process that is killed here leaves nothing
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OutputError(
            f"out: got {path.absolute()}, where nothing can be written ({error.strerror}), expected a folder of yours; "
            "name another"
        ) from error


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of `data`, in hexadecimal."""
    return sha256(data).hexdigest()


def digest_file(path: Path, read: Callable[[int], None] = lambda count: None) -> str:
    """Return the digest of what is in a file; `read` is told of the bytes as they are read. Raises OSError."""
    digest = sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
            read(len(block))
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Remove a file, or a folder with all in it, if it is there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or a folder with all in it, is on the disk. Raises OSError."""
    if not path.is_dir():
        with path.open("r+b") as stream:
            fsync(stream.fileno())
        return
    for inner in path.iterdir():
        sync(inner)
    sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk too. Raises OSError."""
    # Windows opens no folder as a file
    if sys.platform != "win32":
        descriptor = open_descriptor(folder, O_RDONLY)
        try:
            fsync(descriptor)
        finally:
            close(descriptor)
