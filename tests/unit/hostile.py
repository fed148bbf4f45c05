"""Files that are made to do harm, and how they have to be refused."""

import json

import pytest
from bounded import bounded

import sana_core
from sana_core import CheckpointError

TENSORS = {
    "transformer": ("transformer/diffusion_pytorch_model.safetensors", sana_core.load_transformer),
    "vae": ("vae/diffusion_pytorch_model.safetensors", sana_core.load_autoencoder),
    "text_encoder": ("text_encoder/model.safetensors", sana_core.load_text_encoder),
}


class Call:
    """Anything that a pickle may ask for."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def write_header(file, header, size=0):
    """Write a safetensors file: `header` as JSON or as raw bytes, then `size` zeros."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + size)
    return file


def entry(begin, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def refused(path, pattern, kind=CheckpointError, load=sana_core.load_transformer):
    with bounded(), pytest.raises(kind, match=pattern) as caught:
        load(path)
    assert len(str(caught.value)) < 300
