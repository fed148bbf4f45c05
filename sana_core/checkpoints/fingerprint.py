"""Digests of everything in a checkpoint that changes images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ReadError
from ..model.known_models import MAX_TOKENS
from ..model.reference import AUTO
from ..model.text import instruction_text
from ..runtime.atomic_files import digest_file, digest_of, read_small
from ..runtime.text import Json, get_logger
from . import Checkpoint, inspect_checkpoint
from .checkpoint import TRANSFORMER_KINDS, Source
from .generation import shift_of, text_reference
from .load import build_module
from .lora import peft_file
from .tokenizer import load_tokenizer

logger = get_logger(__name__)

# The digest of a file with at least this many bytes is stored. A smaller file is read quickly.
LARGE = 1 << 26
# The start of a file with a digest.
BEGIN = b'{"stamp": ['
# Fields of a configuration without effect: names, and the versions of the libraries that wrote it.
IDLE = {"transformers_version", "dtype", "torch_dtype", "architectures"}
PROBE = "  A Caf\u00e9,\tin 3  colours \U0001f3a8 "

OnBytes = Callable[[int, int], None]


def fingerprint(
    checkpoint: Source,
    progress: OnBytes = lambda bytes_read, total: None,
    folder: Path | None = None,
    reference: str = AUTO,
) -> Json:
    """Return the digests of weights, configurations, tokenizer and instruction, and the shift.

    `reference` chooses the instruction. The configurations include the library's defaults. The digest of a large file
    is stored beside it, or in `folder`, so that the file is read once. `progress` receives the bytes read and
    all bytes, and may raise to cancel.
    """
    info = inspect_checkpoint(checkpoint)
    digests = digest_files(files_of(info), progress, folder)
    fingerprints: Json = {}
    for part in info.components:
        fingerprints[f"{part.kind}_weights"] = digest_json(sorted(digests[file] for file in files_of(part)))
        if part.kind == "lora":  # its configuration is in its files
            continue
        fingerprints[f"{part.kind}_config"] = digest_json(resolved_config(part))
        if part.kind in TRANSFORMER_KINDS:
            fingerprints["shift"] = shift_of(info, reference=reference)
        if part.kind == "text_encoder":
            tokenizer = load_tokenizer(part)
            # The tokens of a probe, because the file does not determine everything: BOS, spaces, case.
            tokens = tokenizer.encode(PROBE)
            fingerprints["tokenizer"] = digest_json([digest_of(tokenizer.content), tokenizer.pad_token, tokens])
            fingerprints["instruction"] = digest_json([instruction_text(text_reference(info, reference)), MAX_TOKENS])
    return fingerprints


def difference(one: Mapping[str, object], other: Mapping[str, object]) -> str:
    """Return the names of the entries that differ, or ""."""
    return ", ".join(name for name in {**one, **other} if one.get(name) != other.get(name))


def digest_json(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def resolved_config(info: Checkpoint) -> Json:
    """Return the configuration of the library's module for `info`, including its defaults."""
    config: Any = build_module(info).config
    words = config.to_dict() if info.kind == "text_encoder" else dict(config)
    return {key: value for key, value in words.items() if not key.startswith("_") and key not in IDLE}


def files_of(info: Checkpoint) -> set[Path]:
    files = {header.file for part in info.components for header in part.weights.headers.values()}
    beside = peft_file(info.path)
    return files | {beside} if beside else files


def digest_files(files: set[Path], progress: OnBytes, folder: Path | None = None) -> dict[Path, str]:
    """Return the digest of each file. A file without a stored digest, beside it or in `folder`, is read."""
    digests: dict[Path, str] = {}
    for file in sorted(files):
        stored = read_digest(file, digest_path(file, folder)) or read_digest(file, digest_path(file))
        if stored is not None:
            digests[file] = stored
    missing = sorted(files - digests.keys())
    bytes_read, total = 0, sum(file.stat().st_size for file in missing)
    for file in missing:
        before = size_and_times(file)

        def read(count: int) -> None:
            nonlocal bytes_read
            bytes_read += count
            progress(bytes_read, total)

        digests[file] = digest_file(file, read)
        if size_and_times(file) != before:
            raise ReadError(f"{file}: was written while it was read; wait until it is whole")
        if before[0] >= LARGE:
            store_digest(digest_path(file, folder), before, digests[file])
    return digests


def size_and_times(file: Path) -> list[int]:
    """Return the size of a file and the times of its last changes, to notice that it was changed or replaced.

    Its inode is not part of it: FUSE, exFAT and CIFS may give a file another number each time.
    """
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def digest_path(file: Path, folder: Path | None = None) -> Path:
    """Return where the digest of `file` is stored: beside it, or in `folder`.

    The name in `folder` is a digest of path, size and times. Somebody who can read that folder but not the model
    cannot check a guessed path against it without knowing those numbers.
    """
    if folder is None:
        return file.with_name(f".{file.name}.sana-digest.json")
    return folder / f"{digest_json([str(file.absolute()), size_and_times(file)])}.json"


def read_digest(file: Path, path: Path) -> str | None:
    """Return the digest stored at `path` if it belongs to the current content of `file`, or None."""
    try:
        document = json.loads(read_small(path))
        return str(document["sha256"]) if document["stamp"] == size_and_times(file) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store_digest(path: Path, stat: list[int], digest: str) -> None:
    """Store a digest at `path`, unless another file is there. Without it, the next run reads the model again."""
    # A model's folder may come from a stranger. A link there could lead to any file of the user.
    if path.is_symlink():
        return
    with suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and read_small(path)[: len(BEGIN)] not in (b"", BEGIN):
            return
        try:
            # Written in place: a process that is killed here leaves half of the file, which counts as no digest.
            path.write_text(json.dumps({"stamp": stat, "sha256": digest}))
        except OSError:
            path.unlink(missing_ok=True)
