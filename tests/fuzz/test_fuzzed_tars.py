"""Broken tars: they give their samples, or one line names the damage. Nothing is unpacked."""

import io
import tarfile

from hypothesis import given
from mutations import changed_bytes
from PIL import Image

from sana_core.runtime.user_files import opened_range
from sana_core.training.dataset import open_image, read_dataset


def packed():
    """A tar of two pictures with captions."""
    stream, picture = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in (("a.png", picture.getvalue()), ("a.txt", b"a"), ("b.png", picture.getvalue())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        info = tarfile.TarInfo("\u00e4" * 60 + "/b.json")
        info.size = 15
        archive.addfile(info, io.BytesIO(b'{"prompt": "b"}'))
    return stream.getvalue()


TAR = packed()


@given(content=changed_bytes(TAR))
def test_tars(survives, tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "tars"
    folder.mkdir(exist_ok=True)
    (folder / "a.tar").write_bytes(content)

    def read():
        for sample in read_dataset(folder / "a.tar"):
            with opened_range(sample.image, sample.name) as (_, length):
                assert sample.image.start + length <= len(content)
            open_image(sample)

    survives(read)
    assert [path.name for path in folder.iterdir()] == ["a.tar"]
