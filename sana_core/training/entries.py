"""Entries of a cache: named by all that they depend on, written whole, with the digest of their numbers."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checkpoints.files import brief
from ..checkpoints.fingerprint import stamp
from ..errors import ExistingFileError, OutputError, ReadError
from ..runtime.atomic_files import write_whole
from .pictures import Place, read_place

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]

# of the entries; a higher one makes all of them anew
VERSION = 1
DIGESTS = "digests.json"
# the tensor in an entry that tells whether the others are what was written
CHECK = "sha256"


class Store(NamedTuple):
    """A cache's folder, which several runs may share, and the one in it where a run's unfinished entries lie."""

    folder: Path
    parts: Path | None = None  # without one beside the entries

    def find_or(self, path: Path, make: Callable[[], Tensors]) -> Path:
        """Return the entry's `path` once it is there and whole. Raises OutputError."""
        if not find_entry(path):
            self.write_entry(path, make())
        return path

    def write_entry(self, path: Path, tensors: Tensors) -> None:
        """Write an entry, over a damaged one too. Raises OutputError and leaves nothing half written then."""
        from safetensors.torch import save

        try:
            self.write(path, save({**tensors, CHECK: check_sum(tensors)}))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise OutputError(
                f"cache: cannot write {path} ({reason}); make room and start again, what is in it stays"
            ) from error

    def write(self, path: Path, data: bytes) -> None:
        """Write a file of the cache, over an earlier one too. Raises OSError."""
        for folder in filter(None, (path.parent, self.parts)):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, self.parts, replace=True)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry_path(folder: Path, kind: str, parts: Sequence[Any]) -> Path:
    """Return where the entry is that depends on `parts`, of JSON, and on nothing else."""
    key = digest_of(json.dumps([VERSION, *parts]).encode())
    return folder / kind / key[:2] / f"{key}.safetensors"


def check_sum(tensors: Tensors) -> torch.Tensor:
    """Return the digest [32] of names, shapes, dtypes and bytes of `tensors`, as uint8."""
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {list(values.shape)} ".encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def read_entry(path: Path) -> Tensors:
    """Return the tensors of an entry. Raises ReadError for one that is missing, damaged or not whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(path.read_bytes())
        check = tensors.pop(CHECK)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ReadError(f"cache: {path} cannot be read ({brief(error)}); start again, which makes it again") from error
    if not torch.equal(check, check_sum(tensors)):
        raise ReadError(f"cache: {path} is damaged, its digest is another; start again, which makes it again")
    return tensors


def find_entry(path: Path) -> bool:
    """Return whether the entry is there and whole; a line in the log says if it is there and not."""
    if not path.exists():
        return False
    try:
        read_entry(path)
    except ReadError as error:
        logger.warning("%s", error)
        return False
    return True


class Digests:
    """The digests of pictures, kept in a cache's folder with the stamps of the files, so that each is read once.

    Raises ExistingFileError for a file of others under that name, which stays as it is if it comes later too.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.file = store, store.folder / DIGESTS
        self.kept = self.read()
        self.changed = False

    def read(self) -> dict[str, Any]:
        """Return what the folder has. Raises ExistingFileError for a file that no run has written."""
        try:
            kept = json.loads(self.file.read_bytes())
            if kept and all(len(digest) == 64 for _, digest in kept.values()):
                return kept
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            pass
        raise ExistingFileError(
            f"cache: {self.file} is not of a training's cache; move it away, or choose another folder"
        )

    def of(self, place: Place, name: str) -> str:
        """Return the digest of the bytes at `place`. Raises as `read_place` does."""
        key = json.dumps([str(place.file.absolute()), place.start, place.length])
        try:
            stamped = stamp(place.file)
        except OSError:
            stamped = None
        if stamped is None or self.kept.get(key, [None])[0] != stamped:
            self.kept[key] = [stamped, digest_of(read_place(place, name))]
            self.changed = True
        return self.kept[key][1]

    def save(self) -> None:
        """Keep them beside what others have kept meanwhile; a folder that cannot be written makes the next run read the
        pictures again."""
        if self.changed:
            with suppress(OSError):
                self.store.write(self.file, json.dumps({**self.read(), **self.kept}).encode())
