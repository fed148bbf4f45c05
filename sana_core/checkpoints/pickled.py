"""NVIDIA's .pth: torch's zip of a pickle and storages, read without torch.load and without unpickling anything.

Of a trainer's checkpoint only the weights are read. torch.load(weights_only=True) refuses the states of numpy's random
generator that it may contain, and a storage whose key is a deeply nested tuple ends its process by a segfault.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from io import BufferedReader
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch

from ..errors import CheckpointError, ReadError
from ..runtime.text import brief, shown
from .files import REDOWNLOAD, TensorReader, opened

# Bytes of the pickle, and of the archive's table.
LARGEST_PICKLE = LARGEST_TABLE = 16_000_000
# Operations of a pickle. A tensor needs about 25.
MOST_OPERATIONS = 1_000_000
MOST_MEMBERS = 100_000
# Characters of a tensor's name or a storage's key.
LONGEST_NAME = 1000
LARGEST_NUMBER = 2**48
# Items of a tuple: the dimensions of a shape, or the arguments of a call.
MOST_ITEMS = 16
# An archive without a comment ends with 22 bytes, of which the first four are a signature.
ARCHIVE_END, ARCHIVE_END_SIZE = b"PK\5\6", 22
# In a member's header: where the lengths of its name and of its extra field are, and the bytes before the name.
LENGTHS, MEMBER_HEADER = 26, 30
# Names of the weights in a trainer's checkpoint, and of their moving average.
WEIGHTS, EMA = "state_dict", "state_dict_ema"
INSTEAD = "use the .safetensors file of the diffusers repository"

# What a call in a pickle creates. Its function is never looked up.
Call = Enum("Call", "DICT FIRST_ARGUMENT TENSOR")
DTYPES = {"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16}
DTYPES |= {"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8}
DTYPES |= {"Bool": torch.bool}
# Everything that a pickle may name. None: the values are skipped, such as other storages and numpy's arrays.
NAMED: dict[str, Call | torch.dtype | None] = {
    **{f"torch {name}": None for name in vars(torch) if name.endswith("Storage")},
    **{f"torch {name}": None for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{f"numpy.{core}.multiarray {name}": None for core in ("core", "_core") for name in ("_reconstruct", "scalar")},
    **dict.fromkeys(("torch device", "numpy ndarray", "numpy dtype", "_codecs encode", "__builtin__ bytes")),
    **{f"torch {name}Storage": dtype for name, dtype in DTYPES.items()},
    "torch Size": Call.FIRST_ARGUMENT,
    "torch._utils _rebuild_parameter": Call.FIRST_ARGUMENT,
    "torch._utils _rebuild_tensor_v2": Call.TENSOR,
    "collections OrderedDict": Call.DICT,
}
# Operations that push a text, a number or another constant onto the stack.
CONSTANTS = {"BINUNICODE", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "NONE", "NEWTRUE", "NEWFALSE"}
CONSTANTS |= {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "EMPTY_LIST"}
# Operations that take this number of values from the stack, or all values above the last mark.
TAKEN = {"TUPLE1": 1, "APPEND": 1, "BUILD": 1, "POP": 1, "BINPERSID": 1}
TAKEN |= {"TUPLE2": 2, "SETITEM": 2, "REDUCE": 2, "NEWOBJ": 2, "TUPLE3": 3}
MARKED = {"TUPLE", "SETITEMS", "APPENDS", "POP_MARK"}


@dataclass(frozen=True)
class Storage:
    """The numbers of one or more tensors: `size` bytes of the file from `begin` on."""

    dtype: torch.dtype
    begin: int
    size: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor. Offset and strides count elements of the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class PickledWeights(NamedTuple):
    """The tensors of a file by their names, and whether it also has a moving average that was not chosen."""

    tensors: dict[str, StoredTensor]
    has_ema: bool


def read_pickled(
    file: Path, mapped: bool = True, names: Collection[str] | None = None, ema: bool = False, **options: Any
) -> dict[str, torch.Tensor]:
    """Return the tensors of NVIDIA's .pth, mapped into memory, or in memory of their own. `names` selects some of them.

    `ema`: return the moving average of the weights. `options` of `TensorReader` are for tensors that are not mapped.
    """
    chosen = list_pickled(file, ema).tensors
    tensors: dict[str, torch.Tensor] = {}
    storages: dict[Storage, torch.Tensor] = {}
    with opened(file) as (stream, size):
        try:
            mapped_file = torch.UntypedStorage.from_file(str(file), False, size) if mapped else None
        except RuntimeError as error:
            raise ReadError(f"{shown(file)}: cannot be read ({brief(error)}); see its rights and its disk") from None
        reader = TensorReader(file, stream, **options)
        for name, tensor in chosen.items():
            if names is not None and name not in names:
                continue
            begin, end, dtype = tensor.storage.begin, tensor.storage.begin + tensor.storage.size, tensor.storage.dtype
            if tensor.storage not in storages and mapped_file is not None and tensor.storage.size:
                storages[tensor.storage] = torch.empty(0, dtype=dtype).set_(mapped_file[begin:end])
            elif tensor.storage not in storages:
                storages[tensor.storage] = reader.read(begin, tensor.storage.size, dtype)
            tensors[name] = storages[tensor.storage].as_strided(tensor.shape, tensor.stride, tensor.offset)
    return tensors


def list_pickled(file: Path, ema: bool = False) -> PickledWeights:
    """Return the positions of the weights in a .pth, or with `ema` of their moving average."""
    with opened(file) as (stream, size):
        try:
            document = evaluate(*open_archive(stream, size))
        # What zipfile and pickletools raise for broken files, and too few values on the stack.
        except (BadZipFile, EOFError, LookupError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{shown(file)}: got {size} bytes ({brief(error, 80)}), expected a state_dict as torch 1.6 or newer "
                f"saves it; {REDOWNLOAD}, or {INSTEAD}"
            ) from None
    document = document if isinstance(document, dict) else {}
    average = document.get(EMA) if isinstance(document.get(EMA), dict) else None
    if ema and average is None:
        raise CheckpointError(
            f"{shown(file)}: got no {EMA}, expected a training's checkpoint with a moving average; leave out ema"
        )
    weights = average if ema else document.get(WEIGHTS, document if average is None else average)
    entries = weights.items() if isinstance(weights, dict) else ()
    tensors = {name: value for name, value in entries if isinstance(value, StoredTensor)}
    if not tensors:
        raise CheckpointError(
            f"{shown(file)}: got a pickle without weights, expected a state_dict of tensors; use another file"
        )
    sizes = [(prod(tensor.shape) * tensor.storage.dtype.itemsize, tensor.storage.size) for tensor in tensors.values()]
    total = sum(tensor_size for tensor_size, _ in sizes)
    if total > size or any(tensor_size > storage_size for tensor_size, storage_size in sizes):
        raise CheckpointError(
            f"{shown(file)}: got tensors of {total} bytes in a file of {size}, expected each to have its own; {INSTEAD}"
        )
    return PickledWeights(tensors, average is not None and weights is not average)


def open_archive(stream: BufferedReader, size: int) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the pickle of a .pth of `size` bytes, and {key: (first byte, bytes)} of its storages."""
    # The archive has to end with its table, so that no other program finds another table.
    stream.seek(max(size - ARCHIVE_END_SIZE, 0))
    if stream.read(len(ARCHIVE_END)) != ARCHIVE_END:
        raise ValueError("no whole zip archive")
    # ZipFile reads the table at once, and the table may claim any size.
    bounded = SimpleNamespace(seek=stream.seek, tell=stream.tell, seekable=stream.seekable)
    bounded.read = lambda count=-1: stream.read(min(count, LARGEST_TABLE))
    with ZipFile(bounded) as archive:  # type: ignore[call-overload]
        members = archive.infolist()
        packed = any(m.compress_type != ZIP_STORED or m.compress_size != m.file_size for m in members)
        if packed or len(members) > MOST_MEMBERS or sum(member.file_size for member in members) > size:
            raise ValueError("an archive that is compressed, or larger inside than outside")
        pickles = [member for member in members if member.filename.endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > LARGEST_PICKLE or members[0].header_offset:
            raise ValueError("an archive that torch has not saved")
        content, folder = archive.read(pickles[0]), pickles[0].filename.removesuffix("data.pkl")
        storages = {}
        for member in members:
            if member.filename == f"{folder}byteorder" and archive.open(member).read(6) != b"little":
                raise ValueError("the byte order of another computer")
            stream.seek(member.header_offset + LENGTHS)
            lengths = int.from_bytes(stream.read(2), "little") + int.from_bytes(stream.read(2), "little")
            begin = member.header_offset + MEMBER_HEADER + lengths
            if begin + member.file_size > size:
                raise ValueError("a member that ends after the file")
            if member.filename.startswith(f"{folder}data/"):
                storages[member.filename.removeprefix(f"{folder}data/")] = (begin, member.file_size)
        return content, storages


def evaluate(content: bytes, storages: Mapping[str, tuple[int, int]]) -> object:
    """Return the value of a pickle, which is a program for a stack machine. Nothing is called or imported.

    A value is a text, a whole number, a Call, a dtype, a Storage, a StoredTensor, a dict with texts as keys, a tuple
    of whole numbers, or a list of the arguments of a call. Everything else is None: lists, objects, other tuples, and
    the results of other calls. Only dicts can nest. Only texts and numbers are hashed, compared or formatted.
    """
    stack: list = []
    marks: list[list] = []
    # The keys are texts. A file could choose numbers whose hashes collide, and a dict of them takes quadratic time.
    memo: dict[str, object] = {}
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        name, arity, items = operation.name, TAKEN.get(operation.name, 0), []
        if count > MOST_OPERATIONS or arity > len(stack):
            raise ValueError("more operations or fewer values than a state_dict has")
        if arity:
            items = stack[-arity:]
            del stack[-arity:]
        elif name in MARKED:
            items, stack = stack, marks.pop()
        match name:
            case "BINPUT" | "LONG_BINPUT":
                memo[f"value {argument}"] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[f"value {argument}"])
            case _ if name in CONSTANTS:
                is_text = isinstance(argument, str) and len(argument) <= LONGEST_NAME and argument.isprintable()
                is_number = isinstance(argument, int) and 0 <= argument <= LARGEST_NUMBER
                stack.append(argument if is_text or is_number else None)
            case "MARK":
                marks.append(stack)
                stack = []
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" | "TUPLE":
                is_shape = {*map(type, items)} <= {int}
                group = tuple(items) if is_shape else [None if isinstance(item, list) else item for item in items]
                stack.append(group if len(items) <= MOST_ITEMS else None)
            case "BINPERSID" | "REDUCE" | "NEWOBJ":
                # A reference to a storage, or a function and its arguments.
                match items:
                    case [["storage", torch.dtype() as dtype, str(key), _, _]] if key in storages:
                        stack.append(Storage(dtype, *storages[key]))
                    case [Call.DICT, _]:
                        stack.append({})
                    case [Call.FIRST_ARGUMENT, [value, *_]]:
                        stack.append(value)
                    case [Call.TENSOR, [Storage() as storage, int(offset), tuple(shape), tuple(stride), *_]]:
                        last = offset + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))
                        if 0 not in shape and (last + 1) * storage.dtype.itemsize > storage.size:
                            raise ValueError(f"a tensor of {shape} in {storage.size} bytes")
                        stack.append(StoredTensor(storage, offset, shape, stride))
                    # Complex and quantised numbers have no dtype and no storage here. Other calls are not used.
                    case [["storage", None, str(), _, _]] | [Call.TENSOR, [None, *_]] | [None, _]:
                        stack.append(None)
                    case _:
                        raise ValueError("a tensor or storage without all of its parts")
            case "PROTO" | "STOP" | "APPEND" | "APPENDS" | "BUILD" | "POP" | "POP_MARK":
                pass
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM" | "SETITEMS":
                if isinstance(stack[-1], dict):
                    pairs = zip(items[::2], items[1::2], strict=True)
                    stack[-1].update((key, value) for key, value in pairs if isinstance(key, str))
            case "GLOBAL":
                if argument not in NAMED:
                    raise ValueError(f"a pickle that calls {brief(argument)}")
                stack.append(NAMED[argument])
            case _:
                raise ValueError(f"the operation {name}")
    return stack.pop()
