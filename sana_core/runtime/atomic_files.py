"""Write files atomically: a file is complete under its name or absent, and replaces another only on request."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import count
from os import O_RDONLY, close, fsync
from os import open as open_descriptor
from pathlib import Path
from platform import node
from stat import S_ISREG
from tempfile import TemporaryFile
from typing import TypeVar
from uuid import uuid4

from ..errors import ExistingFileError, OutputError, SanaError

# Bytes to read at a time.
BLOCK = 1 << 24
# Maximum bytes of a record, a digest or the description of a run.
LARGEST_SMALL = 64_000_000
# Windows: ERROR_ACCESS_DENIED, ERROR_SHARING_VIOLATION and ERROR_LOCK_VIOLATION.
IN_USE = (5, 32, 33)
# Seconds to wait for another program to close a file. Virus scanners and indexers open new files for a moment.
PATIENCE = 10.0
T = TypeVar("T")


def patiently(operation: Callable[[], T], seconds: float | None = None) -> T:
    """Return the result of a file operation. On Windows it is tried again while another program has the file open.

    Windows does not rename, replace or remove an open file. Raises OSError, and PermissionError after `seconds`, by
    default PATIENCE.
    """
    deadline, pause = time.monotonic() + (PATIENCE if seconds is None else seconds), 0.01
    while True:
        try:
            return operation()
        except PermissionError as error:
            if getattr(error, "winerror", None) not in IN_USE or time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def reason_of(error: OSError) -> str:
    """Return the text of a system error without the name of the file."""
    return error.strerror or type(error).__name__


@contextmanager
def output_file(path: Path, replace: bool = False, field: str = "out") -> Iterator[Path]:
    """Yield a path to write to. At the end, the file is moved to `path`, complete and on the disk, or not at all.

    Until then it is a hidden file in the same folder. A process that is killed leaves that file behind. The next call
    for the folder removes it. Without `replace`, an existing file at `path` is never replaced, even if it appeared in
    the meantime. Raises ExistingFileError for such a file, and OutputError if the file cannot be written. If another
    program has the file at `path` open for long, the new file gets a similar name, which the error contains.
    """
    try:
        remove_stale_parts(path.parent)
        with new_part(path.parent) as part:
            yield part
            sync(part)
            try:
                move(part, path, replace)
            except PermissionError as error:
                raise OutputError(
                    f"{field}: {path} cannot be written ({reason_of(error)}); close the program that has it open; the "
                    f"new file is at {move_beside(part, path)}"
                ) from None
    except (SanaError, BrokenPipeError):
        # A SanaError names another file. BrokenPipeError: nobody reads the progress any more.
        raise
    except OSError as error:
        raise OutputError(
            f"{field}: {path} cannot be written ({reason_of(error)}); check its folder, permissions and disk"
        ) from None


def part_prefix() -> str:
    """Return the start of the name of this machine's hidden files. Locks may not reach other machines."""
    return f".sana-{digest_of(node().encode())[:8]}-"


@contextmanager
def new_part(folder: Path) -> Iterator[Path]:
    """Yield a new, hidden file in `folder`. When the context ends, the file is removed.

    Until then a lock file beside it is locked. The lock is not on the file itself, because SMB disks do not let anyone
    write a locked file, and Windows does not move an open one.
    """
    part = folder / f"{part_prefix()}{uuid4().hex}.part"
    # FileLock would create a missing folder. Another process may remove this file as a stale one before it is locked.
    part.with_suffix(".lock").touch(exist_ok=False)
    with locked(part.with_suffix(".lock"), PATIENCE):
        try:
            part.touch(exist_ok=False)
            yield part
        finally:
            remove(part)


@contextmanager
def locked(file: Path, seconds: float = 0.0) -> Iterator[None]:
    """Lock the file at `file`, which exists only until the context ends.

    Raises OSError, which is a TimeoutError after `seconds` in which another process has the lock.
    """
    from filelock import FileLock

    with FileLock(file, seconds, thread_local=False):
        try:
            yield
        finally:
            # Windows does not remove an open file. There FileLock removes it.
            if sys.platform != "win32":
                with suppress(OSError):
                    patiently(file.unlink, 1.0)


def remove_stale_parts(folder: Path) -> None:
    """Remove the hidden files that dead processes of this machine left in `folder`."""
    name = re.compile(rf"{part_prefix()}[0-9a-f]{{32}}\.lock", re.ASCII)
    for lock_file in folder.glob(f"{part_prefix()}*.lock"):
        # Files that cannot be removed now can be removed by a later call.
        with suppress(OSError):
            # A user may have given a file a similar name.
            if name.fullmatch(lock_file.name) and S_ISREG(lock_file.lstat().st_mode):
                with locked(lock_file):
                    lock_file.with_suffix(".part").unlink(missing_ok=True)


