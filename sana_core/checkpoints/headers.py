"""Weights files: read headers with names, shapes, dtypes and positions, read tensors, and write safetensors files.

safetensors' reader, safe_open, is faster (3 ms for 1,000 tensors, 16 ms here), but it maps the file. If a program
shortens a mapped file, SIGBUS ends this process. It also does not return the position of a tensor, which `read_file`
needs. It builds a header of up to 100 MB, with any number of tensors, dimensions and characters of a name, before
anything can be refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError, MissingFileError
from ..runtime.checks import RENAME, check_text
from ..runtime.text import brief, shown
from .files import REDOWNLOAD, TensorReader, opened, parse_json, read_json
from .pickled import EMA, list_pickled, read_pickled

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# The scales of mxfp8. torch 2.6 does not have this dtype.
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
SAFETENSORS = (".safetensors", ".sft")
PICKLED = (".pth",)
SUFFIXES = SAFETENSORS + PICKLED
# The header of a SANA file has less than 1 MB and 3000 tensors. A larger one could fill the memory.
LARGEST_HEADER = 16_000_000
MOST_TENSORS = 100_000
LONGEST_NAME = 1000
MOST_DIMENSIONS = 8
LARGEST_SIDE = 2**40
MOST_SHARDS = 1000
# JSON can contain half of a surrogate pair. No encoding can write it.
SURROGATE = re.compile("[\ud800-\udfff]")
# Numbers of a tensor that are compared at once.
PART = 2**22
# The header of a written file has a multiple of this many bytes, so that the tensors after it are aligned.
HEADER_ALIGNMENT = 8


class Header(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    # The first byte, counted from the end of the header.
    begin: int = 0

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Headers = Mapping[str, Header]


class Weights(NamedTuple):
    """The tensors of one file, or of one sharded set of files."""

    headers: dict[str, Header]
    metadata: dict[str, str]


def read_header(file: Path, ema: bool = False) -> Weights:
    """Return the header of one weights file. Nothing else is read from a .safetensors file.

    `ema` chooses the moving average of the weights in a .pth. If the file has one that is not chosen, the metadata have
    the entry EMA.
    """
    if file.suffix.lower() in PICKLED:
        stored, has_ema = list_pickled(file, ema)
        headers = {name: Header(tensor.shape, tensor.storage.dtype, file) for name, tensor in stored.items()}
        return Weights(headers, {EMA: "not chosen"} if has_ema else {})
    if file.suffix.lower() not in SAFETENSORS:
        raise CheckpointError(
            f"{shown(file)}: got a {brief(file.suffix) or 'nameless'} file, expected one of {', '.join(SUFFIXES)}; "
            "use a safetensors file"
        )
    with opened(file) as (stream, size):
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + length > size or length > LARGEST_HEADER:
            raise broken(file, size, f"no safetensors header: it asks for {length} bytes")
        text = stream.read(length)
    # A repeated name leaves a gap below. Comparing all pairs would take as long as everything else.
    content = parse_json(text, f"{shown(file)}: corrupt or incomplete, got {size} bytes, its header", make=None)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise broken(file, size, "its metadata are no table of texts")
    if len(content) > MOST_TENSORS:
        raise broken(file, size, f"{len(content)} tensors, expected at most {MOST_TENSORS}")
    headers, spans = {}, []
    for name, entry in content.items():
        if len(name) > LONGEST_NAME or SURROGATE.search(name):
            raise broken(file, size, f"a tensor named {brief(name)}, which is no name")
        try:
            kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [begin, end, *shape]
            is_whole = type(kind) is str and type(shape) is list and len(entry) == 3 and {*map(type, numbers)} == {int}
        except (KeyError, TypeError, ValueError):
            is_whole = False
        if not is_whole or min(numbers) < 0 or len(shape) > MOST_DIMENSIONS or max(shape, default=0) > LARGEST_SIDE:
            raise broken(file, size, f"its header has no whole dtype, shape and data_offsets of {brief(name)}")
        if kind not in DTYPES:
            raise CheckpointError(
                f"{shown(file)}: got dtype {brief(kind)} in {brief(name)}, expected {', '.join(DTYPES)}; use another "
                "file"
            )
        if end - begin != prod(shape) * DTYPES[kind].itemsize:
            raise broken(file, size, f"a tensor's shape does not fit its bytes: {brief(name)}")
        headers[name] = Header(tuple(shape), DTYPES[kind], file, begin)
        spans.append((begin, end))
    end = 0
    for begin, until in sorted(spans):
        if begin != end:
            raise broken(file, size, f"its tensors overlap or leave a gap at byte {brief(begin)}")
        end = until
    if 8 + length + end != size:
        raise broken(file, size, f"expected {brief(8 + length + end)} bytes")
    return Weights(headers, metadata)


def broken(file: Path, size: int, fault: str) -> CheckpointError:
    return CheckpointError(f"{shown(file)}: corrupt or incomplete, got {size} bytes, {fault}; {REDOWNLOAD}")


def read_sharded(index: Path) -> Weights:
    """Return the headers of all files that a safetensors index names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{shown(index)}: got no index of safetensors files; {REDOWNLOAD}")
    names = sorted(set(weight_map.values()))
    for name in names:
        # A name in this folder, and not a path on any operating system.
        is_plain = not set(name) & set("/\\:\0") and name not in ("", ".", "..") and not SURROGATE.search(name)
        if not is_plain or Path(name).suffix.lower() not in SAFETENSORS:
            raise CheckpointError(
                f"{shown(index)}: names {brief(name)}, expected safetensors files of its own folder; {REDOWNLOAD}"
            )
    if len(names) > MOST_SHARDS:
        raise CheckpointError(f"{shown(index)}: names {len(names)} files, expected at most {MOST_SHARDS}; {REDOWNLOAD}")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise MissingFileError(
            f"{brief(shown(index.parent / missing[0]))}: no such file, but {index.name} names it; {REDOWNLOAD}"
        )
    shards = {name: read_header(index.parent / name).headers for name in names}
    lost = [name for name, shard in weight_map.items() if name not in shards[shard]]
    if lost:
        raise CheckpointError(
            f"{shown(index.parent / weight_map[lost[0]])}: no tensor {brief(lost[0])}, but {index.name} names it; "
            f"{REDOWNLOAD}"
        )
    return Weights({name: shards[shard][name] for name, shard in weight_map.items()}, {})


