"""The folder that a batch is written into, and what is in it already.

Every PNG says itself what it is: prompt, seed and a key over all settings. So a run that was killed at any moment goes
on where it was, with or without its manifest, which is the list of them for people and other programs.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from ..checkpoints import CheckpointInfo, inspect_checkpoint
from ..picture_files import LEVEL, levels
from .draw import Settings
from .plan import Picture

MANIFEST = "manifest.json"
# the PNG's text entry
ENTRY = "sana"
# seconds between two manifests, for one of 10,000 pictures has 2 MB
REWRITE = 5.0
SAMPLE = 1 << 20


def fingerprint(checkpoint: str | Path) -> str:
    """Return a digest that tells checkpoints apart: the size of each weights file, its first, middle and last MB."""
    digest = hashlib.sha256()
    for file in sorted(weight_files(inspect_checkpoint(checkpoint)), key=lambda file: (file.parent.name, file.name)):
        size = file.stat().st_size
        digest.update(f"{size} ".encode())
        with file.open("rb") as stream:
            for start in (0, size // 2, max(0, size - SAMPLE)):
                stream.seek(start)
                digest.update(stream.read(SAMPLE))
    return digest.hexdigest()[:16]


def weight_files(info: CheckpointInfo) -> set[Path]:
    return {header.file for part in info.parts or (info,) for header in part.weights.headers.values()}


def describe_settings(settings: Settings, checkpoint: str | Path) -> dict[str, Any]:
    """Return all that a picture depends on besides prompt and seed. `compiled` only changes how fast it is drawn."""
    described = settings._asdict()
    del described["compiled"]
    described["guidance_interval"] = list(settings.guidance_interval)
    return {"weights": fingerprint(checkpoint), **described}


def describe_picture(prompt: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a picture is: prompt, seed, and the digest of all that it depends on, as its key."""
    text = json.dumps([prompt, seed, settings], sort_keys=True)
    return {"prompt": prompt, "seed": seed, "key": hashlib.sha256(text.encode()).hexdigest()}


def encode_png(pixels: torch.Tensor, prompt: str, seed: int, settings: dict[str, Any]) -> bytes:
    """Return the picture [3, H, W] in [-1, 1] as a PNG that says what it is."""
    from PIL import Image, PngImagePlugin

    words = PngImagePlugin.PngInfo()
    words.add_text(ENTRY, json.dumps({**describe_picture(prompt, seed, settings), "settings": settings}))
    stream = io.BytesIO()
    Image.fromarray(levels(pixels)).save(stream, "PNG", pnginfo=words, compress_level=LEVEL)
    return stream.getvalue()


def digest_of(png: bytes) -> str:
    return hashlib.sha256(png).hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write `path` so that it is there whole or not at all. Raises OSError, and leaves nothing behind then."""
    part = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        with part.open("wb") as stream:
            stream.write(data)
            stream.flush()
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Make the folder `path` if it is not there. Raises OSError with a remedy where nothing can be written."""
    probe = path / f".probe.{uuid4().hex[:8]}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_whole(probe, b"")
        probe.unlink()
    except OSError as error:
        raise OSError(
            f"out: got {path.absolute()}, where nothing can be written ({error.strerror}), expected a folder of yours; "
            "name one with --out"
        ) from error


def file_name(picture: Picture) -> str:
    """Return the name of a picture's file: the number of its prompt and its seed."""
    return f"{picture.prompt:05d}_{picture.seed}.png"


@contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Put a file into `folder` for a while; by its name, which is returned, others know the folder. Raises OSError."""
    mark = folder / f".shared.{uuid4().hex[:8]}"
    write_whole(mark, b"")
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)


def check_marked(folder: Path, mark: str) -> None:
    """Raise OSError unless `folder` is the one with that mark, and can be written."""
    if not (folder / mark).is_file():
        raise FileNotFoundError(f"out: {folder} is not the driver's folder here; mount the same one at this path")
    probe = folder / f"{mark}.{uuid4().hex[:8]}"
    try:
        write_whole(probe, b"")
        probe.unlink()
    except OSError as error:
        raise OSError(f"out: cannot write into {folder} ({error.strerror}); see its rights and its disk") from error


def read_entry(data: bytes) -> dict[str, Any] | None:
    """Return what a PNG says of itself, None for a file that is damaged, no PNG, or not of a batch."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return json.loads(image.info[ENTRY])  # type: ignore[attr-defined]
    except (OSError, SyntaxError, ValueError, KeyError, TypeError):
        return None


