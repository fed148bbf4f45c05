"""Images of anybody's making, from their bytes to pixels of the shape that they are learned at, or refused by name."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..errors import InputError, MissingFileError, ReadError, SanaError
from ..model.known_models import SHAPES
from ..model.latents import DOWNSCALE
from ..runtime.checks import check_whole
from ..runtime.text import brief

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow's names of the formats that are read, where Pillow has them. HEIF needs pillow-heif. Other formats are seldom
# used: the reader of EPS starts a program, and the plugin for JPEG XL decodes an image before its size can be checked.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "HEIF", "JPEG2000", "PPM", "QOI")
# Endings of images and of layered and raw files. Those that cannot be read are named in the log.
OTHER_ENDINGS = (
    *(".heic", ".heics", ".heif", ".heifs", ".hif", ".avif", ".avifs", ".jxl", ".jp2", ".j2k", ".jpf", ".jpx", ".jxr"),
    *(".apng", ".mpo", ".dib", ".tga", ".dds", ".pcx", ".sgi", ".exr", ".hdr", ".psd", ".psb", ".xcf", ".kra", ".svg"),
    *(".dng", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".sr2", ".raf", ".orf", ".rw2", ".pef", ".srw", ".x3f"),
)
# A PNG's chunks of text and of a colour profile, and the bytes that Pillow decompresses of each and of all together.
TEXTS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
LARGEST_TEXT, LARGEST_TEXTS = 1 << 20, 32 << 20
PNG_START = b"\x89PNG\r\n\x1a\n"
# bytes; a file is read into memory whole
LARGEST_FILE = 1 << 30
# of an image with 16 bits, that are converted at once
ROWS = 64
# of EXIF, which says how the camera was held: CIPA DC-008, section 4.6.5
ORIENTATION = 0x0112
# of the rule that `fit_image` crops by; a higher one makes every cached latent again
CROP_RULE = 1
LARGEST_SIDE = 8192
Bucket = tuple[int, int]


class FileRange(NamedTuple):
    """Where bytes are: in a file, or in a part of one, as a tar's member is."""

    file: Path
    start: int = 0
    length: int | None = None  # None: to the end


@contextmanager
def opened_range(place: FileRange, name: str, largest: int = LARGEST_FILE) -> Iterator[tuple[IO[bytes], int]]:
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
        raise MissingFileError(f"{name}: no such file; see its spelling, and whether it was moved") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ReadError(f"{name}: cannot be read ({reason}); see its rights, its links and its disk") from error


def read_range(place: FileRange, name: str, largest: int = LARGEST_FILE) -> bytes:
    """Return the bytes at `place`. Raises as `opened_range` does, and ReadError for a file that ends before them."""
    with opened_range(place, name, largest) as (stream, length):
        data = stream.read(length) if length else b""
    if len(data) < length:
        raise ReadError(f"{name}: got {len(data)} bytes, expected {length}; the file was cut short, copy it again")
    return data


def image_endings() -> frozenset[str]:
    """Return the endings, in lower case, of the images that Pillow and its plugins read on this computer."""
    from PIL import Image

    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    formats = readable_formats()
    endings = {ending for ending, name in Image.registered_extensions().items() if name in formats}
    # A .pfm holds numbers that are no colours, such as depths.
    return frozenset(endings - {".pfm"})


