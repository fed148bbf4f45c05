"""Videos as MP4 files, by the library that ComfyUI uses (PyAV), and the image that one begins with."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import torch

from ..errors import InputError, VersionError
from ..runtime.atomic_files import output_file
from ..runtime.file_ranges import FileRange, read_range
from ..runtime.image_files import levels
from ..training.images import decode_image


def check_writer(path: Path) -> None:
    """Raise InputError for a name that is not an MP4 file's, and VersionError where PyAV is not installed."""
    if path.suffix.lower() != ".mp4":
        raise InputError(f"out: got {path.name!r:.60} with --frames, expected a file like clip.mp4; name one")
    try:
        import av  # noqa: F401
    except ImportError:
        raise VersionError("requirements: an MP4 file needs PyAV; pip install av") from None


def write_video(path: Path, video: torch.Tensor, replace: bool = False, rate: int = 16) -> None:
    """Write `video` [3, T, H, W] in [-1, 1] as H.264, at `rate` frames a second.

    Raises ExistingFileError and OutputError as `output_file` does.
    """
    import av

    # PyAV writes into memory. It would take a path such as "http:/clip.mp4" for an address, and it hides the errors of
    # the disk. The file is far smaller than `video`.
    encoded = BytesIO()
    with av.open(encoded, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = video.shape[3], video.shape[2], "yuv420p"
        for frame in video.unbind(1):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(levels(frame), format="rgb24")))
        container.mux(stream.encode())
    with output_file(path, replace) as part:
        part.write_bytes(encoded.getbuffer())


def read_first(path: Path, size: tuple[int, int]) -> torch.Tensor:
    """Return the image at `path` scaled and cut to `size`, (width, height), as [3, H, W] in [-1, 1].

    The file is read as training reads the images of a data set. Raises InputError, MissingFileError and ReadError.
    """
    import numpy as np
    from PIL import Image, ImageOps

    name = f"first: {str(path):.240}"
    image = decode_image(read_range(FileRange(path), name), name)
    fitted = ImageOps.fit(image, size, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted)).movedim(-1, 0) / 127.5 - 1
