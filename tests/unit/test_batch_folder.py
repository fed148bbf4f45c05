"""`python -m sana_core batch`: what it writes, and that it goes on where it was."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from setup import ROOT

import sana_core
from sana_core.__main__ import main
from sana_core.batch.folder import fingerprint

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]


@pytest.fixture
def arguments(tmp_path, checkpoint, monkeypatch):
    """A function that returns the command's arguments: four steps, one picture at a time."""
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def build(*options, prompts="prompts.txt", steps=4):
        own = ["batch", prompts, "--checkpoint", checkpoint, "--out", "out", "--width", 128, "--height", 128]
        return [str(word) for word in (*own, "--steps", steps, "--chunk", 1, "--count", 4, *options)]

    return build


@pytest.fixture
def batch(arguments, capsys):
    """A function that runs the command in this process and returns status, stdout and stderr."""

    def run(*options, **kinds):
        status = main(arguments(*options, **kinds))
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def spawn(arguments):
    """A function that starts the command in a process of its own."""

    def start(limits=None):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "sana_core", *arguments()]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=limits)

    return start


@pytest.fixture
def made(batch, tmp_path):
    """A folder with all eight pictures."""
    code, out, err = batch("--report")
    assert code == 0, err
    assert "8 pictures in" in out
    return tmp_path / "out"


def files(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.png")}


def test_the_pictures_are_those_of_the_call_and_the_manifest_lists_them(made, checkpoint):
    expected = sana_core.generate(PROMPTS, checkpoint, count=4, steps=4, width=128, height=128, chunk=1)
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["settings"]["steps"] == 4 and manifest["settings"]["weights"] == fingerprint(checkpoint)
    names = [f"{prompt:05d}_{seed}.png" for prompt in range(2) for seed in range(4)]
    assert list(manifest["pictures"]) == names == sorted(files(made))
    for name, pixels in zip(names, expected, strict=True):
        levels = torch.from_numpy(np.array(Image.open(made / name))).permute(2, 0, 1)
        assert (levels - (pixels + 1) * 127.5).abs().max() <= 0.51
        entry = manifest["pictures"][name]
        assert (entry["prompt"], f"_{entry['seed']}.") == (PROMPTS[int(name[:5])], name[5:-3])


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_was_killed_makes_exactly_the_missing_ones(made, batch, spawn, tmp_path):
    whole = files(made)
    made.rename(tmp_path / "whole")
    process = spawn()
    while len(list(made.glob("*.png"))) < 3:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = files(made)
    (made / ".00001_3.png.0123abcd").write_bytes(b"half")
    code, out, err = batch()
    assert code == 0, err
    assert f"{len(before)} of 8 pictures are there already" in out
    assert out.count(".png (") == 8 - len(before)
    after = files(made)
    assert {name: after[name] for name in before} == before
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in whole.items()}
    assert sorted(path.name for path in made.iterdir()) == [*sorted(whole), "manifest.json"]


def test_damaged_and_missing_pictures_are_made_again_without_manifest_too(made, batch):
    before = files(made)
    (made / "00000_1.png").write_bytes(before["00000_1.png"][0][:-100])
    (made / "00001_2.png").unlink()
    code, out, err = batch()
    assert (code, out.count(".png (")) == (0, 2), err
    (made / "manifest.json").unlink()
    (made / "00001_0.png").unlink()
    code, out, err = batch()
    assert (code, out.count(".png (")) == (0, 1), err
    assert {name: data for name, (data, _) in files(made).items()} == {name: data for name, (data, _) in before.items()}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 5}, "is of another prompt or other settings (steps 4); choose another folder"),
        ({"prompts": "other.txt"}, "other settings (prompt 'a red circle on a blue background'); choose"),
    ],
)
def test_pictures_of_something_else_are_never_overwritten(made, batch, tmp_path, options, message):
    (tmp_path / "other.txt").write_text("a green circle on a red background")
    before = files(made)
    code, out, err = batch(**options)
    assert code == 1 and message in err and len(err.splitlines()) == 1
    assert files(made) == before


def test_a_file_of_another_program_is_never_overwritten(batch, tmp_path):
    (tmp_path / "out").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "out" / "00000_1.png")
    code, _, err = batch()
    assert code == 1 and "00000_1.png is not of this batch; choose another folder, or remove it" in err


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "prompts.txt holds no prompt; write one a line"),
        (b" \n\n", "prompts.txt holds no prompt; write one a line"),
        ("Gr\xfcn".encode("latin-1"), "prompts.txt is not UTF-8 at byte 2; save it as UTF-8"),
        (None, "No such file or directory: 'prompts.txt'"),
        (b"\xed\xa0\x80", "prompts.txt is not UTF-8 at byte 0; save it as UTF-8"),
    ],
)
def test_a_bad_prompt_file_is_one_line(batch, tmp_path, content, message):
    (tmp_path / "prompts.txt").unlink()
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    code, _, err = batch()
    assert code == 1 and message in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize(
    "options, message",
    [
        (("--count", 0), "count: got 0, expected a whole number from 1 to 100000"),
        (("--count", 1_000_000), "count: got 1000000, expected a whole number from 1 to 100000"),
        (("--chunk", -1), "chunk: got -1"),
        (("--devices", "cuda:7"), "devices: got cuda:7, expected some of cpu"),
        (("--devices", "nonsense"), "devices: got 'nonsense', expected names like cpu"),
        (("--width", 100), "width: got 100, expected a multiple of 32"),
        (("--steps", 0), "steps: got 0"),
        (("--checkpoint", "nowhere"), "nowhere"),
    ],
)
def test_a_bad_option_is_one_line(batch, options, message):
    status, _, err = batch(*options)
    assert status == 1 and message in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize("out", ["prompts.txt/out", "/sys/sana-batch"])
def test_a_folder_that_cannot_be_written_is_one_line(batch, out):
    code, _, err = batch("--out", out)
    assert code == 1 and out in err and len(err.splitlines()) == 1, err


def test_a_disk_that_is_full_says_so_and_leaves_no_half_picture(batch, spawn, tmp_path):
    # no file may grow beyond 2000 bytes, as little as a full disk takes
    process = spawn(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)))
    _, err = process.communicate(timeout=120)
    assert (
        process.returncode == 1
        and "cannot write into out (File too large); 0 of 8 pictures are there, the same command" in err
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]
    status, _, err = batch()
    assert status == 0, err
