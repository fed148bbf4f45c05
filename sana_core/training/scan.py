"""The files of a data set's folder: all that are really in it, and nothing to which a link leads out of it."""

from __future__ import annotations

from pathlib import Path

from ..checkpoints.files import brief
from ..errors import InputError, MissingFileError, ReadError, SanaError
from .tars import COMPRESSED, check_inner


def list_folder(root: Path) -> tuple[dict[str, Path], list[SanaError]]:
    """Return the files below `root` by their paths in it, with slashes, and what is wrong with others.

    Names that begin with a dot are left out: what systems and programs put there. Links to folders are not followed.
    """
    files: dict[str, Path] = {}
    faults: list[SanaError] = []
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
        except OSError as error:
            reason = error.strerror or type(error).__name__
            faults.append(ReadError(f"{folder}: cannot be read ({reason}); see its rights, its links and its disk"))
            continue
        for entry in entries:
            inner = entry.relative_to(root).as_posix()
            try:
                check_inner(inner, "dataset")
                if inner.lower().endswith(COMPRESSED):
                    raise InputError(f"{inner}: a compressed tar, expected a plain one, to be read anywhere; unpack it")
                if entry.is_symlink():
                    find_inside(root, inner, inner)
                    if entry.is_dir():
                        continue
            except SanaError as fault:
                faults.append(fault)
                continue
            if entry.is_dir():
                folders.append(entry)
            else:
                files[inner] = entry
    return files, faults


def find_inside(root: Path, inner: str, name: str) -> Path:
    """Return the path `inner` of the folder `root`; `name` is how errors call it.

    Raises InputError for one that leads out of the folder through a link, MissingFileError for one that is not there.
    """
    path = root / inner
    try:
        resolved = path.resolve()
        known = resolved.exists()
    # a link that leads in a circle; RuntimeError before Python 3.13
    except (OSError, RuntimeError) as error:
        raise ReadError(f"{name}: cannot be read ({brief(error)}); see its rights, its links and its disk") from None
    if not any(map(resolved.is_relative_to, roots_of(root.resolve()))):
        raise InputError(f"{name}: {inner} leads out of the data set's folder; put the file itself there")
    if not known:
        raise MissingFileError(f"{name}: no such file {inner}; see its spelling")
    return path


def roots_of(root: Path) -> list[Path]:
    """Return the folders whose files belong to the data set in `root`: its own, and in Hugging Face's cache, where
    snapshots/REVISION/a.png is a link to ../../blobs/DIGEST, the blobs of its download."""
    return [root, *(each.parent / "blobs" for each in root.parents if each.name == "snapshots")]
