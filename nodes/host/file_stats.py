"""Sizes and times of the files of a model or a data set, to notice changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ...sana_core.checkpoints.detect import SHARD
from ...sana_core.checkpoints.headers import SUFFIXES
from ...sana_core.errors import CheckpointError
from ...sana_core.runtime.text import shown
from ...sana_core.training.dataset import Faults, list_folder

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# Suffixes of the files that a loader may read from a model folder.
READ = (*SUFFIXES, ".json", ".model")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def file_stat(find: Callable[[], Path]) -> str:
    """Return a fingerprint that changes with any file that the loader reads. `find` returns the loader's path.

    Never raises. A path that does not exist has a fingerprint too, and the loader raises the error.
    """
    try:
        files = sorted(files_read(find()))
    except (OSError, ValueError):
        return "missing"
    return "; ".join(f"{file.name} {size_and_time(file)}" for file in files)


def dataset_stat(find: Callable[[], Path]) -> str:
    """Return a fingerprint that changes with any file of the data set's folder. Never raises."""
    try:
        files = list_folder(find(), Faults(), defaultdict(list))
    except (OSError, ValueError):
        return "missing"
    return digest(f"{name} {size_and_time(file)}" for name, file in sorted(files.items()))


def linked_file_stat(list_paths: Callable[[], Iterable[Path]]) -> str:
    """Return the fingerprint of a loader whose file name comes from a link.

    ComfyUI compares fingerprints before it runs the node that outputs the name. Therefore any file that the loader
    could read changes this fingerprint. `list_paths` returns the files and folders that the loader lists. Never raises.
    """
    files: set[Path] = set()
    for path in list_paths():
        # A folder may have been deleted in the meantime.
        with suppress(OSError):
            files.update(files_read(path))
    return digest(f"{file} {size_and_time(file)}" for file in sorted(files))


def linked_dataset_stat(list_paths: Callable[[], Iterable[Path]]) -> str:
    """Return the fingerprint of a node whose folder of images comes from a link. See `linked_file_stat`."""
    return digest(f"{path} {dataset_stat(lambda path=path: path)}" for path in list_paths())


def digest(lines: Iterable[str]) -> str:
    return sha256("; ".join(lines).encode(errors="surrogateescape")).hexdigest()


def size_and_time(file: Path) -> str:
    """Return size in bytes and time in nanoseconds of a file, or "missing"."""
    try:
        status = file.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def files_read(path: Path) -> Iterable[Path]:
    """Return the files that a loader may read for `path`.

    For a folder, these are its models and configs. For a file, its shards, configs and tokenizers are included.
    """
    if path.is_dir():
        return [file for pattern in ("*", "*/*") for file in path.glob(pattern) if file.suffix.lower() in READ]
    folder = path.parent
    beside = [folder / name for name in ("config.json", "adapter_config.json", *TOKENIZER)]
    beside += [folder.parent / "tokenizer" / name for name in TOKENIZER]
    shard = SHARD.match(path.stem)
    if shard:
        name = shard[1].partition(".")[0]
        beside += [file for file in folder.iterdir() if file.name.startswith(name)]
    return {path, *beside}


class Reloader:
    """The function that ComfyUI calls to load the weights of `path` again. It has the arguments of `load`.

    It raises CheckpointError if the files have changed, because the two copies would be of two models.
    """

    def __init__(self, load: Callable[..., ModelPatcher], path: Path) -> None:
        self.load, self.path = load, path
        self.before = file_stat(lambda: path)

    def check(self) -> str:
        """Return the fingerprint of the files."""
        if file_stat(lambda: self.path) != self.before:
            raise CheckpointError(
                f"{shown(self.path)}: the file has changed since it was loaded, and a second copy of the model is "
                "needed; queue the graph again"
            )
        return self.before

    def __call__(self, *args, **options) -> ModelPatcher:
        self.check()
        return self.load(*args, **options)
