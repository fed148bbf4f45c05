"""Data sets of a picture or two, in folders and tars."""

import io
import tarfile

import numpy as np
from PIL import Image

from sana_core.runtime.user_files import read_range
from sana_core.training.dataset import read_dataset
from sana_core.training.images import decode_image

SMOOTH = np.linspace(20, 230, 24 * 40 * 3).reshape(24, 40, 3).astype(np.uint8)
PICTURE = Image.fromarray(SMOOTH)


def save(path, picture=PICTURE, caption="a red circle", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, **options)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def encoded(picture=PICTURE, kind="PNG", **options):
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def exif_of(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    return exif


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(data, bytes):
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return path


def only(folder):
    (sample,) = read_dataset(folder)
    return sample


def open_mask(sample):
    return None if sample.mask is None else decode_image(read_range(sample.mask, sample.name), sample.name).convert("L")


def pixels(picture):
    return np.asarray(picture).astype(int)