class OutputFolder:
    """A folder of pictures with its manifest.

    `settings` come from `describe_settings`. Raises ValueError for a folder with pictures of other settings, prompts or
    a program of its own under the names that this batch would use.
    """

    def __init__(self, path: Path, prompts: Sequence[str], settings: dict[str, Any]) -> None:
        self.path, self.prompts, self.settings = path, prompts, settings
        self.entries: dict[str, dict[str, Any]] = {}
        self.written = 0.0
        make_folder(path)
        # of a run that was killed in the middle of one
        for part in [*path.glob(".*.png.????????"), *path.glob(".shared.*")]:
            part.unlink()

    def find_done(self, pictures: Sequence[Picture]) -> frozenset[int]:
        """Return the numbers of the pictures that are here whole, as they would be drawn now."""
        document = self.read_document()
        known = document.get("pictures", {})
        if document.get("settings") == self.settings:
            self.entries = {name: entry for name, entry in known.items() if (self.path / name).is_file()}
        done = set()
        for picture in pictures:
            file, name = self.path / file_name(picture), file_name(picture)
            if not file.is_file():
                continue
            data = file.read_bytes()
            digest = digest_of(data)
            listed = known.get(name, {})
            # decoding the PNG to see that it is whole takes long; a listed one has its digest
            entry = listed if listed.get("sha256") == digest else read_entry(data)
            if entry is None and not listed:
                raise ValueError(f"out: {file} is not of this batch; choose another folder, or remove it")
            if entry is not None and entry.get("key") != self.entry(picture)["key"]:
                raise ValueError(
                    f"out: {file} is of another prompt or other settings ({self.difference(entry, picture)}); "
                    "choose another folder"
                )
            if entry is not None:
                done.add(picture.number)
                self.entries[name] = {**self.entry(picture), "sha256": digest}
        self.write_manifest()
        return frozenset(done)

    def difference(self, entry: dict[str, Any], picture: Picture) -> str:
        """Return the first thing in which a picture that is here differs from what would be drawn."""
        if entry.get("prompt") != self.prompts[picture.prompt]:
            return f"prompt {entry.get('prompt')!r:.60}"
        theirs = entry.get("settings") or self.read_document().get("settings", {})
        changed = [name for name, value in self.settings.items() if theirs.get(name) != value]
        return ", ".join(f"{name} {theirs.get(name)!r:.40}" for name in changed[:1]) or "unknown"

    def entry(self, picture: Picture) -> dict[str, Any]:
        return describe_picture(self.prompts[picture.prompt], picture.seed, self.settings)

    def save(self, picture: Picture, png: bytes) -> Path:
        """Write what `encode_png` returned for the picture, and return its path. Raises OSError."""
        write_whole(self.path / file_name(picture), png)
        return self.note(picture, digest_of(png))

    def note(self, picture: Picture, digest: str) -> Path:
        """Take a picture into the list that is in the folder with that digest, and return its path. Raises OSError."""
        path = self.path / file_name(picture)
        self.entries[path.name] = {**self.entry(picture), "sha256": digest}
        if time.monotonic() - self.written > REWRITE:
            self.write_manifest()
        return path

    def read_document(self) -> dict[str, Any]:
        """Return the manifest, empty where it is not there or cannot be read; the PNGs say the same."""
        try:
            document = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}

    def write_manifest(self) -> None:
        """Write the list of all pictures that are here: prompt, seed, key, and the digest of the file."""
        document = {"settings": self.settings, "pictures": dict(sorted(self.entries.items()))}
        write_whole(self.path / MANIFEST, json.dumps(document, indent=1).encode())
        self.written = time.monotonic()
