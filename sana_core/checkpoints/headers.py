"""What a weights file holds, read from its header alone: names, shapes, dtypes, and where the bytes are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
SAFETENSORS = (".safetensors", ".sft")
PICKLED = (".pth",)
SUFFIXES = SAFETENSORS + PICKLED
# safetensors' own limit; a header of a SANA file has under 1 MB
LARGEST_HEADER = 100_000_000
AGAIN = "download it again"


class Header(NamedTuple):
    """One tensor: its shape, its dtype, and the file that holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Weights(NamedTuple):
    """The tensors of one file, or of one sharded set of files."""

    headers: dict[str, Header]
    metadata: dict[str, str]


def shown(file: Path) -> str:
    """Return how errors name a file: with its folder, for in diffusers' folders the names are all the same."""
    return f"{file.parent.name}/{file.name}"


def read_header(file: Path) -> Weights:
    """Return the header of one weights file; of a .safetensors file nothing else is read.

    Raises FileNotFoundError for a file that is gone, PermissionError for one that may not be read, ValueError for one
    that is truncated, no safetensors file, or of another kind than .safetensors, .sft and .pth.
    """
    if file.suffix.lower() in PICKLED:
        return Weights({name: Header(tuple(t.shape), t.dtype, file) for name, t in read_pickled(file).items()}, {})
    if file.suffix.lower() not in SAFETENSORS:
        raise ValueError(
            f"{shown(file)}: got a {file.suffix or 'nameless'} file, expected one of {', '.join(SUFFIXES)}"
        )
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or 8 + length > size or length > LARGEST_HEADER:
                raise broken(file, size, f"no safetensors header: it asks for {length} bytes")
            content = json.loads(stream.read(length))
        metadata = content.pop("__metadata__", {})
        headers = {name: Header(tuple(t["shape"]), DTYPES[t["dtype"]], file) for name, t in content.items()}
        spans = [content[name]["data_offsets"] for name in headers]
        ends = [end for begin, end in spans]
    except FileNotFoundError:
        raise FileNotFoundError(f"{shown(file)}: no such file; refresh the list, or download it again") from None
    except PermissionError:
        raise forbidden(file) from None
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError):
        raise broken(file, size, "its header is not JSON") from None
    except KeyError as error:
        raise ValueError(f"{shown(file)}: got a header with {error}, which SANA's files do not have") from None
    wanted = 8 + length + max(ends, default=0)
    if wanted != size:
        raise broken(file, size, f"expected {wanted} bytes")
    if any(end - begin != headers[name].size for name, (begin, end) in zip(headers, spans, strict=True)):
        raise broken(file, size, "a tensor's shape does not fit its bytes")
    return Weights(headers, metadata)


def broken(file: Path, size: int, what: str) -> ValueError:
    return ValueError(f"{shown(file)}: corrupt or incomplete, got {size} bytes, {what}; {AGAIN}")


def forbidden(file: Path) -> PermissionError:
    return PermissionError(f"{shown(file)}: permission denied; let the user that runs this read the file")


def read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of NVIDIA's .pth, mapped into memory, without executing anything that is in the file.

    Raises ValueError where torch's safe unpickler refuses the file, or where torch is older than 2.6, whose safe
    unpickler was not.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise ValueError(
            f"{shown(file)}: got torch {torch.__version__}, expected 2.6 or newer for .pth; use .safetensors"
        )
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{shown(file)}: no such file; refresh the list, or download it again") from None
    except PermissionError:
        raise forbidden(file) from None
    except Exception as error:  # torch raises many kinds for what is no checkpoint
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{shown(file)}: torch cannot read it safely ({reason[:100]}); "
            "download it again, or use the .safetensors file of the diffusers repository"
        ) from None
    tensors = content.get("state_dict", content) if isinstance(content, dict) else {}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise ValueError(f"{shown(file)}: got a pickle without weights, expected a state_dict of tensors")
    return tensors


def read_sharded(index: Path) -> Weights:
    """Return the headers of all files that a safetensors index names.

    Raises ValueError for an index that is no JSON, names a file outside its folder, or a tensor that is not where it
    says; FileNotFoundError for a missing shard.
    """
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{shown(index)}: got no index of safetensors files; {AGAIN}") from None
    outside = [name for name in names if not is_plain(name)]
    if outside:
        raise ValueError(f"{shown(index)}: names {outside[0]!r}, expected files of its own folder; {AGAIN}")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{shown(index.parent / missing[0])}: no such file, but {index.name} names it; {AGAIN}")
    shards = {name: read_header(index.parent / name).headers for name in names}
    lost = [name for name, shard in weight_map.items() if name not in shards[shard]]
    if lost:
        raise ValueError(
            f"{shown(index.parent / weight_map[lost[0]])}: no tensor {lost[0]}, but {index.name} names it; {AGAIN}"
        )
    return Weights({name: shards[shard][name] for name, shard in weight_map.items()}, {})


def is_plain(name: str) -> bool:
    """Whether `name` is a file's name, and no path on any system."""
    return not set(name) & set("/\\:\0") and name not in ("", ".", "..")


def read_file(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file whose header was read, mapped into memory."""
    if file.suffix.lower() in PICKLED:
        return read_pickled(file)
    from safetensors.torch import load_file

    return load_file(file)


Reader = Callable[[Path], dict[str, torch.Tensor]]


def read_tensors(weights: Weights, names: Iterable[str], read: Reader = read_file) -> dict[str, torch.Tensor]:
    """Return the named tensors, each file read once by `read`."""
    wanted = {name: weights.headers[name].file for name in names}
    files: dict[Path, Any] = {file: read(file) for file in dict.fromkeys(wanted.values())}
    return {name: files[file][name] for name, file in wanted.items()}
