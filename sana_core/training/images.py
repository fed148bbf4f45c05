"""One image file to pixels of its bucket: its header, decoding, then scaling and cropping.

A bucket is the (width, height) that an image is trained at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import SEEK_END, BytesIO
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..errors import InputError, ReadError, SanaError
from ..model.known_models import SHAPES
from ..model.latents import DOWNSCALE
from ..runtime.checks import check_whole
from ..runtime.text import brief
from ..runtime.user_files import FileRange, opened_range

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow's names of the formats that are read, if Pillow supports them. HEIF needs pillow-heif. Other formats are rare:
# the reader of EPS starts a program, and the plugin for JPEG XL decodes an image before its size can be checked.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "HEIF", "JPEG2000", "PPM", "QOI")
# Endings of other images and of layered and raw files. Files that Pillow cannot read here are left out, and the log
# names them.
OTHER_ENDINGS = (
    *(".heic", ".heics", ".heif", ".heifs", ".hif", ".avif", ".avifs", ".jxl", ".jp2", ".j2k", ".jpf", ".jpx", ".jxr"),
    *(".apng", ".mpo", ".dib", ".tga", ".dds", ".pcx", ".sgi", ".exr", ".hdr", ".psd", ".psb", ".xcf", ".kra", ".svg"),
    *(".dng", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".sr2", ".raf", ".orf", ".rw2", ".pef", ".srw", ".x3f"),
)
# Chunks of a PNG with transparency, orientation and animation, and chunks with texts.
USED_CHUNKS = (b"tRNS", b"eXIf", b"acTL", b"fcTL")
TEXTS = (b"tEXt", b"zTXt", b"iTXt")
# Keywords of the texts in which programs store EXIF or the orientation. Pillow reads both.
ORIENTATION_TEXTS = (b"Raw profile type exif", b"XML:com.adobe.xmp")
# Bytes of a text. Pillow has the same limit for decompressed texts.
LARGEST_TEXT = 1 << 20
# Pillow may read a file MOST_READS times to open it, and once more for every BYTES_OF_READ bytes. A header takes less
# than a hundred reads, but the blocks of pixels are also read or skipped: 128 bytes a read in a GIF, 8,192 in a PNG.
MOST_READS, BYTES_OF_READ = 10_000, 100
PNG_START = b"\x89PNG\r\n\x1a\n"
# EXIF's tag of how the camera was held (CIPA DC-008, section 4.6.5).
ORIENTATION = 0x0112
# Version of the rule by which `fit_image` crops. A new version encodes every cached latent again.
CROP_RULE = 1
# The largest training size in pixels.
LARGEST_RESOLUTION = 8192
Bucket = tuple[int, int]
# size_of(place, name) returns (width, height) of the upright image at `place`. Its errors call the image `name`.
SizeOf = Callable[[FileRange, str], tuple[int, int]]


def image_endings() -> frozenset[str]:
    """Return the lower-case endings of images that Pillow and its plugins can read on this computer."""
    from PIL import Image

    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    formats = readable_formats()
    endings = {ending for ending, name in Image.registered_extensions().items() if name in formats}
    # The numbers in a .pfm are no colours. They are depths, for example.
    return frozenset(endings - {".pfm"})


def readable_formats() -> list[str]:
    """Return the FORMATS that Pillow can read. After `image_endings` they include the formats of plugins."""
    from PIL import Image

    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


class LimitedStream:
    """A stream with a limit for the number of reads, so that a header of 1 MB does not take seconds.

    Pillow reads some comments byte by byte, and each part of a header by itself.
    """

    def __init__(self, stream: IO[bytes], name: str) -> None:
        stream.seek(0, SEEK_END)
        self.stream, self.name, self.reads_left = stream, name, MOST_READS + stream.tell() / BYTES_OF_READ
        stream.seek(0)

    def read(self, size: int = -1) -> bytes:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise ReadError(
                f"{self.name}: got too many comments, texts or tags in its header, expected at most some hundred; save "
                "it again, or remove it"
            )
        return self.stream.read(size)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.stream, attribute)


def without_texts(stream: LimitedStream, header_only: bool) -> LimitedStream | BytesIO:
    """Return `stream`, or for a PNG with texts a copy without them.

    Programs store workflows of several MB in PNGs. Pillow decompresses all texts and refuses large ones, and its limits
    are settings of the whole process. Training needs only the pixels and the orientation. With `header_only`, the copy
    ends at the first pixels.
    """
    begin = len(PNG_START)
    if stream.read(begin) != PNG_START:
        stream.seek(0)
        return stream
    copied, total = [(0, begin)], 0
    # The texts that are still to be copied. Each is copied once.
    keywords = set(ORIENTATION_TEXTS)
    while len(head := stream.read(8)) == 8:
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        end = total = begin + length + 12
        keyword = stream.read(min(length, 80)).partition(b"\0")[0] if kind in TEXTS and length < LARGEST_TEXT else b""
        # The bit for lower case marks chunks that a reader may leave out.
        is_used = not kind[0] & 0x20 or (kind in USED_CHUNKS and length < LARGEST_TEXT)
        if header_only and kind == b"IDAT":
            copied.append((begin, begin + len(head)))
            break
        if is_used or keyword in keywords:
            copied.append((begin, end))
        keywords.discard(keyword)
        if kind == b"IEND":
            break
        stream.seek(end)
        begin = end
    if sum(end - begin for begin, end in copied) == total:
        stream.seek(0)
        return stream
    copy = BytesIO()
    for begin, end in copied:
        # These reads do not count.
        stream.stream.seek(begin)
        copy.write(stream.stream.read(end - begin))
    copy.seek(0)
    return copy


@contextmanager
def opened_image(stream: IO[bytes], name: str, header_only: bool = False) -> Iterator[Image]:
    """Open the image in `stream`. Only its header is read. Errors of Pillow inside the context become ReadErrors."""
    from PIL import Image, UnidentifiedImageError

    formats = readable_formats()
    try:
        limited = LimitedStream(stream, name)
        with Image.open(without_texts(limited, header_only), formats=formats) as image:
            # In other formats, the further images of phones and scanners are no animation.
            if image.format in ("GIF", "PNG", "WEBP", "AVIF") and getattr(image, "is_animated", False):
                raise InputError(f"{name}: got an animated image, expected a single one; save the frame that you want")
            # The caller reads the pixels, whose size Pillow has checked.
            limited.reads_left = math.inf
            yield image
    except (MemoryError, SanaError):
        raise
    except Image.DecompressionBombError:
        raise InputError(
            f"{name}: got more pixels than Pillow's limit for hostile images, expected at most "
            f"{2 * (Image.MAX_IMAGE_PIXELS or 0)}; scale it down"
        ) from None
    except UnidentifiedImageError:
        raise ReadError(f"{name}: got no image, expected one of {', '.join(formats)}; save it again") from None
    # zlib.error, struct.error, SyntaxError, IndexError and more, depending on the format.
    except Exception as error:
        raise ReadError(f"{name}: broken or incomplete ({brief(error)}); save it again, or remove it") from error


def orientation_of(image: Image) -> int:
    """Return EXIF's orientation, 1 to 8, of an image that is not loaded yet."""
    from PIL.Image import Image as AnyImage

    # Pillow rotates a TIFF itself. The getexif of PNG would decode the whole image to look for EXIF after the pixels.
    orientation = 1 if image.format == "TIFF" else AnyImage.getexif(image).get(ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def upright_size(place: FileRange, name: str) -> tuple[int, int]:
    """Return (width, height) of the upright image at `place`. Only its header is read."""
    with opened_range(place, name) as (stream, length):
        if not length:
            raise ReadError(f"{name}: got an empty file, expected an image; copy it again, or remove it")
        with opened_image(stream, name, header_only=True) as image:
            width, height = image.size
            return (height, width) if orientation_of(image) > 4 else (width, height)


def decode_image(data: bytes, name: str) -> Image:
    """Return the image in `data` as RGB, upright, with transparent parts on white and 16 bits rounded to 8."""
    from PIL import Image

    with opened_image(BytesIO(data), name) as image:
        orientation = orientation_of(image)
        image.load()
        turns = {
            2: Image.Transpose.FLIP_LEFT_RIGHT,
            3: Image.Transpose.ROTATE_180,
            4: Image.Transpose.FLIP_TOP_BOTTOM,
            5: Image.Transpose.TRANSPOSE,
            6: Image.Transpose.ROTATE_270,
            7: Image.Transpose.TRANSVERSE,
            8: Image.Transpose.ROTATE_90,
        }
        if orientation in turns:
            image = image.transpose(turns[orientation])
        image = eight_bits(image, name)
        if not image.has_transparency_data:
            return image.convert("RGB")
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def eight_bits(image: Image, name: str) -> Image:
    """Return `image` with 8 bits per channel. Pillow's conversion would clip 16-bit grey at 255."""
    if not image.mode.startswith(("I", "F")):
        return image
    # Pillow has no table of values for the modes of 16 bits.
    grey = image.convert("I")
    low, high = grey.getextrema()
    if image.mode == "F" or not 0 <= low <= high <= 65535:  # type: ignore[operator]
        raise InputError(f"{name}: got pixels of mode {image.mode}, expected 8 or 16 bits; save it as PNG or JPEG")
    grey.info.pop("transparency", None)
    return grey.point([round(value / 257) for value in range(65536)], "L")


class Crop(NamedTuple):
    """The part of an image that is trained."""

    # Fraction of the removed columns that are on the left side. 0.5: crop the middle.
    left: float = 0.5
    # Fraction of the removed rows that are at the top. 0.5: crop the middle.
    top: float = 0.5
    mirrored: bool = False


MIDDLE = Crop()


def choose_bucket(size: tuple[int, int], resolution: int) -> Bucket:
    """Return the bucket at `resolution` pixels whose aspect ratio is nearest to the ratio of `size`."""
    check_whole("resolution", resolution, DOWNSCALE, LARGEST_RESOLUTION)
    if resolution % DOWNSCALE:
        raise InputError(
            f"resolution: got {resolution}, expected a multiple of {DOWNSCALE}; most models are trained at 1024"
        )
    ratio = math.log(size[0] / size[1])
    return min(shapes_at(resolution), key=lambda shape: abs(math.log(shape[0] / shape[1]) - ratio))


def shapes_at(resolution: int) -> list[Bucket]:
    """Return the buckets at `resolution` pixels: SANA's forty shapes, if their sides are multiples of 32 there."""
    divisor = 1024 * DOWNSCALE
    return [
        (width * resolution // 1024, height * resolution // 1024)
        for width, height in SHAPES.values()
        if width * resolution % divisor == 0 and height * resolution % divisor == 0
    ]


def is_smaller(size: tuple[int, int], bucket: Bucket) -> bool:
    """Whether an image with this (width, height) has to be enlarged to its bucket."""
    return any(side < bucket_side for side, bucket_side in zip(size, bucket, strict=True))


def fit_image(
    image: Image, mask: Image | None, bucket: Bucket, crop: Crop = MIDDLE
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return pixels [3, h, w] in [-1, 1] and the weight of the loss of each latent [1, h / 32, w / 32] in [0, 1].

    The RGB `image` is scaled by Lanczos to cover the bucket, and cropped to `crop`. The `mask`, in mode L and of the
    same size, is cropped in the same way and averaged over the pixels of a latent. Both results are float32.
    """
    from PIL.Image import Resampling

    width, height = bucket
    pixels = torch.from_numpy(np.asarray(crop_image(image, bucket, crop), np.float32).transpose(2, 0, 1) / 127.5 - 1)
    pixels = pixels.flip(-1) if crop.mirrored else pixels
    if mask is None:
        return pixels.contiguous(), None
    box = crop_box(image.size, bucket, crop)
    cells = mask.resize((width // DOWNSCALE, height // DOWNSCALE), Resampling.BOX, box=box)
    weight = torch.from_numpy(np.asarray(cells, dtype=np.float32)[None] / 255)
    return pixels.contiguous(), weight.flip(-1) if crop.mirrored else weight


def crop_image(image: Image, bucket: Bucket, crop: Crop = MIDDLE) -> Image:
    """Return `image` scaled by Lanczos to cover the bucket and cropped to `crop`, but not mirrored."""
    from PIL.Image import Resampling

    return image.resize(bucket, Resampling.LANCZOS, box=crop_box(image.size, bucket, crop))


def crop_box(size: tuple[int, int], bucket: Bucket, crop: Crop = MIDDLE) -> tuple[float, float, float, float]:
    """Return (left, top, right, bottom) of the largest part of `size`, at `crop`, that has the bucket's ratio.

    Cropping before scaling gives the same pixels except for rounding, and a panorama never grows to a gigabyte.
    """
    scale = min(size[0] / bucket[0], size[1] / bucket[1])
    width, height = (min(side, scale * bucket_side) for side, bucket_side in zip(size, bucket, strict=True))
    left, top = (size[0] - width) * crop.left, (size[1] - height) * crop.top
    return left, top, left + width, top + height
