"""The result of inspecting a checkpoint, and the choice of its components."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from ..errors import CheckpointError, MissingFileError
from ..runtime.text import Json, shown
from .files import read_json
from .headers import Headers, Weights
from .keys import Origin
from .kinds import CHECKPOINT_KINDS, TRANSFORMER_KINDS

# Tensors of a quantised layer beside its weight: the last part of their names in files, and ComfyUI's name.
QUANTISED_PARTS = {
    **{name: name for name in ("comfy_quant", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")},
    "scale_weight": "weight_scale",
    "weight_scale_inv": "weight_scale",
    "scale_input": "input_scale",
}
# The tensor by which older files of ComfyUI say that their layers are in fp8 with scales.
FP8_FILE = "scaled_fp8"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, or one component of it, as its headers describe it."""

    path: Path
    # A key of CHECKPOINT_KINDS, or "other".
    kind: str
    # The name of the model, or for kind "other", a description of the tensors.
    variant: str
    # diffusers, original, transformers, or comfy for a file with several components.
    layout: str
    # The dtype of most bytes.
    dtype: torch.dtype
    # Bytes of all tensors.
    size: int
    # Pixels of the training images' sides, and the source of that number: config, position embedding, file name or
    # assumed.
    resolution: int | None = None
    resolution_from: str = ""
    # The library's configuration, from a file beside the weights or from the file itself.
    config: Json | None = None
    # The headers by the parameter names of the library's module.
    headers: Headers = field(default_factory=dict, repr=False)
    # By the same names: the tensor in the file that has the parameter.
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False)
    weights: Weights = field(default=Weights({}, {}), repr=False)
    # The components of a pipeline.
    parts: tuple[Checkpoint, ...] = ()
    # A key of RULES: the codebase that the file follows. Text encoders: how prompts are read.
    reference: str = ""
    # Another released model has the same tensors, so `variant` is a guess by the name of the file.
    is_assumed: bool = False
    # Lines for the user: a config.json that was ignored, or an unused moving average.
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name in errors."""
        return shown(self.path) if self.path.is_file() else self.path.name

    @property
    def quantised(self) -> bool:
        """Whether the file contains weights of integers, or scales of quantised weights."""
        return any(
            name.rpartition(".")[2] in QUANTISED_PARTS
            or (name.endswith(".weight") and not header.dtype.is_floating_point)
            for name, header in self.headers.items()
        )

    @property
    def parameters(self) -> int:
        """The number of values in all tensors."""
        return sum(math.prod(header.shape) for header in self.headers.values())

    @property
    def components(self) -> tuple[Checkpoint, ...]:
        """The components of a pipeline, or the checkpoint itself."""
        return self.parts or (self,)

    @property
    def transformer(self) -> Checkpoint | None:
        """The first transformer among the components, of images or of videos."""
        return next((part for part in self.components if part.kind in TRANSFORMER_KINDS), None)

    @property
    def is_video(self) -> bool:
        """Whether it is a component of SANA-Video, or a pipeline with a transformer of SANA-Video."""
        row = CHECKPOINT_KINDS.get((self.transformer or self).kind)
        return row is not None and row.is_video

    @property
    def description(self) -> str:
        """The kind and the variant, for users."""
        if self.kind == "other":
            return self.variant
        title = f"a {CHECKPOINT_KINDS[self.kind].title}"
        variant = f"{self.variant}, assumed from the file's name" if self.is_assumed else self.variant
        return f"{title} ({variant})" if variant else title

    @property
    def scheduler_file(self) -> Path | None:
        """The scheduler's configuration in the diffusers folder of this transformer, or None."""
        folder = self.path.absolute().parent
        file = folder.parent / "scheduler" / "scheduler_config.json"
        return file if folder.name == CHECKPOINT_KINDS["transformer"].folder and file.exists() else None

    @cached_property
    def scheduler_config(self) -> Json | None:
        """The content of `scheduler_file`. It is read once."""
        return None if self.scheduler_file is None else read_json(self.scheduler_file)


# A checkpoint, or the path of one. `inspect_checkpoint` turns it into a checkpoint.
Source = str | Path | Checkpoint


def find_part(checkpoint: Checkpoint, *kinds: str) -> Checkpoint:
    """Return the first component of one of `kinds`. Errors are about the first of `kinds`."""
    for part in checkpoint.components:
        if part.kind in kinds:
            return part
    row = CHECKPOINT_KINDS[kinds[0]]
    if (checkpoint.path / "model_index.json").is_file() and row.folder is not None:
        in_folder = [part for part in checkpoint.parts if part.path.parent == checkpoint.path / row.folder]
        # A pipeline has no ControlNet unless it has its folder.
        if not in_folder and (kinds[0] != "controlnet" or (checkpoint.path / row.folder).exists()):
            raise MissingFileError(
                f"{checkpoint.name}: no config.json in {checkpoint.name}/{row.folder}; download the folder again, whole"
            )
        checkpoint = in_folder[0] if in_folder else checkpoint
    descriptions = ", ".join(part.description for part in checkpoint.components)
    raise CheckpointError(f"{checkpoint.name}: not {row.wanted}: found {descriptions}; {row.remedy}")
