"""Convert a checkpoint of any layout to a safetensors file with diffusers' names and the config in its header."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from ..checkpoints.checkpoint import TOKENIZERS, Checkpoint
from ..checkpoints.detect import inspect_checkpoint
from ..checkpoints.headers import PICKLED, SAFETENSORS, map_file, write_tensors
from ..checkpoints.load import load_part
from ..checkpoints.tokenizer import load_tokenizer
from ..errors import CheckpointError, ExistingFileError, InputError
from ..model.known_models import RESOLUTIONS
from ..runtime.atomic_files import is_taken, output_file
from ..runtime.text import brief, write_lines
from .options import path_of

# Prefixes of the names of each component in an all-in-one file.
SAVED_PREFIXES = {
    "transformer": "model.diffusion_model.",
    "video_transformer": "model.diffusion_model.",
    "autoencoder": "vae.",
    "text_encoder": "text_encoders.",
}
GEMMA_PREFIX = "gemma2_2b.transformer.model."


def convert_checkpoint(
    source: Path, target: Path, dtype: str | None = None, resolution: int | None = None, ema: bool = False
) -> list[str]:
    """Write `source` to the safetensors file `target` and return a line for each component.

    `ema`: use the moving average of the weights in a training's .pth.

    One component keeps diffusers' names. A pipeline becomes an all-in-one file. The configuration is in the metadata.
    The file appears under its name only when it is whole.
    """
    if target.suffix.lower() not in SAFETENSORS:
        raise InputError(
            f"target: got {brief(target.name)}, expected a name that ends with {' or '.join(SAFETENSORS)}; rename it"
        )
    if is_taken(target, "target"):
        raise ExistingFileError(f"target: {target} exists; choose another name")
    if resolution not in (None, *RESOLUTIONS):
        raise InputError(
            f"resolution: got {resolution}, expected one of {', '.join(map(str, RESOLUTIONS))}; or leave it out"
        )
    checkpoint = inspect_checkpoint(source, ema)
    if ema and checkpoint.path.suffix.lower() not in PICKLED:
        raise InputError(f"ema: got it with {checkpoint.name}, expected the .pth of a training; leave it out")
    parts = checkpoint.components
    if any(part.kind in ("other", "lora", "video_autoencoder", "edit_head", "qwen3_vl") for part in parts):
        raise CheckpointError(
            f"{checkpoint.name}: got {checkpoint.description}, expected a SANA model; choose another file"
        )
    if resolution is not None and not any(part.kind in ("transformer", "controlnet") for part in parts):
        raise InputError(
            f"resolution: got {resolution} for {checkpoint.description}, expected a transformer or a ControlNet; "
            "leave it out"
        )
    tensors, configs, lines = {}, {}, []
    for part in parts:
        values, configs[part.kind] = component(part, dtype, resolution, ema)
        lines.append(f"{target.name}: {part.description}, {len(values)} tensors")
        for name, value in values.items():
            # The tokenizer is beside Gemma's weights.
            inner = GEMMA_PREFIX if part.kind == "text_encoder" and name not in TOKENIZERS else ""
            tensors[name if len(parts) == 1 else f"{SAVED_PREFIXES[part.kind]}{inner}{name}"] = value
        lines += part.notes
    with output_file(target, field="target") as unfinished:
        write_tensors(unfinished, tensors, {"format": "pt", "config": json.dumps(configs)})
    return lines


def component(
    checkpoint: Checkpoint, dtype: str | None, resolution: int | None, ema: bool
) -> tuple[dict[str, torch.Tensor], dict]:
    """Return the checked tensors of one component by the library's names, and its configuration."""
    # Mapped, because the tensors are written at once and may be larger than the memory.
    # Dequantised weights have more digits than their format.
    stored = torch.bfloat16 if checkpoint.quantised else checkpoint.dtype
    target_dtype = getattr(torch, dtype) if dtype else stored
    module = load_part(checkpoint, target_dtype, partial(map_file, ema=ema), resolution)
    tensors = {name: parameter.data.contiguous() for name, parameter in module.named_parameters()}
    if checkpoint.kind == "text_encoder":
        tokenizer = load_tokenizer(checkpoint)
        tensors[tokenizer.kind] = torch.frombuffer(bytearray(tokenizer.content), dtype=torch.uint8)
        config = {**module.config.to_dict(), "architectures": ["Gemma2Model"]}  # type: ignore[union-attr,operator]
    else:
        config = {**dict(module.config), "_class_name": type(module).__name__}  # type: ignore[arg-type]
    return tensors, {key: value for key, value in config.items() if key != "_name_or_path"}


EXAMPLE = """example:
  python -m sana_core convert Sana_1600M_1024px.pth Sana_1600M_1024px.safetensors --dtype bfloat16"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=path_of, help="a file or folder of any layout")
    parser.add_argument("target", type=path_of, help="a .safetensors file, which must not exist yet")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="default: as stored")
    parser.add_argument("--resolution", type=int, help="pixels that the model was trained at, if the file is wrong")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights in a training's .pth")


def run(arguments: argparse.Namespace) -> None:
    chosen = arguments.dtype, arguments.resolution, arguments.ema
    write_lines(*convert_checkpoint(arguments.source, arguments.target, *chosen))
