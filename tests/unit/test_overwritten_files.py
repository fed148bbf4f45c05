"""A model's file that is shortened or rewritten in place after loading changes no image and ends no process."""

import os
import subprocess
import sys

import layouts
import pytest
import torch
from safetensors.torch import load_file
from setup import ROOT

from sana_core.checkpoints import headers
from sana_core.checkpoints.headers import read_file

PARTS = {"transformer": "transformer", "autoencoder": "vae", "text_encoder": "text_encoder"}
# run in a process of its own: a lost page ends it by SIGBUS
PROGRAM = """
import os, sys
import sana_core

fault, *models = sys.argv[1:]
loaded = []
for kind, file in zip(models[::2], models[1::2]):
    module = getattr(sana_core, "load_" + kind)(file)
    loaded.append((kind, file, getattr(module, "model", module)))
for kind, file, module in loaded:
    print(kind, file)
    if fault == "shortened":
        os.truncate(file, 64)
    else:
        with open(file, "r+b") as stream:
            stream.write(b"\\xff" * os.path.getsize(file))
    assert all(parameter.isfinite().all() for parameter in module.parameters())
"""


@pytest.fixture
def in_fp32(checkpoint, tmp_path):
    """A function that makes a folder of one component in fp32, which needs no cast to be loaded, and gives its file."""

    def build(kind, suffix):
        folder = tmp_path / suffix / PARTS[kind]
        folder.mkdir(parents=True)
        tensors = read_file(next((checkpoint / PARTS[kind]).glob("*.safetensors")))
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
        for source in [checkpoint / PARTS[kind] / "config.json", checkpoint / "tokenizer" / "tokenizer.json"]:
            (folder / source.name).write_bytes(source.read_bytes())
        if suffix == "safetensors":
            return layouts.save(tensors, folder / "model.safetensors")
        torch.save(tensors, folder / "model.pth")
        return folder / "model.pth"

    return build


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["shortened", "written anew"])
def test_a_loaded_model_outlives_its_file(in_fp32, fault):
    files = [(kind, str(in_fp32(kind, "safetensors"))) for kind in PARTS]
    files.append(("transformer", str(in_fp32("transformer", "pth"))))
    command = [sys.executable, "-c", PROGRAM, fault, *(word for pair in files for word in pair)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, (process.returncode, process.stdout[-200:], process.stderr[-500:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
def test_a_file_is_read_as_safetensors_reads_it(tmp_path, dtype):
    shapes = {"scalar": (), "none": (0, 3), "row": (5,), "block": (3, 1, 7)}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    file = layouts.save(tensors, tmp_path / "file.safetensors")
    expected, got = load_file(file), read_file(file)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == dtype and torch.equal(got[name].float(), tensor.float())
    assert set(read_file(file, ["row"])) == {"row"}


def test_a_file_that_is_shortened_while_it_is_read_is_named(in_fp32, monkeypatch):
    file = in_fp32("transformer", "safetensors")
    header = headers.read_header(file)
    os.truncate(file, file.stat().st_size // 2)
    monkeypatch.setattr(headers, "read_header", lambda path: header)
    with pytest.raises(ValueError, match="^transformer/model.safetensors: was shortened while it was read; download"):
        read_file(file)
