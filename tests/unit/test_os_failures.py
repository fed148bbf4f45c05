"""Every command with failures of the operating system: nothing is lost or written twice, each prints one line.

A command runs while a failure is injected, and again without it. After that its folder equals the folder of a run
without failures, byte for byte.
"""

import contextlib
import errno
import io
import json
import os
import re
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import TINY
from diffusers import SanaTransformer2DModel  # noqa: F401  Its first import writes warnings about torchao.
from pictures import write_pictures
from PIL import Image
from pretend_card import pretend_cards
from safetensors.torch import save_file

from sana_core.__main__ import main
from sana_core.runtime import atomic_files
from sana_core.training import states, trainer

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = ["--width", "32", "--height", "32", "--steps", "1", "--dtype", "float32"]
PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
# Progress lines of the commands.
PROGRESS = re.compile(r"(?!out: ).*\d+ of \d+.*|\d\d:\d\d:\d\d .*|generating in .*|estimating the memory of .*|")


class SharingViolation(PermissionError):
    """What Windows raises for a file that is open elsewhere."""

    winerror = 32

    def __init__(self):
        super().__init__(errno.EACCES, "The process cannot access the file")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with the inputs of all commands."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    latents = torch.randn(2, 32, 2, 3, generator=torch.Generator().manual_seed(0))
    save_file({"latents": latents}, folder / "latents.safetensors")
    write_pictures(folder / "images", 2)
    return folder


def words_of(name, inputs, out, devices):
    """The arguments of the command. `devices`: its devices, or none for a CPU."""
    several = ["--devices", *devices] if devices else ["--devices", "cpu"]
    model = ["--checkpoint", TINY]
    if name == "batch":
        return ["batch", inputs / "prompts.txt", *model, "--out", out, "--count", 2, "--chunk", 1, *SIZE, *several]
    if name == "generate":
        return ["generate", *PROMPTS, *model, "--out", out, "--seed", 7, "--overwrite", *SIZE, *several]
    if name == "decode":
        where = ["--device", devices[0]] if devices else []
        return ["decode", inputs / "latents.safetensors", *model, "--out", out, "--overwrite", *where]
    if name == "convert":
        return ["convert", TINY / "transformer", out / "model.safetensors"]
    settings = inputs / f"{out.parent.name}.toml"
    values = {"model": str(TINY), "out": str(out), "cache": str(inputs / "cache"), "name": "x", "dtype": "float32"}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    lines += ["save_every = 1", "keep = 1", f'device = "{devices[0] if devices else "cpu"}"']
    lines += ["[method]", "rank = 2", "[validation]", "every = 2", 'prompts = ["a red circle"]', "steps = 1"]
    lines += ["width = 32", "height = 32", "[[phase]]", f"data = [{json.dumps(str(inputs / 'images'))}]"]
    lines += ["resolution = 32", "steps = 2", "learning_rate = 1e-3"]
    settings.write_text("\n".join(lines))
    return ["train", settings]


COMMANDS = ("batch", "generate", "decode", "convert", "train")


