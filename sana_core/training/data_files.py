"""The files of a data set: all that are really in a folder, or in WebDataset's tars, which are never unpacked.

https://github.com/webdataset/webdataset; NVIDIA's tools/ImgDataset2WebDatasetMS.py writes such tars, and wids-meta.json
lists them.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping
from io import FileIO
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple
from unicodedata import normalize

from ..errors import InputError, MissingFileError, ReadError, SanaError
from ..runtime.text import brief
from .images import FileRange, opened_range

TAR_ENDINGS = (".tar",)
COMPRESSED = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
# NVIDIA's have 10,000 samples
MOST_MEMBERS = 1_000_000
# The record of a training run, and its states and images in the same folder.
RUN, STEPS, PICTURES, SHEET = "run.json", "steps", "pictures", "validations.png"
# Folders that macOS adds to archives, that a Synology NAS adds to folders with images, and that old programs create
# from the extended headers of a tar.
HIDDEN = re.compile(r"__MACOSX|@eaDir|PaxHeaders?(\.\d+)?")
# bytes of a member's name and further headers
LARGEST_HEADER = 1 << 20


class Listing(NamedTuple):
    """The files of a folder."""

    # By their paths in the folder, with slashes.
    files: dict[str, Path]
    # What is wrong with other files.
    faults: list[SanaError]
    # Folders of training runs, which are left out, by their paths in the folder.
    runs: list[str]


def list_folder(root: Path) -> Listing:
    """Return the files below `root`, except hidden files. Links to folders are not followed.

    A training run may write into a folder inside its data. Its previews have no captions, and the next run must not
    learn from them. So folders with run.json are left out, and if `root` has run.json, the run's own images.
    """
    files: dict[str, Path] = {}
    faults: list[SanaError] = []
    runs: list[str] = []
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            entries = [entry for entry in sorted(folder.iterdir()) if not is_hidden(entry.name)]
        except OSError as error:
            reason = error.strerror or type(error).__name__
            faults.append(ReadError(f"{folder}: cannot be read ({reason}); see its rights, its links and its disk"))
            continue
        if any(entry.name == RUN for entry in entries):
            if folder != root:
                runs.append(folder.relative_to(root).as_posix())
                continue
            entries = [entry for entry in entries if entry.name not in (STEPS, PICTURES, SHEET)]
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
    return Listing(files, faults, runs)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of that name was put there by a system or an archiver."""
    return (name.startswith(".") and name != "..") or HIDDEN.fullmatch(name) is not None


def find_inside(root: Path, inner: str, name: str) -> Path:
    """Return the path `inner` of the folder `root`; `name` is how errors call it.

    Raises InputError for one that leads out of the folder through a link, MissingFileError for one that is not there.
    """
    path = root / inner
    try:
        if not path.exists():
            path = spelled(root, inner)
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


def spelled(root: Path, inner: str) -> Path:
    """Return the path of `inner` in `root` with accents composed or decomposed as on the disk.

    macOS decomposes accents in names, and most programs compose them.
    """
    path = root
    for part in PurePosixPath(inner).parts:
        composed = normalize("NFC", part)
        if not part.isascii() and not (path / part).exists() and path.is_dir():
            part = next((entry.name for entry in path.iterdir() if normalize("NFC", entry.name) == composed), part)
        path /= part
    return path


def roots_of(root: Path) -> list[Path]:
    """Return the folders whose files belong to the data set in `root`: its own, and in Hugging Face's cache, where
    snapshots/REVISION/a.png is a link to ../../blobs/DIGEST, the blobs of its download."""
    return [root, *(each.parent / "blobs" for each in root.parents if each.name == "snapshots")]


class Headers(FileIO):
    """A tar whose headers cannot ask for more memory than headers need."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def list_tar(file: Path, name: str) -> dict[str, FileRange]:
    """Return where the bytes of each file in the tar are, by the member's name; `name` is how errors call the tar.

    Hidden members are left out. Raises ReadError for a tar that is damaged or not whole, InputError for members that
    are no plain files, have the same name, or names that lead elsewhere, and as `opened_range` does.
    """
    members: dict[str, FileRange] = {}
    try:
        # a tar may be larger than memory: what is read of it are headers
        with opened_range(FileRange(file), name, largest=1 << 62), Headers(file) as stream:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                while member := archive.next():
                    if member.isdir() or any(map(is_hidden, PurePosixPath(member.name).parts)):
                        continue
                    inner = check_member(member, name)
                    if inner in members:
                        raise InputError(f"{name}: holds {inner} twice; make the tar again")
                    if len(members) == MOST_MEMBERS:
                        raise InputError(f"{name}: expected at most {MOST_MEMBERS} files in a tar; divide it")
                    members[inner] = FileRange(file, member.offset_data, member.size)
            # tarfile takes any damage behind the first member for the end
            stream.seek(archive.offset)
            end = stream.read(tarfile.BLOCKSIZE)
    except (tarfile.TarError, RecursionError, OverflowError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise ReadError(f"{name}: broken or incomplete tar ({brief(error)}); copy or make it again") from error
    if end != bytes(tarfile.BLOCKSIZE):
        raise ReadError(f"{name}: a tar without its end, the last of {len(members)} files may be lost; copy it again")
    return members


def check_member(member: tarfile.TarInfo, name: str) -> str:
    """Return the name of a tar's member; raises InputError for one that is no plain file or leads elsewhere."""
    if not member.isreg() or member.issparse():
        raise InputError(f"{name}: {brief(member.name)} is a link or device, expected plain files; make the tar again")
    return check_inner(member.name, name)


def check_inner(inner: object, name: str) -> str:
    """Return the path `inner`, with slashes and without a leading ./, once it is one that stays in its folder.

    Raises InputError for an absolute one by the rules of any system, one with .., and one that cannot be printed.
    """
    if not isinstance(inner, str) or not inner or not inner.isprintable() or leads_out(inner):
        raise InputError(f"{name}: got the path {brief(inner)}, expected one inside the data set; rename it")
    return str(PurePosixPath(inner))


def leads_out(inner: str) -> bool:
    windows = PureWindowsPath(inner)
    return bool(windows.anchor) or ".." in windows.parts


def list_shards(document: Mapping[str, object], name: str) -> list[str]:
    """Return the tars that wids-meta.json lists. Raises InputError for another document and for paths elsewhere."""
    shards = document.get("shardlist")
    if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
        raise InputError(f"{name}: expected a list 'shardlist' of tars; make it again, or remove it")
    return [check_inner(shard.get("url"), name) for shard in shards]
