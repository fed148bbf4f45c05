"""NVIDIA's .pth: torch's zip of a pickle and storages, read without torch.load and without unpickling anything.

A trainer's checkpoint also contains the optimizer and the states of random generators, which are numpy's. Only the
weights are read. The pickle is a program for a stack machine, and `evaluate` runs it on plain values: it calls no
function that the pickle names. A pickle that names anything but tensors and numpy arrays is refused all the same.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection, Mapping
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import torch

from ..errors import CheckpointError, ReadError
from ..runtime.text import brief, shown
from .files import REDOWNLOAD, opened

LARGEST_PICKLE = 16_000_000
# Operations of a pickle. A tensor needs about 25.
MOST_OPERATIONS = 1_000_000
MOST_MEMBERS = 100_000
MOST_DIMENSIONS = 16
LARGEST_SIDE = 2**48
# the last bytes of an archive without a comment: a signature and 18 bytes more
ARCHIVE_END = b"PK\5\6"
ARCHIVE_END_SIZE = 22
# Where a member's header in an archive has the lengths of its name and its extra field, and the bytes of that header.
LENGTHS, MEMBER_HEADER = 26, 30
TENSOR, PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
SIZE, DICT = "torch Size", "collections OrderedDict"
# Names that a pickle of weights may contain, in addition to the storages and dtypes of torch.
NAMED = {DICT, SIZE, TENSOR, PARAMETER, "torch device"}
# What numpy's arrays and numbers name. Their values are skipped.
NUMPY = {
    *(f"numpy.{core}.multiarray {name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *("numpy ndarray", "numpy dtype", "_codecs encode", "__builtin__ bytes"),
}
STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
# Operations of a pickle that push a number or a text.
NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
TEXTS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
BYTES = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
# Names of the weights in a trainer's checkpoint, and of their moving average.
WEIGHTS, EMA = "state_dict", "state_dict_ema"
INSTEAD = "use the .safetensors file of the diffusers repository"


class Global(NamedTuple):
    """A function or class that a pickle names. It is never looked up."""

    name: str


class Storage(NamedTuple):
    """The numbers of one or more tensors."""

    dtype: torch.dtype
    # Bytes in the file.
    begin: int
    size: int


class Stored(NamedTuple):
    """A tensor. Offset and strides count elements of the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.storage.dtype.itemsize


class PickledWeights(NamedTuple):
    """The tensors of a file by their names, and whether it also has a moving average that was not chosen."""

    tensors: dict[str, Stored]
    has_ema: bool


def read_pickled(
    file: Path, mapped: bool = True, names: Collection[str] | None = None, ema: bool = False
) -> dict[str, torch.Tensor]:
    """Return the tensors of NVIDIA's .pth, mapped into memory, or in memory of their own. `names` selects some of them.

    `ema`: return the moving average of the weights.
    """
    listed_tensors = list_pickled(file, ema).tensors
    tensors: dict[str, torch.Tensor] = {}
    storages: dict[Storage, torch.UntypedStorage] = {}
    with opened(file) as (stream, size):
        mapped_file = map_storage(file, size) if mapped else None
        for name, tensor in listed_tensors.items():
            if names is not None and name not in names:
                continue
            storage = tensor.storage
            if storage not in storages:
                end = storage.begin + storage.size
                if mapped_file is None or not storage.size:
                    storages[storage] = read_storage(file, stream, storage)
                else:
                    storages[storage] = mapped_file[storage.begin : end]
            empty = torch.empty(0, dtype=storage.dtype)
            tensors[name] = empty.set_(storages[storage], tensor.offset, tensor.shape, tensor.stride)
    return tensors


def map_storage(file: Path, size: int) -> torch.UntypedStorage:
    """Return the whole file, mapped into memory."""
    try:
        return torch.UntypedStorage.from_file(str(file), False, size)  # type: ignore[return-value]
    except RuntimeError as error:
        raise ReadError(f"{shown(file)}: cannot be read ({brief(error)}); see its rights and its disk") from error


def read_storage(file: Path, stream: BufferedReader, storage: Storage) -> torch.UntypedStorage:
    """Return the bytes of a storage."""
    values = torch.empty(storage.size, dtype=torch.uint8)
    stream.seek(storage.begin)
    if storage.size and stream.readinto(values.numpy().data) != storage.size:
        raise CheckpointError(f"{shown(file)}: was shortened while it was read; {REDOWNLOAD}")
    return values.untyped_storage()


