"""Reads the numbers of tensors from an open file into memory of any device and dtype.

Linux clears each page of new memory when it is first written. So reading into new memory is several times slower than
reading into a buffer that is used again. Numbers that change device or dtype go through two such buffers. Numbers that
stay as they are in the file are read into their tensor, because it is new memory in any case.
"""

from __future__ import annotations

import itertools
from io import BufferedReader
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..runtime.accelerator import current_device, synchronize
from ..runtime.text import shown
from .files import REDOWNLOAD

# Bytes of a buffer.
PART = 2**24


class TensorReader:
    """Reads tensors of `file`, which is open as `stream`.

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