def read_file(
    file: Path,
    names: Collection[str] | None = None,
    half: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file whose header was read. `names` selects some of them.

    `half`, `dtype`, `device`: see `TensorReader`. The file is not mapped into memory: a program that shortens a mapped
    file ends this process with SIGBUS, and a program that writes into it changes the model.
    """
    if file.suffix.lower() in PICKLED:
        return read_pickled(file, mapped=False, names=names, half=half, dtype=dtype, device=device)
    headers = read_header(file).headers
    with opened(file) as (stream, _):
        start = 8 + int.from_bytes(stream.read(8), "little")
        reader = TensorReader(file, stream, half, dtype, device)
        return {
            name: reader.read(start + header.begin, header.size, header.dtype).view(header.shape)
            for name, header in headers.items()
            if names is None or name in names
        }


def exact_half(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in bfloat16 if it is float32 and bfloat16 has the same numbers, else `tensor` itself."""
    if tensor.dtype != torch.float32:
        return tensor
    half = tensor.bfloat16()
    parts = zip(half.flatten().split(PART), tensor.flatten().split(PART), strict=True)
    return half if all(torch.equal(one.float(), other) for one, other in parts) else tensor


def map_file(file: Path, names: Collection[str] | None = None, ema: bool = False) -> dict[str, torch.Tensor]:
    """Return all tensors of a file whose header was read, mapped into memory. Use them before the file changes.

    `ema` chooses the moving average of the weights in a .pth.
    """
    if file.suffix.lower() in PICKLED:
        return read_pickled(file, ema=ema)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_text(shown(file), str(file), RENAME)
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shown(file)}: safetensors cannot read it ({brief(error)}); {REDOWNLOAD}") from None


Reader = Callable[[Path, Collection[str]], dict[str, torch.Tensor]]


def read_tensors(weights: Weights, names: Iterable[str], read: Reader = read_file) -> dict[str, torch.Tensor]:
    """Return the named tensors. `read` is called once for each file, with all names."""
    name_files = {name: weights.headers[name].file for name in names}
    files: dict[Path, Any] = {file: read(file, name_files.keys()) for file in dict.fromkeys(name_files.values())}
    changed = [(name, file) for name, file in name_files.items() if name not in files[file]]
    if changed:
        name, file = changed[0]
        raise CheckpointError(f"{shown(file)}: no tensor {brief(name)} any more, the file has changed; load it again")
    return {name: files[file][name] for name, file in name_files.items()}


def tensor_bytes(weights: Weights, name: str, largest: int, owner: str) -> bytes:
    """Return the content of a tensor of at most `largest` bytes. Errors call it `owner`."""
    header = weights.headers[name]
    if header.dtype != torch.uint8 or len(header.shape) != 1 or header.size > largest:
        raise CheckpointError(f"{shown(header.file)}: {brief(name)} is no tensor of {owner}'s bytes; {REDOWNLOAD}")
    return read_tensors(weights, [name])[name].numpy().tobytes()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. The same tensors give the same bytes.

    The library's writer shuffles the metadata, and a process that is killed leaves its temporary file. Tensors of the
    widest dtype come first, which keeps all of them aligned.
    """
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    names, end = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)), 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        kind, shape = dtype_names[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            # One at a time on the CPU. A tensor without dimensions has no bytes to view.
            flat = tensors[name].detach().to("cpu").contiguous().reshape(-1)
            stream.write(flat.view(torch.uint8).numpy().data)
