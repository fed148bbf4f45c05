"""PNG and TIFF files written row by row, since an image of 8192 x 8192 should not be in memory twice."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np
import torch

from ..errors import InputError

Rows = Iterator[np.ndarray]  # uint8 [n, W, 3], from top to bottom

LEVEL = 4  # of compression; above it an image takes much longer for little
TIFF_ROWS = 64  # of a strip, which is compressed alone
SOFTWARE = "sana_core"


def levels(pixels: torch.Tensor) -> np.ndarray:
    """Return pixels [3, n, W] in [-1, 1] as uint8 [n, W, 3]. Raises InputError for NaN, which would become black."""
    if pixels.isnan().any():
        raise InputError("pixels: got NaN from the VAE; generate or decode again in bf16 or fp32")
    values = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return values.movedim(0, -1).cpu().numpy()


def write_png(file: BinaryIO, width: int, height: int, rows: Rows) -> None:
    """Write a PNG of 8 bits RGB. https://www.w3.org/TR/png-3/"""

    def chunk(kind: bytes, data: bytes) -> None:
        file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))

    deflate = zlib.compressobj(LEVEL)
    above = np.zeros((1, width * 3), np.uint8)
    file.write(b"\x89PNG\r\n\x1a\n")
    # 8 bits, RGB, no interlace
    chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    for strip in rows:
        flat = strip.reshape(len(strip), -1)
        # filter 2: what differs from the row above
        up = flat - np.concatenate([above, flat[:-1]])
        data = deflate.compress(np.insert(up, 0, 2, axis=1).tobytes())
        above = flat[-1:]
        if data:
            chunk(b"IDAT", data)
    chunk(b"IDAT", deflate.flush())
    chunk(b"IEND", b"")


def write_tiff(file: BinaryIO, width: int, height: int, rows: Rows) -> None:
    """Write a TIFF of 8 bits RGB, deflated. Raises InputError without tifffile."""
    try:
        from tifffile import TiffWriter
    except ImportError:
        raise InputError("out: a TIFF file needs tifffile; pip install '.[tiff]', or choose a .png") from None

    def strips() -> Iterator[bytes]:
        for strip in regroup(rows, TIFF_ROWS):
            # predictor 2: what differs from the pixel to the left
            differences = np.concatenate([strip[:, :1], strip[:, 1:] - strip[:, :-1]], axis=1)
            yield zlib.compress(differences.tobytes(), LEVEL)

    with TiffWriter(file) as tiff:
        tiff.write(
            strips(),
            shape=(height, width, 3),
            dtype="uint8",
            photometric="rgb",
            rowsperstrip=TIFF_ROWS,
            compression="zlib",
            predictor=True,
            metadata=None,
            software=SOFTWARE,
        )


def regroup(rows: Rows, count: int) -> Rows:
    """Yield the same rows, `count` at a time, the last ones fewer."""
    waiting: list[np.ndarray] = []
    for strip in rows:
        waiting.append(strip)
        if sum(map(len, waiting)) >= count:
            whole = np.concatenate(waiting)
            cut = len(whole) // count * count
            yield from np.split(whole[:cut], cut // count)
            waiting = [whole[cut:]]
    last = np.concatenate(waiting)
    if len(last):
        yield last


WRITERS: dict[str, Callable[[BinaryIO, int, int, Rows], None]] = {
    ".png": write_png,
    ".tif": write_tiff,
    ".tiff": write_tiff,
}
