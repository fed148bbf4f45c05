"""Any layout to one: a safetensors file with diffusers' names, and the configuration in its metadata."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from ..errors import CheckpointError, ExistingFileError, InputError
from ..model.known_models import RESOLUTIONS
from ..runtime.atomic_files import is_taken, output_file
from ..runtime.text import brief
from .checkpoint import Checkpoint
from .detect import TOKENIZERS, inspect_checkpoint
from .headers import PICKLED, SAFETENSORS, map_file, write_tensors
from .load import load_part
from .tokenizer import load_tokenizer

# an all-in-one file: what stands before the names of each component
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

    `ema` chooses the moving average of the weights in the .pth of a training.

    One component keeps diffusers' names as they are, with its configuration in the metadata; a pipeline becomes an
    all-in-one file. The file appears under its name only when it is whole. Raises InputError for a target that is
    no .safetensors file, ExistingFileError for one that is there, OutputError for one that cannot be written,
    CheckpointError for a source that is broken or not SANA's, MissingFileError for one that is not there, ReadError
    where the disk refuses.
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
    if any(part.kind in ("other", "lora", "video_autoencoder") for part in parts):
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
        own, configs[part.kind] = component(part, dtype, resolution, ema)
        single = len(parts) == 1
        tensors.update({name if single else full_name(part, name): value for name, value in own.items()})
        lines.append(f"{target.name}: {part.description}, {len(own)} tensors")
        lines += part.notes
    write_file(tensors, target, {"format": "pt", "config": json.dumps(configs)})
    return lines


def write_file(tensors: dict[str, torch.Tensor], target: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file that appears under its name when it is whole. Raises OutputError."""
    with output_file(target, field="target") as part:
        write_tensors(part, tensors, metadata)


def component(
    checkpoint: Checkpoint, dtype: str | None, resolution: int | None, ema: bool
) -> tuple[dict[str, torch.Tensor], dict]:
    """Return the tensors of one component by the library's names, checked, and its configuration."""
    wanted = getattr(torch, dtype) if dtype else checkpoint.dtype
    # they are written at once, and may be more than the memory
    module = load_part(checkpoint, wanted, partial(map_file, ema=ema), resolution)
    tensors = {name: parameter.data.contiguous() for name, parameter in module.named_parameters()}
    if checkpoint.kind == "text_encoder":
        tokenizer = load_tokenizer(checkpoint)
        tensors[tokenizer.kind] = torch.frombuffer(bytearray(tokenizer.content), dtype=torch.uint8)
        config = {**module.config.to_dict(), "architectures": ["Gemma2Model"]}  # type: ignore[union-attr,operator]
    else:
        config = {**dict(module.config), "_class_name": type(module).__name__}  # type: ignore[arg-type]
    return tensors, {key: value for key, value in config.items() if key != "_name_or_path"}


def full_name(checkpoint: Checkpoint, name: str) -> str:
    """Return the name inside an all-in-one file, where the tokenizer lies beside Gemma's weights."""
    inner = GEMMA_PREFIX if checkpoint.kind == "text_encoder" and name not in TOKENIZERS else ""
    return f"{SAVED_PREFIXES[checkpoint.kind]}{inner}{name}"