@contextmanager
def unfinished(path: Path, parts: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a path in the folder `parts` to write to, and then move the file to `path`, as in `output_file`.

    `parts` must be on the same disk as `path`. Raises FileExistsError and OSError.
    """
    part = parts / f".{uuid4().hex}.part"
    try:
        yield part
        sync(part)
        move(part, path, replace)
    except OSError as error:
        # A full disk names no file.
        if error.errno and not error.filename:
            error.filename = str(path)
        raise
    finally:
        remove(part)


def move(part: Path, path: Path, replace: bool) -> None:
    """Give `part` the name `path`. Without `replace`, raises ExistingFileError for a file at `path`."""
    if replace:
        patiently(lambda: part.replace(path))
        return
    # A rename would replace the other file.
    try:
        patiently(lambda: path.hardlink_to(part))
    except FileExistsError:
        raise ExistingFileError(f"out: {path} exists; choose another name, or remove it") from None
    except OSError:
        # A disk without hard links, such as exFAT. If there is another reason, it stops the rename too.
        check_free([path])
        patiently(lambda: part.rename(path))


def move_beside(part: Path, path: Path) -> Path:
    """Rename `part` to the first free path of NAME-2, NAME-3 and so on. NAME is the name of `path`. Returns it."""
    for number in count(2):
        free = path.with_stem(f"{path.stem}-{number}")
        with suppress(ExistingFileError):
            move(part, free, replace=False)
            return free
    raise AssertionError


def write_whole(path: Path, data: bytes, parts: Path, replace: bool = False) -> None:
    """Write `data` to `path`, whole or not at all, through the folder `parts`.

    Raises OSError, and without `replace` FileExistsError for a file at `path`.
    """
    with unfinished(path, parts, replace) as part:
        part.write_bytes(data)


def read_small(path: Path, largest: int = LARGEST_SMALL) -> bytes:
    """Return the content of a small file. Raises OSError, and ValueError for a pipe, a folder and a larger file."""
    status = path.stat()
    # Reading a pipe would wait for ever.
    if not S_ISREG(status.st_mode):
        raise ValueError("it is a folder, pipe or device")
    if status.st_size > largest:
        raise ValueError(f"it has {status.st_size} bytes")
    return path.read_bytes()


def is_taken(path: Path, field: str = "out") -> bool:
    """Whether `path` exists, also as a link to nowhere. Raises OutputError for a path that cannot be a file."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise OutputError(
            f"{field}: {str(path):.240} cannot be a file ({reason_of(error)}); choose another name or folder"
        ) from None
    return True


def check_free(paths: Iterable[Path], replace: bool = False) -> None:
    """Raise ExistingFileError for the first of `paths` that exists. With `replace`, a regular file may exist."""
    for path in paths:
        if not is_taken(path):
            continue
        if not replace:
            raise ExistingFileError(f"out: {path} exists; choose another folder, or allow it with --overwrite")
        if path.exists() and not path.is_file():
            raise ExistingFileError(f"out: {path} is a folder, pipe or device, expected a file; choose another name")


def make_folder(path: Path) -> None:
    """Create the folder `path` if it does not exist. Raises OutputError if no file can be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # A file without a name, so that a process that is killed here leaves nothing behind.
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OutputError(
            f"out: got {path.absolute()}, expected a folder that you can write to ({error.strerror}); choose another"
        ) from None


def digest_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def digest_file(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """Return the SHA-256 of a file's content. `progress` receives the size of each block. Raises OSError."""
    digest = sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Remove a file, or a folder with everything in it, if it exists. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        patiently(lambda: shutil.rmtree(path))
    else:
        patiently(lambda: path.unlink(missing_ok=True))


def sync(path: Path) -> None:
    """Wait until a file, or a folder with its content, is on the disk. Raises OSError."""
    if not path.is_dir():
        with path.open("r+b") as stream:
            fsync(stream.fileno())
        return
    for inner in path.iterdir():
        sync(inner)
    sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk too. Raises OSError."""
    # Windows does not open folders as files.
    if sys.platform != "win32":
        descriptor = open_descriptor(folder, O_RDONLY)
        try:
            fsync(descriptor)
        finally:
            close(descriptor)
