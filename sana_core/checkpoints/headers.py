"""What a weights file holds, read from its header alone: names, shapes, dtypes, and where the bytes are.

safetensors' own reader, safe_open, is not used here, although it takes 3 ms where this takes 16 for 1,000 tensors: it
maps the file, which ends the process by SIGBUS when somebody shortens the file meanwhile, and it does not say at which
byte a tensor begins, which `read_file` needs to read it into memory of its own. It also builds a header of up to 100
MB, with any number of tensors and dimensions and names of any length, before anything can be refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError, MissingFileError
from ..runtime.text import brief, shown
from .files import REDOWNLOAD, START, check_start, opened, parse_json, read_json
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
# a header of a SANA file has under 1 MB and 3000 tensors; more would take memory before anything is known of the file
LARGEST_HEADER = 16_000_000
MOST_TENSORS = 100_000
LONGEST_NAME = 1000
MOST_DIMENSIONS = 8
LARGEST_SIDE = 2**40
MOST_SHARDS = 1000
# Numbers of a tensor that are read and compared at once.
PART = 2**22
# The header of a written file has a multiple of this many bytes, so that the tensors after it are aligned.
HEADER_ALIGNMENT = 8


class Header(NamedTuple):
    """One tensor: its shape, its dtype, the file that holds it, and at which of the data's bytes it begins."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    begin: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


Headers = Mapping[str, Header]


class Weights(NamedTuple):
    """The tensors of one file, or of one sharded set of files."""

    headers: dict[str, Header]
    metadata: dict[str, str]


