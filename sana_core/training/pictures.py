"""Pictures of anybody's making, from their bytes to RGB: turned upright, on white, 8 bits, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from ..checkpoints.files import brief
from ..errors import InputError, MissingFileError, ReadError, SanaError

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
# Pillow's other readers are seldom used, and that of EPS starts a program
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
# bytes; a file is read into memory whole
LARGEST_FILE = 1 << 30
# of a picture with 16 bits, that are converted at once
ROWS = 64
# of EXIF, which says how the camera was held: CIPA DC-008, section 4.6.5
ORIENTATION = 0x0112


class Place(NamedTuple):
    """Where bytes are: in a file, or in a part of one, as a tar's member is."""

    file: Path
    start: int = 0
    length: int | None = None  # None: to the end


@contextmanager
def opened_place(place: Place, name: str, largest: int = LARGEST_FILE) -> Iterator[tuple[IO[bytes], int]]:
    """Give a stream of the bytes at `place`, and their number; `name` is how errors call them.

    Raises MissingFileError, ReadError, and InputError for what is no regular file or has more than `largest` bytes.
    """
    from PIL.ContainerIO import ContainerIO

    try:
        status = place.file.stat()
        if not S_ISREG(status.st_mode):
            # to open a pipe would wait for ever
            raise InputError(f"{name}: got a folder, pipe or device, expected a regular file; put the file there")
        length = status.st_size - place.start if place.length is None else place.length
        if length > largest:
            raise InputError(f"{name}: got {length} bytes, expected at most {largest}; make it smaller")
        with place.file.open("rb") as stream:
            yield ContainerIO(stream, place.start, length), length
    except SanaError:
        raise
    except FileNotFoundError:
        raise MissingFileError(f"{name}: no such file; see its spelling, or read the data set again") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ReadError(f"{name}: cannot be read ({reason}); see its rights, its links and its disk") from error


def read_place(place: Place, name: str, largest: int = LARGEST_FILE) -> bytes:
    """Return the bytes at `place`. Raises as `opened_place` does, and ReadError for a file that ends before them."""
    with opened_place(place, name, largest) as (stream, length):
        data = stream.read(length) if length else b""
    if len(data) < length:
        raise ReadError(f"{name}: got {len(data)} bytes, expected {length}; the file was cut short, copy it again")
    return data


@contextmanager
def opened_image(stream: IO[bytes], name: str) -> Iterator[Image]:
    """Give the picture in `stream`, of which only the header is read.

    Raises ReadError for anything that Pillow fails at, inside the context too, and InputError for one of more pixels
    than Pillow's limit.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(stream, formats=FORMATS) as image:
            yield image
    except (MemoryError, InputError):
        raise
    except Image.DecompressionBombError:
        raise InputError(
            f"{name}: got more pixels than Pillow's limit for hostile images, expected at most "
            f"{2 * (Image.MAX_IMAGE_PIXELS or 0)}; scale it down"
        ) from None
    except UnidentifiedImageError:
        raise ReadError(f"{name}: got no image, expected one of {', '.join(FORMATS)}; save it again") from None
    # zlib.error, struct.error, SyntaxError, IndexError and more, by the format
    except Exception as error:
        raise ReadError(f"{name}: broken or incomplete ({brief(error)}); save it again, or remove it") from error


def turn_of(image: Image) -> int:
    """Return EXIF's orientation of a picture that is not loaded yet, 1 to 8; 1 where Pillow turns it itself."""
    from PIL.Image import Image as AnyImage

    # PNG's own getexif would decode the whole picture to look behind it
    turn = 1 if image.format == "TIFF" else AnyImage.getexif(image).get(ORIENTATION, 1)
    return turn if turn in range(1, 9) else 1


def upright_size(place: Place, name: str) -> tuple[int, int]:
    """Return (width, height) of the picture at `place` once it is upright; only its header is read.

    Raises as `opened_place` and `opened_image` do, and InputError for an animated one.
    """
    with opened_place(place, name) as (stream, length):
        if not length:
            raise ReadError(f"{name}: got an empty file, expected an image; copy it again, or remove it")
        with opened_image(stream, name) as image:
            check_single(image, name)
            width, height = image.size
            return (height, width) if turn_of(image) > 4 else (width, height)


def check_single(image: Image, name: str) -> None:
    """Raise InputError for an animated picture. What phones and scanners put behind the first one is no animation."""
    if image.format in ("GIF", "PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:
        raise InputError(f"{name}: got an animated image, expected a single one; save the frame that you want")


def upright(image: Image) -> Image:
    """Return the picture as it is looked at."""
    from PIL.Image import Transpose

    turn = turn_of(image)
    image.load()
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[turn]) if turn in turns else image


def decode_picture(data: bytes, name: str) -> Image:
    """Return the picture in `data` as RGB, upright, what is transparent on white, 16 bits rounded to 8.

    Raises as `opened_image`, and InputError for an animated one and for pixels that are no colours.
    """
    from PIL import Image

    with opened_image(BytesIO(data), name) as opened:
        check_single(opened, name)
        image = eight_bits(upright(opened), name)
        if not image.has_transparency_data:
            return image.convert("RGB")
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def decode_mask(data: bytes, name: str) -> Image:
    """Return the mask in `data` in mode L, upright: white where the loss counts. Raises as `decode_picture`."""
    return decode_picture(data, name).convert("L")


def eight_bits(image: Image, name: str) -> Image:
    """Return `image` with 8 bits a channel; Pillow's own conversion would cut grey of 16 bits off at 255."""
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    low, high = image.getextrema()
    if image.mode == "F" or not 0 <= low <= high <= 65535:  # type: ignore[operator]
        raise InputError(f"{name}: got pixels of mode {image.mode}, expected 8 or 16 bits; save it as PNG or JPEG")
    grey = np.rint(np.arange(65536) / 257).astype(np.uint8)
    result = Image.new("L", image.size)
    for top in range(0, image.height, ROWS):
        rows = np.asarray(image.crop((0, top, image.width, min(top + ROWS, image.height))))
        result.paste(Image.fromarray(grey[rows]), (0, top))
    return result
