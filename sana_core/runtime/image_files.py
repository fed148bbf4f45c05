"""Writes PNG and TIFF files row by row, so that an image of 8192 x 8192 is not in memory twice."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import BinaryIO

import numpy as np
import torch

from ..errors import InputError

Rows = Iterator[np.ndarray]  # uint8 [n, W, 3], from top to bottom

# zlib's level for TIFF. Higher levels take much longer and save little.
LEVEL = 4
# Rows that are filtered at a time. Few, so that the temporary arrays fit into the processor's cache.
PNG_ROWS = 32
NO_TEXTS: Mapping[str, str] = MappingProxyType({})
# Rows of a strip. Each strip is compressed separately.
TIFF_ROWS = 64
SOFTWARE = "sana_core"


def levels(pixels: torch.Tensor) -> np.ndarray:
    """Return pixels [3, n, W] in [-1, 1] as uint8 [n, W, 3]."""
    if pixels.isnan().any():
        raise InputError("pixels: got NaN from the VAE; generate or decode again in bf16 or fp32")
    values = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return values.movedim(0, -1).cpu().numpy()


def write_png(file: BinaryIO, width: int, height: int, rows: Rows, texts: Mapping[str, str] = NO_TEXTS) -> None:
    """Write an 8-bit RGB PNG. `texts` maps keywords to ASCII texts. https://www.w3.org/TR/png-3/

    Every row is predicted by filter 4 (Paeth), and zlib only replaces runs of equal bytes. For images of a model the
    files are about as large as with all of Pillow's filters and a search for repetitions, in a third of the time.
    """

    def chunk(kind: bytes, data: bytes) -> None:
        file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))

    deflate = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    above = np.zeros((width, 3), np.uint8)
    file.write(b"\x89PNG\r\n\x1a\n")
    # 8 bits, RGB, no interlace
    chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    for keyword, text in texts.items():
        chunk(b"tEXt", f"{keyword}\0{text}".encode("ascii"))
    for strip in regroup(rows, PNG_ROWS):
        if data := deflate.compress(paeth_differences(strip, above).tobytes()):
            chunk(b"IDAT", data)
        above = strip[-1]
    chunk(b"IDAT", deflate.flush())
    chunk(b"IEND", b"")


def paeth_differences(strip: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Return the rows of `strip` [n, W, 3] after PNG's Paeth filter, [n, 1 + 3 W]. Each row begins with its number.

    `above` [W, 3] is the row above the strip.
    """
    count, width, _ = strip.shape
    padded = np.zeros((count + 1, width + 1, 3), np.int16)
    padded[0, 1:], padded[1:, 1:] = above, strip
    left, up, corner = padded[1:, :-1], padded[:-1, 1:], padded[:-1, :-1]
    left_distance, up_distance = np.abs(up - corner), np.abs(left - corner)
    corner_distance = np.abs(left + up - 2 * corner)
    predicted = np.where(up_distance <= corner_distance, up, corner)
    use_left = (left_distance <= up_distance) & (left_distance <= corner_distance)
    predicted = np.where(use_left, left, predicted)
    filtered = np.full((count, 1 + 3 * width), 4, np.uint8)
    # PNG stores the differences modulo 256.
    filtered[:, 1:] = (padded[1:, 1:] - predicted).astype(np.uint8).reshape(count, -1)
    return filtered


def write_tiff(file: BinaryIO, width: int, height: int, rows: Rows) -> None:
    try:
        from tifffile import TiffWriter
    except ImportError:
        raise InputError("out: a TIFF file needs tifffile; pip install '.[tiff]', or choose a .png") from None

    def strips() -> Iterator[bytes]:
        for strip in regroup(rows, TIFF_ROWS):
            # Predictor 2: the difference from the pixel to the left.
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
    """Yield the same rows, `count` at a time, and fewer at the end."""
    pending: list[np.ndarray] = []
    for strip in rows:
        pending.append(strip)
        if sum(map(len, pending)) >= count:
            joined = np.concatenate(pending)
            cut = len(joined) // count * count
            yield from np.split(joined[:cut], cut // count)
            pending = [joined[cut:]]
    if pending and len(last := np.concatenate(pending)):
        yield last


WRITERS: dict[str, Callable[[BinaryIO, int, int, Rows], None]] = {
    ".png": write_png,
    ".tif": write_tiff,
    ".tiff": write_tiff,
}
