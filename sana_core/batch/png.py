"""The PNG files of a batch. Each says itself what it is: prompt, seed and a key over all that it depends on."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..checkpoints.files import Json
from ..checkpoints.fingerprint import OnBytes, fingerprint
from ..runtime.atomic_files import digest_of, patiently, write_whole
from ..runtime.checks import RENAME, check_text
from ..runtime.image_files import levels, write_png
from .graph import ENTRY as GRAPH
from .graph import graph_of
from .pipeline import SamplingSettings
from .plan import ImageSpec

# the PNG's text entry
ENTRY = "sana"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
# of the description of settings; a higher one where the same words mean other images
VERSION = 2


def file_name(image: ImageSpec) -> str:
    """Return the name of an image's file: the number of its prompt and its seed."""
    return f"{image.prompt:05d}_{image.seed}.png"


def describe_image(prompt: str, seed: int, settings: Json) -> Json:
    """Return what an image is: prompt, seed, and the digest of all that it depends on, as its key."""
    text = json.dumps([prompt, seed, settings], sort_keys=True, allow_nan=False)
    return {"prompt": prompt, "seed": seed, "key": digest_of(text.encode())}


def describe_settings(
    settings: SamplingSettings, checkpoint: str | Path, progress: OnBytes = lambda done, total: None
) -> Json:
    """Return everything that an image depends on, except prompt and seed.

    `compiled` is left out, because it changes only the speed.

    `progress` gets how many bytes of the weights, of how many, were read, and cancels by raising. Raises
    CheckpointError, MissingFileError or ReadError for a checkpoint that is broken or incomplete, and InputError for a
    name that UTF-8 cannot encode.
    """
    for field, file in (("checkpoint", checkpoint), *(("lora", file) for file, _ in settings.loras)):
        check_text(field, Path(file).name, RENAME)
    described = settings._asdict()
    del described["compiled"], described["loras"]
    if not described["fp8"]:
        # folders from before there was one can be continued
        del described["fp8"]
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
    """Return the image [3, H, W] in [-1, 1] as a PNG that says what it is, and `more` besides.

    With its `checkpoint`, the PNG also has ComfyUI's graph for it.
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
    """Return the text entries of a PNG, None for a file that is damaged or no PNG."""
    from PIL import PngImagePlugin

    try:
        # not Image.open, which refuses images of 16384 x 16384 pixels as bombs
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
    """Return what a PNG says of itself, None for a file that is damaged, no PNG, or not of a batch."""
    try:
        entry = parse_finite((read_texts(data) or {})[ENTRY])
    except (KeyError, ValueError):
        return None
    return entry if isinstance(entry, dict) else None


def is_damaged(data: bytes) -> bool:
    """Whether a file is what may become of a PNG of ours: empty, nothing but zeros, or no longer readable."""
    return not data.strip(b"\0") or (data.startswith(SIGNATURE) and read_texts(data) is None)


def write_image(path: Path, png: bytes, parts: Path) -> str:
    """Write what `encode_png` returned, by way of the folder `parts`, and return the digest of the file.

    Where the same image is there already, as when two machines generated it, it stays, and its digest is returned.
    Raises FileExistsError for another file, and OSError.
    """
    try:
        write_whole(path, png, parts)
    except FileExistsError:
        if not path.is_file():
            raise
        there, own = patiently(path.read_bytes), read_entry(png)
        entry = read_entry(there)
        if entry is None or own is None or entry.get("key") != own["key"]:
            raise
        return digest_of(there)
    return digest_of(png)