def list_pickled(file: Path, ema: bool = False) -> PickledWeights:
    """Return the positions of the weights in a .pth, or with `ema` of their moving average."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise CheckpointError(
            f"{shown(file)}: got torch {torch.__version__}, expected 2.6 or newer for .pth; use .safetensors"
        )
    with opened(file) as (stream, size):
        content, storages = open_archive(file, stream, size)
    operations = read_operations(file, content)
    try:
        document = evaluate(operations, storages)
    # What a broken pickle leads to: values of other types, and an empty stack.
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        reason = brief(str(error) or type(error).__name__, 100)
        raise CheckpointError(
            f"{shown(file)}: torch cannot read it safely ({reason}); {REDOWNLOAD}, or {INSTEAD}"
        ) from None
    document = document if isinstance(document, dict) else {}
    average = document.get(EMA) if isinstance(document.get(EMA), dict) else None
    if ema and average is None:
        raise CheckpointError(
            f"{shown(file)}: got no {EMA}, expected a training's checkpoint with a moving average; leave out ema"
        )
    weights = document.get(WEIGHTS, document if average is None else average)
    chosen = average if ema else weights
    tensors = {name: value for name, value in (chosen or {}).items() if isinstance(value, Stored)}
    if not tensors:
        raise CheckpointError(
            f"{shown(file)}: got a pickle without weights, expected a state_dict of tensors; use another file"
        )
    check_sizes(file, tensors, size)
    return PickledWeights(tensors, average is not None and chosen is not average)


def open_archive(file: Path, stream: BufferedReader, size: int) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the pickle of a .pth of `size` bytes, and {key: (first byte, bytes)} of its storages."""
    # The archive has to end with its table, so that no other program finds another table.
    stream.seek(max(size - ARCHIVE_END_SIZE, 0))
    if not stream.read(len(ARCHIVE_END)) == ARCHIVE_END:
        raise CheckpointError(
            f"{shown(file)}: corrupt, incomplete, or saved by a torch before 1.6: got no zip archive of "
            f"{size} bytes; {REDOWNLOAD}, or {INSTEAD}"
        )
    try:
        with ZipFile(stream) as archive:
            members = archive.infolist()
            pickles = [member for member in members if member.filename.endswith("data.pkl")]
            packed = any(m.compress_type != ZIP_STORED or m.compress_size != m.file_size for m in members)
            if packed or len(members) > MOST_MEMBERS or sum(m.file_size for m in members) > size:
                raise CheckpointError(
                    f"{shown(file)}: got an archive that is compressed, or larger inside than outside, which "
                    f"torch never saves; {INSTEAD}"
                )
            if len(pickles) != 1 or pickles[0].file_size > LARGEST_PICKLE or members[0].header_offset:
                raise CheckpointError(f"{shown(file)}: got an archive that torch has not saved; {REDOWNLOAD}")
            content, folder = archive.read(pickles[0]), pickles[0].filename.removesuffix("data.pkl")
            order = [member for member in members if member.filename == f"{folder}byteorder"]
            if order and archive.read(order[0]) != b"little":
                raise CheckpointError(f"{shown(file)}: got the byte order of another computer; {INSTEAD}")
            inside = [member for member in members if member.filename.startswith(f"{folder}data/")]
            return content, {m.filename.removeprefix(f"{folder}data/"): place_of(stream, m, size) for m in inside}
    except (BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{shown(file)}: corrupt or incomplete, got {size} bytes ({brief(error)}); {REDOWNLOAD}"
        ) from None


def place_of(stream: BufferedReader, member: ZipInfo, size: int) -> tuple[int, int]:
    """Return at which byte of the file the content of a member begins, and its bytes' number."""
    stream.seek(member.header_offset + LENGTHS)
    lengths = stream.read(MEMBER_HEADER - LENGTHS)
    name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    begin = member.header_offset + MEMBER_HEADER + name + extra
    if begin + member.file_size > size:
        raise ValueError(f"a member ends at byte {begin + member.file_size}")
    return begin, member.file_size


def read_operations(file: Path, content: bytes) -> list[tuple[str, Any]]:
    """Return the operations of a pickle and their arguments.

    Raises CheckpointError for a pickle that names anything but tensors and numpy arrays.
    """
    operations: list[tuple[str, Any]] = []
    try:
        for operation, argument, _ in pickletools.genops(content):
            name = operation.name
            if name == "GLOBAL" and not (argument in NAMED or argument in NUMPY or is_torch_type(str(argument))):
                raise CheckpointError(
                    f"{shown(file)}: got a pickle that calls {brief(argument)}, expected nothing but tensors; {INSTEAD}"
                )
            if len(operations) > MOST_OPERATIONS or name in ("EMPTY_SET", "FROZENSET", "STACK_GLOBAL", "EXT4"):
                raise CheckpointError(f"{shown(file)}: got a pickle that is no state_dict's; {INSTEAD}")
            operations.append((name, argument))
        return operations
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{shown(file)}: corrupt or incomplete pickle ({brief(error)}); {REDOWNLOAD}") from None


