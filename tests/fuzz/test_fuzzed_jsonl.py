"""Broken lists of images: samples with an image and a caption, or one line names the broken entry."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mutations import changed_bytes, changed_json
from PIL import Image

from sana_core.training.dataset import read_dataset

LINES = [
    {"file_name": "a.png", "text": "a red circle"},
    {"image": "b.png", "caption": "a blue square", "mask": "a.png", "control": "a.png"},
]
LISTED = "\n".join(map(json.dumps, LINES)).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for name in "ab":
        Image.new("RGB", (8, 8), "red").save(folder / f"{name}.png")
    return folder


CHANGED = st.lists(st.sampled_from(LINES).flatmap(changed_json), min_size=1, max_size=3)


@given(content=changed_bytes(LISTED) | CHANGED.map(lambda lines: "\n".join(lines).encode(errors="surrogatepass")))
@example(content=b"[" * 100_000)
@example(content=b'{"file_name": "../a.png", "text": "a"}')
def test_lists(survives, folder, content):
    (folder / "metadata.jsonl").write_bytes(content)
    for sample in survives(lambda: read_dataset(folder)) or []:
        assert sample.image.file.parent == folder and sample.size == (8, 8) and isinstance(sample.caption, str)