def run(name, inputs, out, devices=(), caplog=None):
    """Run the command. Returns its status and the lines on stderr, without its progress."""
    out.mkdir(parents=True, exist_ok=True)
    if name == "convert":
        # It refuses to replace its target.
        with contextlib.suppress(FileNotFoundError):
            os.remove(out / "model.safetensors")
    if caplog is not None:
        caplog.clear()
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        status = main([str(word) for word in words_of(name, inputs, out, devices)])
    lines = [text.strip() for text in re.split(r"[\r\n]", said.getvalue())]
    lines = [text for text in lines if not PROGRESS.fullmatch(text)]
    if caplog is not None:
        lines += [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return status, lines


def content(out):
    """The files below `out`. For the log: only steps and losses, because its times differ between runs."""
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    if "log.jsonl" in files:
        files["log.jsonl"] = [(line["step"], line.get("loss")) for line in states.read_log(out)]
    return files


@pytest.fixture(scope="module")
def expected(inputs, tmp_path_factory):
    """A function of a command's name: the content of its folder without failures."""
    cache = {}

    def expected(name):
        if name not in cache:
            out = tmp_path_factory.mktemp(f"expected-{name}") / "out"
            assert run(name, inputs, out) == (0, [])
            cache[name] = content(out)
        return cache[name]

    return expected


@pytest.fixture
def inject(monkeypatch):
    """A function of a predicate and an error: operations on files that the predicate accepts raise the error.

    The predicate gets the name of the operation and its paths. The waiting times for files are short in these tests.
    """
    monkeypatch.setattr(atomic_files, "PATIENCE", 0.1)
    monkeypatch.setattr(states, "SCAN_PATIENCE", 0.1)
    injected = []

    def check(name, *paths):
        for accepts, make_error in injected:
            if accepts(name, [str(path) for path in paths]):
                raise make_error()

    for name in ("rename", "replace", "hardlink_to", "unlink"):
        real = getattr(Path, name)

        def wrapped(path, *target, real=real, name=name, **options):
            check(name, path, *target)
            return real(path, *target, **options)

        monkeypatch.setattr(Path, name, wrapped)
    real_open, real_fsync = Path.open, atomic_files.fsync

    def open_log(path, *mode, **options):
        if path.name == "log.jsonl":
            check("open", path)
        return real_open(path, *mode, **options)

    def fsync(descriptor):
        check("fsync", descriptor)
        real_fsync(descriptor)

    monkeypatch.setattr(Path, "open", open_log)
    monkeypatch.setattr(atomic_files, "fsync", fsync)
    return lambda *failures: injected.__setitem__(slice(None), failures)


def moves_to(words):
    """A predicate: a file gets a name that ends with one of the words, or loses it."""
    return lambda name, paths: name != "fsync" and any(path.endswith(word) for path in paths for word in words)


@pytest.mark.parametrize("name", COMMANDS)
def test_files_that_are_open_elsewhere_for_a_moment_change_nothing(
    name, inputs, expected, tmp_path, inject, monkeypatch, caplog
):
    monkeypatch.setattr(atomic_files, "PATIENCE", 10.0)
    seen = Counter()

    def twice(operation, paths):
        path = paths[-1]
        # The log is written when its next line comes.
        if operation == "fsync" or not Path(paths[0]).exists() or seen[operation, path] == 2:
            return False
        seen[operation, path] += 1
        return True

    before = expected(name)
    inject((twice, SharingViolation))
    status, lines = run(name, inputs, tmp_path / "out", caplog=caplog)
    assert status == 0 and seen and not [line for line in lines if "log.jsonl" not in line], lines
    inject()
    after = content(tmp_path / "out")
    assert after.keys() == before.keys()
    # The sheet may lack losses that were not in the log at that time.
    assert all(after[key] == before[key] for key in before if key != "validations.png")


LASTING = {
    "batch": ["00000_0.png", "manifest.json", "holder.json"],
    "generate": ["00000_7.png"],
    "decode": ["latents_00001.png"],
    "convert": ["model.safetensors"],
    # test_windows_files.py has the states, the LoRA and the log.
    "train": ["run.json", "validations.png"],
}


# Lines about a list that cannot be written, one for each sheet.
LISTS = {"manifest.json": 1, "validations.png": 2}


@pytest.mark.parametrize(("name", "file"), [(name, file) for name, files in LASTING.items() for file in files])
def test_a_file_that_stays_open_costs_nothing_but_one_line(name, file, inputs, expected, tmp_path, inject, caplog):
    before, out = expected(name), tmp_path / "out"
    inject((moves_to([file]), SharingViolation))
    status, lines = run(name, inputs, out, caplog=caplog)
    # A list that cannot be written does not end a run.
    assert status == (file not in LISTS), lines
    assert len(lines) == LISTS.get(file, 1) and all((file in line or f"{out} " in line) for line in lines)
    inject()
    # A finished run does not validate again, so it writes no sheet.
    before = {key: value for key, value in before.items() if file != "validations.png" or key != file}
    assert run(name, inputs, out, caplog=caplog) == (0, [])
    after = content(out)
    if name in ("generate", "decode", "convert"):
        # The result was not lost, and has another name.
        (other_name,) = after.keys() - before.keys()
        assert other_name in lines[0] and after.pop(other_name) == before[file]
    assert after == before


def test_a_run_that_notices_before_a_validation_that_a_state_stays_open_loses_nothing(
    inputs, expected, tmp_path, inject, caplog, monkeypatch
):
    """The run saves step 2 when it notices that step 1 stays open. On a slow machine that is before the validation."""
    out, take_step = tmp_path / "out", trainer.Trainer.take_step

    def take_slow_step(run):
        line = take_step(run)
        if line["step"] == 2:
            run.saver.job.exception()
        return line

    monkeypatch.setattr(trainer.Trainer, "take_step", take_slow_step)
    inject((moves_to(["step-0000001"]), SharingViolation))
    status, (line,) = run("train", inputs, out, caplog=caplog)
    assert status == 1 and "step-0000001" in line
    inject()
    assert run("train", inputs, out, caplog=caplog) == (0, [])
    assert content(out) == expected("train")


@pytest.mark.parametrize("at, code", [(1, errno.ENOSPC), (4, errno.EIO), (9, errno.ENOSPC)])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_fails_once_costs_one_line(name, at, code, inputs, expected, tmp_path, inject, caplog):
    before, out, calls = expected(name), tmp_path / "out", count(1)

    def fails(operation, paths):
        return operation != "unlink" and next(calls) == at

    inject((fails, lambda: OSError(code, os.strerror(code))))
    status, lines = run(name, inputs, out, caplog=caplog)
    assert len(lines) <= 1 and (status == 0 or os.strerror(code) in lines[0]), lines
    # Every file with its final name is complete.
    complete = {
        key: value for key, value in content(out).items() if key.endswith((".png", "/x.safetensors", "l.safetensors"))
    }
    assert complete.items() <= before.items()
    inject()
    assert run(name, inputs, out, caplog=caplog) == (0, [])
    assert content(out) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_renumbers_its_files_changes_nothing(name, inputs, expected, tmp_path, monkeypatch):
    numbers = count(10**6)

    class Status:
        """A status with a number of the file that is new each time, and a time in seconds."""

        def __init__(self, real):
            self.real, self.st_ino = real, next(numbers)

        def __getattr__(self, name):
            return getattr(self.real, name)

    before = expected(name)
    with monkeypatch.context() as patch:
        for name_of_call in ("stat", "lstat"):
            real = getattr(Path, name_of_call)
            patch.setattr(Path, name_of_call, lambda path, real=real, **options: Status(real(path, **options)))
        assert run(name, inputs, tmp_path / "out") == (0, [])
        assert run(name, inputs, tmp_path / "out") == (0, [])
    assert content(tmp_path / "out") == before


# Names that do not exist in torch 2.6, the oldest supported version.
NEWER = {
    torch: ["AcceleratorError"],
    torch.accelerator: [
        *("set_device_index", "current_device_index", "device_index", "get_memory_info", "empty_cache"),
        *("memory_allocated", "memory_reserved", "memory_stats", "max_memory_allocated", "reset_peak_memory_stats"),
        *("get_device_capability",),
    ],
}


@pytest.mark.parametrize("name", ["batch", "generate", "decode", "train"])
def test_no_command_needs_names_that_the_oldest_torch_lacks(name, inputs, expected, tmp_path, monkeypatch):
    before = expected(name)
    for module, names in NEWER.items():
        for function in names:
            monkeypatch.delattr(module, function, raising=False)
    with pretend_cards(2):
        assert run(name, inputs, tmp_path / "out", ["cuda:0", "cuda:1"]) == (0, [])
    after = content(tmp_path / "out")
    assert after.keys() == before.keys()
    for key in before:
        if key.endswith(".png") and "/" not in key and key != "validations.png":
            image, expected_image = (
                np.asarray(Image.open(io.BytesIO(files[key]))).astype(int) for files in (after, before)
            )
            assert np.abs(image - expected_image).max() <= 1