def is_torch_type(name: str) -> bool:
    """Whether a pickle's global, "module name", is one of torch's storages or dtypes."""
    module, _, attribute = name.partition(" ")
    return module == "torch" and (
        attribute.endswith("Storage") or isinstance(getattr(torch, attribute, None), torch.dtype)
    )


def evaluate(operations: list[tuple[str, Any]], storages: Mapping[str, tuple[int, int]]) -> object:
    """Return the value of a pickle: dicts with texts and numbers as keys, tuples, texts, numbers and Stored tensors.

    Everything else is None: lists, arrays, objects, and the results of all calls that make no tensor. Nothing is
    called or imported. Raises ValueError, TypeError, KeyError, IndexError or AttributeError for a broken pickle.
    """
    stack: list = []
    marks: list[list] = []
    memo: dict[object, object] = {}
    for name, argument in operations:
        if name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in NUMBERS or name in TEXTS:
            stack.append(argument)
        elif name in BYTES or name == "EMPTY_LIST":
            stack.append(None)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "MARK":
            marks.append(stack)
            stack = []
        elif name in ("TUPLE", "LIST", "DICT", "SETITEMS", "APPENDS", "POP_MARK"):
            items, stack = stack, marks.pop()
            if name == "TUPLE":
                stack.append(tuple(items))
            elif name == "LIST":
                stack.append(None)
            elif name == "DICT":
                stack.append(set_items({}, items))
            elif name == "SETITEMS":
                set_items(stack[-1], items)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            set_items(stack[-1], [key, value])
        elif name in ("APPEND", "POP", "BUILD"):
            stack.pop()
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(Global(str(argument)))
        elif name == "BINPERSID":
            stack.append(storage_of(stack.pop(), storages))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(result_of(function, arguments))
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the operation {name}")
    raise ValueError("it has no end")


def set_items(target: object, items: list) -> object:
    """Set the keys and values `items` of a dict. Objects that are skipped stay None."""
    if isinstance(target, dict):
        pairs = zip(items[::2], items[1::2], strict=True)
        # Other keys are not used. The hash of a tuple that nests deeply would end the process.
        target.update({key: value for key, value in pairs if isinstance(key, str | int | float)})
    return target


def storage_of(reference: object, storages: Mapping[str, tuple[int, int]]) -> Storage | None:
    """Return the storage that a pickle refers to, None for one of complex or quantised numbers.

    The size in the reference is not used: the member's size is true.
    """
    if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
        raise ValueError("a reference to no storage")
    dtype = STORAGES.get(reference[1].name)
    return None if dtype is None else Storage(dtype, *storages[reference[2]])


def result_of(function: object, arguments: object) -> object:
    """Return the tensor, parameter, size or dict that a pickle creates by a call, None for every other call."""
    if not isinstance(arguments, tuple):
        raise ValueError("a call without arguments")
    name = function.name if isinstance(function, Global) else ""
    if name == DICT:
        return {}
    if name in (SIZE, PARAMETER):
        return arguments[0]
    if name != TENSOR or arguments[0] is None:
        return None
    storage, offset, shape, stride = arguments[:4]
    numbers = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or len(shape) != len(stride) or len(shape) > MOST_DIMENSIONS:
        raise ValueError("a tensor without storage or shape")
    if any(type(number) is not int or not 0 <= number <= LARGEST_SIDE for number in numbers):
        raise ValueError(f"a tensor of {brief(shape)}")
    if 0 not in shape:
        last = offset + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))
        if (last + 1) * storage.dtype.itemsize > storage.size:
            raise ValueError(f"a tensor of {brief(shape)} in {storage.size} bytes")
    return Stored(storage, offset, shape, stride)


def check_sizes(file: Path, tensors: dict[str, Stored], size: int) -> None:
    """Raise CheckpointError for tensors that share or repeat their storage, and so are more than the file."""
    odd = [name for name, tensor in tensors.items() if not isinstance(name, str) or tensor.size > tensor.storage.size]
    if odd:
        raise CheckpointError(
            f"{shown(file)}: got a tensor {brief(odd[0])} that is no plain one of bytes in the file; {INSTEAD}"
        )
    total = sum(tensor.size for tensor in tensors.values())
    if total > size:
        raise CheckpointError(
            f"{shown(file)}: got tensors of {total} bytes in a file of {size}, expected each to have its own; {INSTEAD}"
        )