def readable_formats() -> list[str]:
    """Return the names of FORMATS that Pillow reads, with its plugins once `image_endings` was called."""
    from PIL import Image

    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def without_large_texts(stream: IO[bytes], header_only: bool) -> IO[bytes]:
    """Return `stream`, or if it is a PNG with texts that are too large for Pillow, a copy without these texts.

    Programs store workflows of several MB in PNGs. Pillow refuses such an image, and its limits are settings of the
    whole process. Training needs only EXIF, which is small. With `header_only`, the chunks before the first pixels are
    checked: Pillow reads no others to open an image.
    """
    large_chunks: list[tuple[int, int]] = []
    total = 0
    begin = len(PNG_START)
    is_png = stream.read(begin) == PNG_START
    while is_png and len(head := stream.read(8)) == 8:
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind == b"IEND" or (header_only and kind == b"IDAT"):
            break
        end = begin + length + 12
        if kind in TEXTS:
            size = text_size(kind, stream.read(length)) if 0 < length < LARGEST_TEXT else length
            total += size
            if size >= LARGEST_TEXT or total > LARGEST_TEXTS:
                large_chunks.append((begin, end))
        stream.seek(end)
        begin = end
    stream.seek(0)
    if not large_chunks:
        return stream
    data = stream.read()
    starts, ends = [0, *(end for _, end in large_chunks)], [*(begin for begin, _ in large_chunks), len(data)]
    return BytesIO(b"".join(data[start:end] for start, end in zip(starts, ends, strict=True)))


def text_size(kind: bytes, chunk: bytes) -> int:
    """Return the bytes of a PNG's text or colour profile, once they are decompressed; at most LARGEST_TEXT."""
    _, _, content = chunk.partition(b"\0")
    if kind == b"iTXt":
        is_compressed, content = content[:1] == b"\1", content[2:].split(b"\0", 2)[-1]
    else:
        is_compressed, content = kind != b"tEXt", content[1:]
    if not is_compressed:
        return len(chunk)
    try:
        return len(zlib.decompressobj().decompress(content, LARGEST_TEXT))
    except zlib.error:
        # Pillow takes it for an empty text.
        return 0


@contextmanager
def opened_image(stream: IO[bytes], name: str, header_only: bool = False) -> Iterator[Image]:
    """Give the image in `stream`, of which only the header is read.

    Raises ReadError for anything that Pillow fails at, inside the context too, and InputError for one of more pixels
    than Pillow's limit.
    """
    from PIL import Image, UnidentifiedImageError

    formats = readable_formats()
    try:
        with Image.open(without_large_texts(stream, header_only), formats=formats) as image:
            yield image
    except (MemoryError, InputError):
        raise
    except Image.DecompressionBombError:
        raise InputError(
            f"{name}: got more pixels than Pillow's limit for hostile images, expected at most "
            f"{2 * (Image.MAX_IMAGE_PIXELS or 0)}; scale it down"
        ) from None
    except UnidentifiedImageError:
        raise ReadError(f"{name}: got no image, expected one of {', '.join(formats)}; save it again") from None
    # zlib.error, struct.error, SyntaxError, IndexError and more, by the format
    except Exception as error:
        raise ReadError(f"{name}: broken or incomplete ({brief(error)}); save it again, or remove it") from error


def turn_of(image: Image) -> int:
    """Return EXIF's orientation of an image that is not loaded yet, 1 to 8; 1 where Pillow turns it itself."""
    from PIL.Image import Image as AnyImage

    # PNG's own getexif would decode the whole image to look behind it
    turn = 1 if image.format == "TIFF" else AnyImage.getexif(image).get(ORIENTATION, 1)
    return turn if turn in range(1, 9) else 1


def upright_size(place: FileRange, name: str) -> tuple[int, int]:
    """Return (width, height) of the image at `place` once it is upright; only its header is read.

    Raises as `opened_range` and `opened_image` do, and InputError for an animated one.
    """
    with opened_range(place, name) as (stream, length):
        if not length:
            raise ReadError(f"{name}: got an empty file, expected an image; copy it again, or remove it")
        with opened_image(stream, name, header_only=True) as image:
            check_single(image, name)
            width, height = image.size
            return (height, width) if turn_of(image) > 4 else (width, height)


def check_single(image: Image, name: str) -> None:
    """Raise InputError for an animated image. What phones and scanners put behind the first one is no animation."""
    if image.format in ("GIF", "PNG", "WEBP", "AVIF") and getattr(image, "n_frames", 1) > 1:
        raise InputError(f"{name}: got an animated image, expected a single one; save the frame that you want")


def upright(image: Image) -> Image:
    """Return the image as it is looked at."""
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


