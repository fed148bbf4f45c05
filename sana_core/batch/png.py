"""The PNG files of a batch. Each contains its prompt, its seed, and a key: the digest of everything it depends on."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..checkpoints import Checkpoint
from ..checkpoints.fingerprint import OnBytes, fingerprint
from ..runtime.atomic_files import digest_of, patiently, write_whole
from ..runtime.checks import RENAME, check_text
from ..runtime.image_files import levels, write_png
from ..runtime.text import Json
from .graph import ENTRY as GRAPH
from .graph import graph_of
from .pipeline import ResolvedSettings
from .plan import ImageSpec

# Name of the text entry in the PNG.
ENTRY = "sana"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Version of the description of settings. It increases when the same description means another image.
VERSION = 2


def file_name(image: ImageSpec) -> str:
    """Return the name of an image's file: the number of its prompt and its seed."""
    return f"{image.prompt:05d}_{image.seed}.png"


def describe_image(prompt: str, seed: int, settings: Json) -> Json:
    """Return prompt, seed and key of an image. The key is the digest of prompt, seed and settings."""
    text = json.dumps([prompt, seed, settings], sort_keys=True, allow_nan=False)
    return {"prompt": prompt, "seed": seed, "key": digest_of(text.encode())}


def describe_settings(
    settings: ResolvedSettings, checkpoint: Checkpoint, progress: OnBytes = lambda count, total: None
) -> Json:
    """Return everything that an image depends on, except prompt and seed.

    `compiled` is left out, because it changes only the speed. `progress` receives the number of bytes of the weights
    that were read, and their total. It cancels by raising. Raises CheckpointError, MissingFileError or ReadError for a
    checkpoint that is broken or incomplete, and InputError for a name that UTF-8 cannot encode.
    """
    for field, file in (("checkpoint", checkpoint.path), *(("lora", Path(file)) for file, _ in settings.loras)):
        check_text(field, file.name, RENAME)
    described = settings._asdict()
    del described["compiled"], described["loras"]
    if settings.loras:
        described["loras"] = [
            {"file": Path(file).name, "strength": strength, **fingerprint(file)} for file, strength in settings.loras
        ]
    described["guidance_interval"] = list(settings.guidance_interval)
    return {"version": VERSION, **described, **fingerprint(checkpoint, progress, None, settings.reference)}


def encode_png(
    pixels: torch.Tensor,
    prompt: str,
    seed: int,
    settings: Json,
    checkpoint: str | None = None,
    more: Mapping[str, object] = MappingProxyType({}),
) -> bytes:
    """Return the PNG file of an image [3, H, W] in [-1, 1], with its description and the entries of `more`.

    With `checkpoint`, the PNG also contains a graph for ComfyUI that generates the image.
    """
    entry = {**describe_image(prompt, seed, settings), **more, "settings": settings}
    texts = {ENTRY: json.dumps(entry, allow_nan=False)}
    if checkpoint is not None:
        texts[GRAPH] = json.dumps(graph_of(prompt, seed, settings, checkpoint), allow_nan=False)
    stream = io.BytesIO()
    rows = levels(pixels)
    write_png(stream, rows.shape[1], rows.shape[0], iter([rows]), texts)
    return stream.getvalue()


def read_texts(data: bytes) -> Json | None:
    """Return the text entries of a PNG, or None if the file is damaged or not a PNG."""
    from PIL import PngImagePlugin

    try:
        # Image.open() refuses images of 16384 x 16384 pixels as decompression bombs.
        with PngImagePlugin.PngImageFile(io.BytesIO(data)) as image:
            image.load()
            return dict(image.text)
    except (OSError, SyntaxError, ValueError):
        return None


def parse_finite(text: str | bytes) -> Any:
    """Return the value of a JSON text, with None in place of NaN and infinity, which valid JSON cannot contain."""

    def finite(number: str) -> float | None:
        value = float(number)
        return value if math.isfinite(value) else None

    return json.loads(text, parse_float=finite, parse_constant=lambda name: None)


def read_entry(data: bytes) -> Json | None:
    """Return the description in a PNG, or None if the file is damaged, not a PNG, or not of a batch."""
    try:
        entry = parse_finite((read_texts(data) or {})[ENTRY])
    except (KeyError, ValueError):
        return None
    return entry if isinstance(entry, dict) else None


def is_damaged(data: bytes) -> bool:
    """Whether a file may be a PNG of ours after a power failure: empty, only zeros, or a PNG that cannot be read."""
    return not data.strip(b"\0") or (data.startswith(SIGNATURE) and read_texts(data) is None)


def write_image(path: Path, png: bytes, parts: Path) -> str:
    """Write the PNG file of `encode_png`, and return the digest of the file at `path`.

    The file is written in the folder `parts` first. If `path` has the same image already, for example because two
    machines generated it, that file stays. Raises FileExistsError for another file, and OSError.
    """
    try:
        write_whole(path, png, parts)
    except FileExistsError:
        if not path.is_file():
            raise
        existing_file = patiently(path.read_bytes)
        existing, new = read_entry(existing_file), read_entry(png)
        if existing is None or new is None or existing.get("key") != new["key"]:
            raise
        return digest_of(existing_file)
    return digest_of(png)
