"""Read a model's files as bytes, as JSON and as the numbers of tensors. Only regular files of bounded size are read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG

import torch

from ..errors import CheckpointError, MissingFileError, ReadError, SanaError
from ..runtime.accelerator import current_device, synchronize
from ..runtime.text import Json, brief, shown

REDOWNLOAD = "download it again"
INCOMPLETE = f"the file is incomplete, or of another model: {REDOWNLOAD}"
FOREIGN = "the file is of another model, or in a format that is not read here: use the plain file of a SANA model"
# Characters of a file's name in an error.
LONGEST_NAME = 240
# Configurations and indexes of SANA's models have less than 1 MB.
LARGEST_TEXT = 16_000_000
LFS_POINTER = b"version https://git-lfs"
WEB_PAGE = (b"<!doctype", b"<html", b"<?xml")
# Bytes at the start that are compared with both.
START = 64


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise ReadError with the name of `path` if the operating system refuses an operation in this context.

    Path.exists() raises for a name that is too long and for a path in a folder without permission.
    """
    try:
        yield
    except SanaError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ReadError(
            f"{brief(shown(path), LONGEST_NAME)}: cannot be read ({reason}); see its rights, its links and its disk"
        ) from None


@contextmanager
def opened(file: Path) -> Iterator[tuple[BufferedReader, int]]:
    """Open `file`. Yields the stream and the size in bytes.

    Refuse anything but a regular file, because opening a pipe would wait for ever. Refuse the files that a browser or
    git stores in place of a model.
    """
    with readable(file):
        try:
            status = file.stat()
            if not S_ISREG(status.st_mode):
                raise CheckpointError(
                    f"{shown(file)}: got a folder, pipe or device, expected a regular file; put the file there instead"
                )
            with file.open("rb") as stream:
                start = stream.read(START)
                if start.startswith(LFS_POINTER):
                    raise CheckpointError(
                        f"{shown(file)}: got a git-lfs pointer instead of the model; run git lfs pull in its folder, "
                        "or download the file in the browser"
                    )
                if start.lstrip().lower().startswith(WEB_PAGE):
                    raise CheckpointError(
                        f"{shown(file)}: got a web page, not the file; {REDOWNLOAD} by its download link, "
                        "logged in if it asks for that"
                    )
                stream.seek(0)
                yield stream, status.st_size
        except FileNotFoundError:
            raise MissingFileError(f"{shown(file)}: no such file; refresh the list, or {REDOWNLOAD}") from None


def read_bytes(file: Path, largest: int) -> bytes:
    with opened(file) as (stream, size):
        if size > largest:
            raise CheckpointError(f"{shown(file)}: got {size} bytes, expected at most {largest}; {REDOWNLOAD}")
        return stream.read(largest)


def unique(pairs: list[tuple[str, object]]) -> Json:
    """Return the dict of `pairs`. A repeated key is a ValueError."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key stands twice in it")
    return content


def parse_json(text: str | bytes, name: str, make: Callable | None = unique) -> Json:
    """Return the JSON object `text`. Errors call it `name`. `make` turns pairs of key and value into a dict."""
    try:
        content = json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=make)
    except RecursionError:
        raise CheckpointError(f"{name}: its JSON nests too deeply; {REDOWNLOAD}") from None
    except ValueError as error:
        raise CheckpointError(f"{name}: not JSON ({brief(error)}); {REDOWNLOAD}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: got JSON that is a {type(content).__name__}, expected an object; {REDOWNLOAD}")
    return content


def read_json(file: Path) -> Json:
    return parse_json(read_bytes(file, LARGEST_TEXT), shown(file))


# Bytes of a buffer of TensorReader.
PART = 2**24


class TensorReader:
    """Reads tensors of `file`, which is open as `stream`, into memory of any device and dtype.

    Linux clears each page of new memory when it is first written. So reading into new memory is several times slower
    than reading into a buffer that is used again. Numbers that change device or dtype go through two such buffers.
    Numbers that stay as they are in the file are read into their tensor, because it is new memory in any case.

    dtype: of all floating-point numbers of at least two bytes. None: as in the file
    half: float32 numbers become bfloat16 if bfloat16 has the same numbers
    """

    def __init__(
        self,
        file: Path,
        stream: BufferedReader,
        half: bool = False,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.file, self.stream, self.half = file, stream, half
        self.dtype, self.device = dtype, torch.device(device)
        # A GPU copies from pinned memory while the next part is read.
        is_pinned = self.device.type not in ("cpu", "meta", "mps")
        # Pinning for another GPU than the current one would take memory there.
        with current_device(self.device):
            buffers = [torch.empty(PART, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
        self.buffers = itertools.cycle(buffers)

    def read(self, begin: int, size: int, stored: torch.dtype) -> torch.Tensor:
        """Return the numbers of dtype `stored` in `size` bytes from the byte `begin` of the file on."""
        count = size // stored.itemsize
        if self.half and stored == torch.float32:
            tensor = torch.empty(count, dtype=torch.bfloat16, device=self.device)
            if self.read_parts(tensor, begin, stored, exact=True):
                return tensor
            del tensor
        dtype = self.dtype if self.dtype and stored.is_floating_point and stored.itemsize > 1 else stored
        tensor = torch.empty(count, dtype=dtype, device=self.device)
        if dtype != stored or self.device.type != "cpu":
            self.read_parts(tensor, begin, stored)
        else:
            self.stream.seek(begin)
            self.read_into(tensor)
        return tensor

    def read_parts(self, tensor: torch.Tensor, begin: int, stored: torch.dtype, exact: bool = False) -> bool:
        """Fill `tensor` through the buffers. With `exact`, stop and return False if a number changes."""
        self.stream.seek(begin)
        for target in tensor.split(PART // stored.itemsize):
            part = next(self.buffers).view(stored)[: target.numel()]
            self.read_into(part)
            # Wait for the copy from the other buffer, which is used next.
            synchronize(self.device)
            target.copy_(part.to(self.device, non_blocking=True))
            if exact and not torch.equal(next(self.buffers).view(stored)[: target.numel()].copy_(target), part):
                return False
        return True

    def read_into(self, tensor: torch.Tensor) -> None:
        room = memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
        if len(room) and self.stream.readinto(room) != len(room):
            raise CheckpointError(f"{shown(self.file)}: was shortened while it was read; {REDOWNLOAD}")
