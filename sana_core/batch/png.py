"""The PNG files of a batch. Each contains its prompt, its seed, and a key: the digest of everything it depends on.

Dropped on ComfyUI's canvas, a PNG brings back the nodes that generate its image. ComfyUI's API format has no notes, so
the title of a node names the settings that the graph cannot contain.
"""

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
from ..model.known_models import DEMO_MODEL, DEMO_MODEL_LISTED
from ..runtime.atomic_files import digest_of, patiently, write_whole
from ..runtime.checks import RENAME, check_text
from ..runtime.image_files import levels, write_png
from ..runtime.text import Json
from .pipeline import ResolvedSettings
from .plan import ImageSpec

# the PNG's text entry that ComfyUI reads
GRAPH = "prompt"
# A widget, not an input. "fixed": the next run generates the same image.
FIXED = {"control_after_generate": "fixed"}

Link = list[str | int]


def graph_of(prompt: str, seed: int, settings: Json, checkpoint: str) -> dict[str, Json]:
    """Return the graph, in ComfyUI's API format, that generates an image with `settings` from a manifest.

    Its loader has the name of `checkpoint` as ComfyUI lists it in models/diffusers or models/checkpoints.
    """
    name = Path(checkpoint).name
    loader = {
        "model": DEMO_MODEL_LISTED if name == DEMO_MODEL else name,
        "weight_dtype": "default",
        "resolution": "auto",
        "reference": settings["reference"],
    }
    # ComfyUI chooses the dtype of text encoder, transformer and VAE by the device, and a graph cannot choose it.
    title = f"SANA Loader (the batch computed in {settings['dtype']}; other types change details)"
    nodes: dict[str, tuple[str, str, Json]] = {"1": ("SanaNodesLoader", title, loader)}
    model: Link = ["1", 0]
    clip: Link = ["1", 1]
    if settings["pag_scale"]:
        inputs_of_node = {"model": model, "scale": settings["pag_scale"], "blocks": settings["pag_blocks"]}
        nodes["2"] = ("SanaNodesPAG", "SANA PAG", inputs_of_node)
        model = ["2", 0]
    for number, lora in enumerate(settings.get("loras", ()), 10):
        strengths = {"strength_model": lora["strength"], "strength_clip": lora["strength"]}
        inputs_of_node = {"model": model, "clip": clip, "lora_name": lora["file"], **strengths}
        nodes[str(number)] = ("SanaNodesLoraLoader", "SANA Load LoRA", inputs_of_node)
        model, clip = [str(number), 0], [str(number), 1]
    start, end = settings["guidance_interval"]
    if (start, end) != (0, 1):
        inputs_of_node = {"model": model, "start": start, "end": end}
        nodes["3"] = ("SanaNodesGuidanceInterval", "SANA Guidance Interval", inputs_of_node)
        model = ["3", 0]
    negative = settings["negative_prompt"]
    size = {"width": settings["width"], "height": settings["height"], "batch_size": 1}
    sampling = {name: settings[name] for name in ("steps", "guidance", "sampler")}
    links = {"model": model, "positive": ["4", 0], "negative": ["5", 0], "latent_image": ["6", 0]}
    nodes |= {
        "4": ("SanaNodesTextEncode", "Prompt", {"clip": clip, "text": prompt, "instruction": True}),
        "5": ("SanaNodesTextEncode", "Negative prompt", {"clip": clip, "text": negative, "instruction": False}),
        "6": ("SanaNodesEmptyLatent", "SANA Empty Latent", size),
        "7": ("SanaNodesSampler", "SANA Sampler", {**links, "seed": seed, **sampling, "denoise": 1.0, **FIXED}),
        "8": ("SanaNodesDecode", "SANA Decode", {"samples": ["7", 0], "vae": ["1", 2], "method": "auto"}),
        "9": ("SaveImage", "Save Image", {"images": ["8", 0], "filename_prefix": "batch"}),
    }
    return {
        key: {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
        for key, (kind, title, inputs) in nodes.items()
    }


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
    that were read, and their total. It cancels by raising.
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
