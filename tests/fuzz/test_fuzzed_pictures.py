"""Broken images of a data set: they become RGB of the size in their header, or one line names them."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import changed_bytes
from PIL import Image

from sana_core.runtime.user_files import FileRange
from sana_core.training.images import decode_image, upright_size

ROWS = np.linspace(0, 255, 24 * 16 * 3).reshape(16, 24, 3).astype(np.uint8)


def encoded(kind, mode):
    """A small picture as a file of that kind, turned by EXIF where it has one."""
    image, stream, exif = Image.fromarray(ROWS).convert(mode), io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    if mode == "L" and kind == "PNG":
        image = Image.fromarray(ROWS[..., 0].astype(np.uint16) * 257)
    image.save(stream, kind, **({} if kind in ("GIF", "BMP") else {"exif": exif}))
    return stream.getvalue()


KINDS = {"PNG": "RGBA", "16 bits": "L", "JPEG": "RGB", "WEBP": "RGB", "GIF": "P", "BMP": "RGB", "TIFF": "RGB"}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pictures(survives, tmp_path_factory, kind, data):
    content = data.draw(changed_bytes(encoded("PNG" if kind == "16 bits" else kind, KINDS[kind])))
    file = tmp_path_factory.getbasetemp() / "picture"
    file.write_bytes(content)

    def read():
        size = upright_size(FileRange(file), "a.png")
        image = decode_image(content, "a.png")
        assert image.mode == "RGB" and image.size == size

    survives(read, "a.png")
