"""Tensors to a safetensors file, the same bytes each time: the library's own writer shuffles the metadata.

It also writes by way of a file with a random name beside, which a process that is killed leaves there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from .headers import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
# bytes that the header is a multiple of, so that the tensors behind it are aligned
ALIGNED = 8


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` to `path`, those of the widest dtype first, which keeps each of them aligned. Raises OSError."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    names, end = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)), 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        kind, shape = NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // ALIGNED) * ALIGNED)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            # one at a time on the CPU; a number by itself has no bytes to view
            flat = tensors[name].detach().to("cpu").contiguous().reshape(-1)
            stream.write(flat.view(torch.uint8).numpy().data)
