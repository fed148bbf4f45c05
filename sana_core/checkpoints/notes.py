"""What users should know of a checkpoint that loads: lines for the loader nodes and for `inspect`."""

from __future__ import annotations

import re

import torch

from ..model.reference import AUTO, RULES
from .checkpoint import Checkpoint
from .downloads import GEMMA_FILE
from .headers import PICKLED, map_file, read_file, read_tensors
from .load import text_reference
from .schedulers import scheduler_notes

BASE_NAME = re.compile(r"gemma[-_. ]?2[-_. ]2b", re.IGNORECASE)
TUNED_NAME = re.compile(r"(?<![a-z])(it|instruct|elm)(?![a-z])", re.IGNORECASE)
# The parts of a path that can name a model: in a cache of the hub, the repository is three levels above the file.
NAMING_PARTS = 4
LOWER_CASE = "prompts: read in lower case, and marks like --ar 16:9 are read as text, as in diffusers"


def checkpoint_notes(checkpoint: Checkpoint, reference: str = AUTO) -> list[str]:
    """Return the lines about a checkpoint or a component whose prompts are read as `reference` says."""
    lines: list[str] = []
    for part in checkpoint.parts or (checkpoint,):
        lines += part.notes
        if part.kind == "transformer":
            lines += scheduler_notes(part)
        if part.kind == "text_encoder":
            lines += base_gemma_notes(part)
            if RULES[text_reference(checkpoint, reference)].lower_case:
                lines.append(LOWER_CASE)
    return lines


def base_gemma_notes(part: Checkpoint) -> list[str]:
    """Return a line if the text encoder `part` seems to be the base model Gemma-2-2b, whose shapes are those of -it.

    Gemma-2-2b-it was released in bfloat16, so bfloat16 has all its numbers, also where a file stores them in float16 or
    float32. The base model was released in float32. A file of it in bfloat16 is recognised by its name alone.
    """
    if part.variant != "gemma-2-2b" or "norm.weight" not in part.origins:
        return []
    stored = part.origins["norm.weight"].name
    reader = map_file if part.path.suffix.lower() in PICKLED else read_file
    norm = read_tensors(part.weights, [stored], reader)[stored]
    if not torch.equal(norm.bfloat16().to(norm.dtype), norm):
        reason = "its numbers are finer than the bfloat16 of Gemma-2-2b-it"
    elif is_base_name("/".join(part.path.parts[-NAMING_PARTS:])):
        reason = "its name is that of the base model"
    else:
        return []
    return [
        f"{part.name}: probably not Gemma-2-2b-it, which SANA was trained with ({reason}); images follow prompts "
        f"worse, so use {GEMMA_FILE}"
    ]


def is_base_name(path: str) -> bool:
    return bool(BASE_NAME.search(path)) and not TUNED_NAME.search(path)
