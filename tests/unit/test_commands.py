"""`python -m sana_core`, as an operator runs it: another process, outside the project's folder."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from setup import ROOT

from sana_core import decode_latents, generate, load_autoencoder
from sana_core.__main__ import COMMANDS


@pytest.fixture
def command(tmp_path):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "sana_core", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(command, name):
    done = command(name, "--help")
    assert done.returncode == 0
    assert f"example:\n  python -m sana_core {name}" in done.stdout


def test_generate_writes_the_picture_that_the_call_returns(command, checkpoint, tmp_path):
    prompt = "a red circle on a blue background"
    size = ["--width", 128, "--height", 96]
    done = command("generate", prompt, "--checkpoint", checkpoint, "--seed", 5, "--steps", 3, *size, "--out", "out")
    assert done.returncode == 0, done.stderr
    path = tmp_path / done.stdout.strip()
    expected = generate([prompt], checkpoint, seed=5, steps=3, width=128, height=96)[0]
    pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)
    assert (pixels - (expected + 1) * 127.5).abs().max() <= 0.51


def test_a_mistake_is_one_line_on_stderr(command, checkpoint):
    done = command("generate", "a red circle", "--checkpoint", checkpoint, "--width", 100)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "width: got 100, expected a multiple of 32 from 32 to 16384; use 96"


def test_decode_writes_row_by_row_what_the_call_returns(command, checkpoint, tmp_path):
    latents = torch.randn(2, 32, 5, 4, generator=torch.Generator().manual_seed(0))
    save_file({"latents": latents}, tmp_path / "two.safetensors")
    done = command("decode", "two.safetensors", "--checkpoint", checkpoint, "--out", "out", "--report")
    assert done.returncode == 0, done.stderr
    expected = decode_latents(load_autoencoder(checkpoint), latents).clamp(-1, 1)
    lines = done.stdout.splitlines()
    for picture, path in zip(expected, lines[::2], strict=True):
        image = Image.open(tmp_path / path)
        image.verify()
        pixels = torch.from_numpy(np.array(Image.open(tmp_path / path))).permute(2, 0, 1)
        assert (pixels - (picture + 1) * 127.5).abs().max() <= 0.52
    assert json.loads(lines[1])["method"] == "strips"
    assert "160 of 160 rows" in done.stderr
    assert not list(tmp_path.glob("out/*.part"))


def test_decode_names_a_file_without_latents(command, checkpoint, tmp_path):
    save_file({"other": torch.zeros(1)}, tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    for name, wanted in (("none", "holds other, expected a tensor 'latents'"), ("text", "is no safetensors file")):
        done = command("decode", f"{name}.safetensors", "--checkpoint", checkpoint)
        assert done.returncode == 1 and wanted in done.stderr.splitlines()[-1]
