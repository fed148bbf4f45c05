"""What a model's files, or a data set's, are like now, to notice that they are others: sizes and times of change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ...sana_core.checkpoints.detect import SHARD
from ...sana_core.checkpoints.headers import SUFFIXES
from ...sana_core.errors import CheckpointError
from ...sana_core.runtime.text import shown
from ...sana_core.training.data_files import list_folder

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

READ = (*SUFFIXES, ".json", ".model")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def file_stat(find: Callable[[], Path]) -> str:
    """Return what changes with any file that a loader reads for the path that `find` gives.

    Never raises: what cannot be found has one too, and the loader says why.
    """
    try:
        files = sorted(files_read(find()))
    except (OSError, ValueError):
        return "missing"
    return "; ".join(f"{file.name} {size_and_time(file)}" for file in files)


def dataset_stat(find: Callable[[], Path]) -> str:
    """Return what changes with any file of the data set's folder that `find` gives. Never raises, as `file_stat`."""
    try:
        files = list_folder(find()).files
    except (OSError, ValueError):
        return "missing"
    return digest(f"{name} {size_and_time(file)}" for name, file in sorted(files.items()))


def linked_file_stat(list_paths: Callable[[], Iterable[Path]]) -> str:
    """Return the fingerprint of a loader whose file name comes from a link.

    ComfyUI compares fingerprints before it runs the node that outputs the name. So any file that the loader could read
    changes this fingerprint. `list_paths` returns the files and folders that the loader offers. Never raises, as
    `file_stat`.
    """
    files: set[Path] = set()
    for path in list_paths():
        # A folder may vanish meanwhile.
        with suppress(OSError):
            files.update(files_read(path))
    return digest(f"{file} {size_and_time(file)}" for file in sorted(files))


def linked_dataset_stat(list_paths: Callable[[], Iterable[Path]]) -> str:
    """Return the fingerprint of a node whose folder of images comes from a link, as `linked_file_stat` does."""
    return digest(f"{path} {dataset_stat(lambda path=path: path)}" for path in list_paths())


def digest(lines: Iterable[str]) -> str:
    return sha256("; ".join(lines).encode(errors="surrogateescape")).hexdigest()


def size_and_time(file: Path) -> str:
    """Return bytes and nanoseconds of a file, and of one that is not there that it is not."""
    try:
        status = file.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def files_read(path: Path) -> Iterable[Path]:
    """Return the files that may be read for `path`: a model's folder, or a file with its shards and what it needs."""
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


def reloader(load: Callable[..., ModelPatcher], path: Path) -> Callable[..., ModelPatcher]:
    """Return what ComfyUI calls, with the arguments of `load`, for another copy of the weights of `path`.

    It raises CheckpointError where the files are others by then: the two copies would be of two models.
    """
    before = file_stat(lambda: path)

    def reload(*args, **options) -> ModelPatcher:
        if file_stat(lambda: path) != before:
            raise CheckpointError(
                f"{shown(path)}: the file has changed since it was loaded, and a second copy of the model is wanted; "
                "queue the graph again"
            )
        return load(*args, **options)

    return reload
