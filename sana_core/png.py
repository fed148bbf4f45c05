"""A PNG file written row by row, since a picture of 8192 x 8192 should not be in memory twice."""

from __future__ import annotations

import struct
import zlib
from types import TracebackType
from typing import BinaryIO

import numpy as np
import torch

LEVEL = 4  # of compression; above it a picture takes much longer for little


class PngWriter:
    """A context that takes rows from top to bottom. https://www.w3.org/TR/png-3/"""

    def __init__(self, file: BinaryIO, width: int, height: int) -> None:
        self.file = file
        self.deflate = zlib.compressobj(LEVEL)
        self.above = np.zeros((1, width * 3), np.uint8)
        file.write(b"\x89PNG\r\n\x1a\n")
        # 8 bits, RGB, no interlace
        self.chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))

    def __enter__(self) -> PngWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.chunk(b"IDAT", self.deflate.flush())
            self.chunk(b"IEND", b"")

    def chunk(self, kind: bytes, data: bytes) -> None:
        self.file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))

    def rows(self, pixels: torch.Tensor) -> None:
        """Write pixels [3, n, W] in [-1, 1]."""
        levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        rows = levels.movedim(0, -1).flatten(1).cpu().numpy()
        # filter 2: what differs from the row above
        up = rows - np.concatenate([self.above, rows[:-1]])
        data = self.deflate.compress(np.insert(up, 0, 2, axis=1).tobytes())
        self.above = rows[-1:]
        if data:
            self.chunk(b"IDAT", data)