def decode_image(data: bytes, name: str) -> Image:
    """Return the image in `data` as RGB, upright, what is transparent on white, 16 bits rounded to 8.

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
    """Return the mask in `data` in mode L, upright: white where the loss counts. Raises as `decode_image`."""
    return decode_image(data, name).convert("L")


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


class Crop(NamedTuple):
    """Which part of an image is learned: the shares of what is cut off that lie to its left and above it."""

    left: float = 0.5
    top: float = 0.5
    mirrored: bool = False


MIDDLE = Crop()


def choose_bucket(size: tuple[int, int], resolution: int) -> Bucket:
    """Return (width, height) of the shape at `resolution` pixels whose ratio is nearest to that of `size`.

    The shapes are SANA's forty, those of them whose sides are multiples of 32 at this resolution. Raises InputError for
    a resolution that is not a multiple of 32.
    """
    check_whole("resolution", resolution, DOWNSCALE, LARGEST_SIDE)
    if resolution % DOWNSCALE:
        raise InputError(
            f"resolution: got {resolution}, expected a multiple of {DOWNSCALE}; most models are trained at 1024"
        )
    ratio = math.log(size[0] / size[1])
    return min(shapes_at(resolution), key=lambda shape: abs(math.log(shape[0] / shape[1]) - ratio))


def shapes_at(resolution: int) -> list[Bucket]:
    """Return (width, height) of those of SANA's shapes whose sides are multiples of 32 at `resolution` pixels."""
    whole = 1024 * DOWNSCALE
    return [
        (width * resolution // 1024, height * resolution // 1024)
        for width, height in SHAPES.values()
        if width * resolution % whole == 0 and height * resolution % whole == 0
    ]


def fit_image(
    image: Image, mask: Image | None, bucket: Bucket, crop: Crop = MIDDLE
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return pixels [3, h, w] in [-1, 1] and the loss's weight of each latent cell [1, h / 32, w / 32] in [0, 1].

    The image (RGB) is scaled by Lanczos to cover the bucket (width, height) and cut to `crop`; the mask (L, of
    the same size) with it, and then averaged over cells. Both float32.
    """
    from PIL.Image import Resampling

    width, height = bucket
    pixels = torch.from_numpy(np.asarray(crop_image(image, bucket, crop), np.float32).transpose(2, 0, 1) / 127.5 - 1)
    pixels = pixels.flip(-1) if crop.mirrored else pixels
    if mask is None:
        return pixels.contiguous(), None
    box = part_of(image.size, bucket, crop)
    cells = mask.resize((width // DOWNSCALE, height // DOWNSCALE), Resampling.BOX, box=box)
    weight = torch.from_numpy(np.asarray(cells, dtype=np.float32)[None] / 255)
    return pixels.contiguous(), weight.flip(-1) if crop.mirrored else weight


def crop_image(image: Image, bucket: Bucket, crop: Crop = MIDDLE) -> Image:
    """Return `image` scaled by Lanczos to cover the bucket (width, height), and cut to `crop`, not mirrored."""
    from PIL.Image import Resampling

    return image.resize(bucket, Resampling.LANCZOS, box=part_of(image.size, bucket, crop))


def is_smaller(size: tuple[int, int], bucket: Bucket) -> bool:
    """Whether an image of that (width, height) has to be enlarged to be learned."""
    return any(side < other for side, other in zip(size, bucket, strict=True))


def part_of(size: tuple[int, int], bucket: Bucket, crop: Crop = MIDDLE) -> tuple[float, float, float, float]:
    """Return (left, top, right, bottom) of the largest part of `size`, at `crop`, that has the bucket's ratio.

    To cut before scaling gives the same pixels but for rounding, and a panorama does not grow to a gigabyte on the way.
    """
    scale = min(size[0] / bucket[0], size[1] / bucket[1])
    width, height = (min(side, scale * other) for side, other in zip(size, bucket, strict=True))
    left, top = (size[0] - width) * crop.left, (size[1] - height) * crop.top
    return left, top, left + width, top + height