def read_header(file: Path, ema: bool = False) -> Weights:
    """Return the header of one weights file; of a .safetensors file nothing else is read.

    `ema` chooses the moving average of the weights in a .pth. If the file has one that is not chosen, the metadata have
    the entry EMA.

    Raises MissingFileError for a file that is gone, ReadError where the disk refuses, CheckpointError for one that is
    truncated, no safetensors file, or of another kind than .safetensors, .sft and .pth.
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
        start = stream.read(START)
        check_start(file, start)
        length = int.from_bytes(start[:8], "little")
        if size < 8 or 8 + length > size or length > LARGEST_HEADER:
            raise broken(file, size, f"no safetensors header: it asks for {length} bytes")
        stream.seek(8)
        text = stream.read(length)
    # a name that stands twice leaves a gap below; to look at every pair would take as long as all else
    content = parse_json(text, f"{shown(file)}: corrupt or incomplete, got {size} bytes, its header", make=None)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise broken(file, size, "its metadata are no table of texts")
    if len(content) > MOST_TENSORS:
        raise broken(file, size, f"{len(content)} tensors, expected at most {MOST_TENSORS}")
    headers, spans = {}, []
    for name, entry in content.items():
        headers[name], span = read_entry(file, size, name, entry)
        spans.append(span)
    end = 0
    for begin, until in sorted(spans):
        if begin != end:
            raise broken(file, size, f"its tensors overlap or leave a gap at byte {brief(begin)}")
        end = until
    if 8 + length + end != size:
        raise broken(file, size, f"expected {brief(8 + length + end)} bytes")
    return Weights(headers, metadata)


def read_entry(file: Path, size: int, name: str, entry: Any) -> tuple[Header, tuple[int, int]]:
    """Return one tensor of a safetensors header, and where its bytes begin and end. Raises CheckpointError."""
    if len(name) > LONGEST_NAME or not is_text(name):
        raise broken(file, size, f"a tensor named {brief(name)}, which is no name")
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [begin, end, *shape]
        right = type(kind) is str and type(shape) is list and len(entry) == 3 and {*map(type, numbers)} == {int}
    except (KeyError, TypeError, ValueError):
        right = False
    if not right or min(numbers) < 0 or len(shape) > MOST_DIMENSIONS or max(shape, default=0) > LARGEST_SIDE:
        raise broken(file, size, f"its header has no whole dtype, shape and data_offsets of {brief(name)}")
    if kind not in DTYPES:
        raise CheckpointError(
            f"{shown(file)}: got dtype {brief(kind)} in {brief(name)}, expected {', '.join(DTYPES)}; use another file"
        )
    header = Header(tuple(shape), DTYPES[kind], file, begin)
    if end - begin != header.size:
        raise broken(file, size, f"a tensor's shape does not fit its bytes: {brief(name)}")
    return header, (begin, end)


def is_text(name: str) -> bool:
    """Whether `name` can be written; JSON can carry half a character of two, and no encoding can."""
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


def broken(file: Path, size: int, what: str) -> CheckpointError:
    return CheckpointError(f"{shown(file)}: corrupt or incomplete, got {size} bytes, {what}; {REDOWNLOAD}")


def read_sharded(index: Path) -> Weights:
    """Return the headers of all files that a safetensors index names.

    Raises CheckpointError for an index that is none, names a file outside its folder, or a tensor that is not where it
    says; MissingFileError for a missing shard.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{shown(index)}: got no index of safetensors files; {REDOWNLOAD}")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if not is_plain(name) or Path(name).suffix.lower() not in SAFETENSORS]
    if outside:
        raise CheckpointError(
            f"{shown(index)}: names {brief(outside[0])}, expected safetensors files of its own folder; {REDOWNLOAD}"
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


def is_plain(name: str) -> bool:
    """Whether `name` is a file's name, and no path on any system."""
    return not set(name) & set("/\\:\0") and name not in ("", ".", "..") and is_text(name)


def read_file(file: Path, names: Collection[str] | None = None, half: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a file whose header was read. `names` selects some of them.

    With `half`, float32 tensors become bfloat16 if bfloat16 has the same numbers. The file is not mapped into memory: a
    program that shortens a mapped file ends this process with SIGBUS, and a program that writes into it changes the
    model. Raises CheckpointError for a file that is broken or becomes shorter while it is read, MissingFileError for a
    missing file, and ReadError if the disk fails.
    """
    if file.suffix.lower() in PICKLED:
        tensors = read_pickled(file, mapped=False, names=names)
        if half:
            # One at a time, so that a float32 tensor is freed before the next one is converted.
            for name in tensors:
                tensors[name] = exact_half(tensors[name])
        return tensors
    headers = read_header(file).headers
    tensors = {}
    with opened(file) as (stream, size):
        start = 8 + int.from_bytes(stream.read(8), "little")

        def read_into(tensor: torch.Tensor) -> None:
            room = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            if len(room) and stream.readinto(room) != len(room):
                raise broken(file, size, "it was shortened while it was read")

        # All tensors share two buffers. New ones for each tensor would fragment the memory.
        buffers = torch.empty(2, PART if half else 0)
        for name, header in headers.items():
            if names is not None and name not in names:
                continue
            tensor = None
            if half and header.dtype == torch.float32:
                stream.seek(start + header.begin)
                tensor = torch.empty(header.shape, dtype=torch.bfloat16)
                for numbers in tensor.view(-1).split(PART):
                    part, again = buffers[:, : numbers.numel()]
                    read_into(part)
                    if not torch.equal(again.copy_(numbers.copy_(part)), part):
                        tensor = None
                        break
            if tensor is None:
                stream.seek(start + header.begin)
                tensor = torch.empty(header.shape, dtype=header.dtype)
                read_into(tensor)
            tensors[name] = tensor
    return tensors


def exact_half(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in bfloat16 if it is float32 and bfloat16 has the same numbers, else `tensor` itself."""
    if tensor.dtype != torch.float32:
        return tensor
    half = tensor.bfloat16()
    parts = zip(half.flatten().split(PART), tensor.flatten().split(PART), strict=True)
    return half if all(torch.equal(one.float(), other) for one, other in parts) else tensor


def map_file(file: Path, names: Collection[str] | None = None, ema: bool = False) -> dict[str, torch.Tensor]:
    """Return all tensors of a file whose header was read, mapped into memory, for what is done with them at once.

    `ema` chooses the moving average of the weights in a .pth.
    """
    if file.suffix.lower() in PICKLED:
        return read_pickled(file, ema=ema)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shown(file)}: safetensors cannot read it ({brief(error)}); {REDOWNLOAD}") from None


Reader = Callable[[Path, Collection[str]], dict[str, torch.Tensor]]


def read_tensors(weights: Weights, names: Iterable[str], read: Reader = read_file) -> dict[str, torch.Tensor]:
    """Return the named tensors, each file read once by `read`, which gets the names too."""
    wanted = {name: weights.headers[name].file for name in names}
    files: dict[Path, Any] = {file: read(file, wanted.keys()) for file in dict.fromkeys(wanted.values())}
    changed = [(name, file) for name, file in wanted.items() if name not in files[file]]
    if changed:
        name, file = changed[0]
        raise CheckpointError(f"{shown(file)}: no tensor {brief(name)} any more, the file has changed; load it again")
    return {name: files[file][name] for name, file in wanted.items()}


def tensor_bytes(weights: Weights, name: str, largest: int, owner: str) -> bytes:
    """Return what `owner` has put into a tensor of bytes. Raises CheckpointError for another or larger tensor."""
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
