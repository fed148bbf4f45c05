"""The sizes that SANA was trained at: 40 shapes of about the same area, at 512, 1024, 2048 and 4096 pixels."""

from __future__ import annotations

from .errors import InputError

# height / width to (width, height) at 1024 pixels; the other sizes are multiples (SANA's training buckets)
SHAPES = {
    "0.25": (2048, 512),
    "0.26": (1984, 512),
    "0.27": (1920, 512),
    "0.28": (1856, 512),
    "0.32": (1792, 576),
    "0.33": (1728, 576),
    "0.35": (1664, 576),
    "0.4": (1600, 640),
    "0.42": (1536, 640),
    "0.48": (1472, 704),
    "0.5": (1408, 704),
    "0.52": (1344, 704),
    "0.57": (1344, 768),
    "0.6": (1280, 768),
    "0.68": (1216, 832),
    "0.72": (1152, 832),
    "0.78": (1152, 896),
    "0.82": (1088, 896),
    "0.88": (1088, 960),
    "0.94": (1024, 960),
    "1.0": (1024, 1024),
    "1.07": (960, 1024),
    "1.13": (960, 1088),
    "1.21": (896, 1088),
    "1.29": (896, 1152),
    "1.38": (832, 1152),
    "1.46": (832, 1216),
    "1.67": (768, 1280),
    "1.75": (768, 1344),
    "2.0": (704, 1408),
    "2.09": (704, 1472),
    "2.4": (640, 1536),
    "2.5": (640, 1600),
    "2.89": (576, 1664),
    "3.0": (576, 1728),
    "3.11": (576, 1792),
    "3.62": (512, 1856),
    "3.75": (512, 1920),
    "3.88": (512, 1984),
    "4.0": (512, 2048),
}
SIZES = ("512", "1024", "2048", "4096")


def picture_size(size: str, ratio: str) -> tuple[int, int]:
    """Return (width, height) of the shape `ratio`, height / width, at `size` pixels.

    Raises InputError for a size or a ratio that is not in SIZES or SHAPES.
    """
    if size not in SIZES:
        raise InputError(f"size: got {size!r:.40}, expected one of {', '.join(SIZES)}")
    if ratio not in SHAPES:
        raise InputError(f"ratio: got {ratio!r:.40}, expected one of {', '.join(SHAPES)}")
    width, height = SHAPES[ratio]
    return width * int(size) // 1024, height * int(size) // 1024
