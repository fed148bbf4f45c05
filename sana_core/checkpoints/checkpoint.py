"""The result of inspecting a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..runtime.text import Json, shown
from .headers import Headers, Weights
from .keys import Origin

# Suffixes of tensors that belong to quantised weights, as in ComfyUI. "scaled_fp8" has no leading dot, because it is a
# whole name.
SCALES = (
    ".comfy_quant",
    ".weight_scale",
    ".weight_scale_2",
    ".input_scale",
    ".pre_quant_scale",
    ".scale_weight",
    ".scale_input",
    "scaled_fp8",
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, or one component of it, as its headers describe it."""

    path: Path
    # A key of KINDS, or "other".
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
    # Lines for the user: a config.json that was ignored, or an unused moving average.
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name in errors."""
        return shown(self.path) if self.path.is_file() else self.path.name

    @property
    def quantised(self) -> bool:
        """Whether the file contains scales of quantised weights."""
        return any(name.endswith(SCALES) for name in self.headers)


# A checkpoint, or the path of one. `inspect_checkpoint` turns it into a checkpoint.
Source = str | Path | Checkpoint
