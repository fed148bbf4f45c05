"""Files and folders of any name: a good one works, and a broken one is one line that any terminal and log can show.

The quick tests take one name of each kind. The slow ones take NAMES names.
"""

import json
import logging
import os
import random
import re
import shutil
import traceback
from contextlib import contextmanager

import pytest
import torch
from bounded import bounded
from checkpoints import TINY
from names import EXAMPLES, cut, is_utf8, make_names
from path_options import PLACES, READ_BY_PLAN, ROWS, make_good, make_inputs, run, write_settings
from PIL import Image
from verdicts import check_line

import sana_core
from sana_core import SanaError
from sana_core.batch.prompts import read_prompts
from sana_core.checkpoints.lora import merge_loras, read_whole
from sana_core.commands.convert import convert_checkpoint
from sana_core.training.dataset import read_dataset
from sana_core.training.settings import read_settings
from sana_core.video.generate import read_first

NAMES = 500
# Characters of an error with the names of a file and of its folder, whose bytes are escaped.
LONGEST_MESSAGE = 2100
GARBAGE = random.Random(0).randbytes(4096)
FAULTS = ("good", "incomplete", "garbage", "empty", "missing", "a folder", "a file")


def load_lora(path):
    merge_loras(sana_core.load_transformer(TINY), [(str(path), 0.5)])


# {function: (kind of file in path_options.make_good, suffix, function)}
CALLS = {
    "inspect_checkpoint, file": ("VAE", ".safetensors", sana_core.inspect_checkpoint),
    "inspect_checkpoint, .pth": (".pth", ".pth", sana_core.inspect_checkpoint),
    "inspect_checkpoint, index": ("prompts", ".safetensors.index.json", sana_core.inspect_checkpoint),
    "inspect_checkpoint, folder": ("model", "", sana_core.inspect_checkpoint),
    "load_transformer": ("model", "", sana_core.load_transformer),
    "load_autoencoder": ("VAE", ".safetensors", sana_core.load_autoencoder),
    "load_text_encoder": ("model", "", sana_core.load_text_encoder),
    "load_controlnet": ("model", "", sana_core.load_controlnet),
    "load_video_transformer": ("video model", "", sana_core.load_video_transformer),
    "load_scorer": ("scorer", "", sana_core.load_scorer),
    "read_whole": ("LoRA", ".safetensors", lambda path: read_whole(path, {})),
    "merge_loras": ("LoRA", ".safetensors", load_lora),
    "read_prompts, .txt": ("prompts", ".txt", read_prompts),
    "read_prompts, .csv": ("prompts", ".csv", read_prompts),
    "read_prompts, .jsonl": ("prompts", ".jsonl", read_prompts),
    "read_settings": ("settings", ".toml", read_settings),
    "read_dataset, folder": ("images", "", read_dataset),
    "read_dataset, .jsonl": ("prompts", ".jsonl", read_dataset),
    "read_dataset, .tar": ("prompts", ".tar", read_dataset),
    "read_first": ("image", ".png", lambda path: read_first(path, (64, 64))),
    "convert_checkpoint": ("VAE", ".safetensors", lambda path: convert_checkpoint(path, path.parent / "o.safetensors")),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    torch.save({"x_embedder.proj.weight": torch.zeros(2, 2)}, inputs["PROMPTS"].parent / "model.pth")
    return inputs


class Lines(logging.Handler):
    """The lines that reach the log."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextmanager
def readable_log():
    """Check that no line of the log needs escaping."""
    handler = Lines()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    wrong = [line for line in handler.lines if not line.isprintable()]
    assert not wrong, ascii(wrong)


def make_fault(fault, kind, path, inputs):
    """Make `fault` at `path` in place of a good file or folder of this kind. A folder has broken files of its name."""
    if fault == "missing":
        return
    if fault in ("a folder", "a file"):
        path.mkdir() if fault == "a folder" else path.write_bytes(GARBAGE)
        return
    if kind == ".pth":
        os.link(inputs["PROMPTS"].parent / "model.pth", path)
    else:
        make_good(kind, path, inputs)
    if fault == "good":
        return
    for file in [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]:
        content = {"garbage": GARBAGE, "empty": b"", "incomplete": file.read_bytes()[: file.stat().st_size // 2]}[fault]
        file.unlink()
        file.write_bytes(content)
    if kind == "images":
        # A data set ignores names that begin with a dot.
        (path / cut(f"x{path.name}", ".png")).write_bytes(GARBAGE)
        (path / cut(f"x{path.name}", ".txt")).write_bytes(b"\xff")


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_call(label, name, fault, folder, inputs):
    """Call a function with a file of this name. Returns whether it succeeded."""
    kind, suffix, call = CALLS[label]
    path = folder / cut(name, suffix)
    make_fault(fault, kind, path, inputs)
    try:
        with bounded(size=4 * 10**9), readable_log():
            call(path)
    except SanaError as error:
        check_line(str(error), LONGEST_MESSAGE)
        # A log contains the errors of libraries that led to this one.
        "".join(traceback.format_exception(error)).encode()
        return False
    finally:
        for entry in folder.iterdir():
            remove(entry)
    return True


@pytest.mark.parametrize("label", CALLS)
def test_a_function_reads_files_of_any_name(label, tmp_path, inputs):
    shift = list(CALLS).index(label)
    for number, name in enumerate(EXAMPLES.values()):
        fault = FAULTS[(number + shift) % len(FAULTS)]
        check_call(label, name, fault, tmp_path, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("label", CALLS)
def test_a_function_reads_files_of_every_name(label, fault, tmp_path, inputs):
    results = {name: check_call(label, name, fault, tmp_path, inputs) for name in make_names(NAMES)}
    # Whether a file is good does not depend on its name.
    suffix = CALLS[label][1]
    assert len({result for name, result in results.items() if is_utf8(cut(name, suffix))}) == 1


def entered_path(name, suffix):
    """The path on the command line, as a shell completes it."""
    path = cut(name, suffix)
    return f"./{path}" if path.startswith("-") else path


def check_command(words, may_succeed, must_succeed):
    """Run a command. Returns its status and output."""
    with readable_log():
        status, out, lines = run(words)
    assert status in (0, 1, 2) and (status != 0 or may_succeed), (words, status, lines)
    assert status == 0 or not must_succeed, (words, lines)
    # argparse prints the usage before the error.
    error = "\n".join(lines[-1:] if status == 2 else lines)
    assert error.isprintable(), (words, error)
    # A fault in the doctor's report is no error.
    assert bool(error) == (status != 0) or words[0] == "doctor", (words, status, error)
    assert not re.search(r"\[Errno|Traceback|TimeoutError", out + error), (words, error)
    return status, out


def check_outputs(folder):
    """Check that other programs can read all files that a command has written."""
    for file in folder.rglob("*"):
        if not file.is_file() or file.read_bytes() == GARBAGE:
            continue
        if file.suffix in (".json", ".jsonl"):
            lines = file.read_text(encoding="utf-8").splitlines() if file.suffix == ".jsonl" else [file.read_bytes()]
            for document in map(json.loads, lines):
                json.dumps(document, ensure_ascii=False).encode()
        elif file.suffix == ".png":
            with Image.open(file) as image:
                for text in image.text.values():
                    text.encode()


COMMANDS = {**ROWS, "doctor paths": ROWS["inspect paths"]._replace(words="doctor --seconds 0 PATH")}
COMMANDS = {name: row for name, row in COMMANDS.items() if "--cluster" not in row.words}
# Suffixes of the files that options read which take several kinds of files.
FOLDERS = ("model", "video model", "scorer", "images")
SETTINGS = {f"settings {name}": row for name, row in PLACES.items()}
STATES = ("good", "garbage", "in the way", "missing")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_option(label, name, state, folder, inputs, monkeypatch):
    """Run a command with a file of this name. Returns its output."""
    row = (COMMANDS | SETTINGS)[label]
    suffix = "" if row.reads in FOLDERS else row.suffixes[0]
    path = folder / cut(name, suffix)
    folder.mkdir()
    monkeypatch.chdir(folder)
    if row.reads and state == "good":
        make_good(row.reads, path, inputs)
    elif row.reads and state == "garbage":
        path.write_bytes(GARBAGE)
    elif row.reads and state == "in the way":
        path.mkdir()
    elif not row.reads and state in ("garbage", "in the way"):
        path.mkdir() if suffix else path.write_bytes(GARBAGE)
    try:
        entered = entered_path(name, suffix)
        good = state == "good" if row.reads else state in ("good", "missing") and "missing" in row.right
        # A name that is not UTF-8 may be refused: TOML and PNG cannot contain it. Settings refuse control characters.
        must = good and is_utf8(name) and not (label in SETTINGS and CONTROL.search(name))
        if label in SETTINGS:
            setting = label.removeprefix("settings ")
            settings = write_settings(folder, setting, entered, inputs)
            _, out = check_command(["train", settings], good, must)
            if setting in READ_BY_PLAN:
                check_command(["train", settings, "--plan"], good, must)
        else:
            words = [str(inputs.get(word, word)).replace("PATH", entered) for word in row.words.split()]
            _, out = check_command(words, good or words[0] == "doctor", must and words[0] != "doctor")
        check_outputs(folder)
    finally:
        monkeypatch.chdir(folder.parent)
        shutil.rmtree(folder)
    return out


# Options whose command generates or trains for a second.
LONG = re.compile(r"generate|batch|train|settings|decode out")


@pytest.mark.parametrize("label", [*COMMANDS, *SETTINGS])
def test_a_command_takes_a_path_of_any_name(label, tmp_path, inputs, monkeypatch):
    number = list(COMMANDS | SETTINGS).index(label)
    for index, name in enumerate(EXAMPLES.values()):
        state = STATES[(index + number) % len(STATES)]
        if not LONG.match(label) or index % 10 == number % 10:
            check_option(label, name, state, tmp_path / "work", inputs, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("label", [*COMMANDS, *SETTINGS])
def test_a_command_takes_a_path_of_every_name(label, tmp_path, inputs, monkeypatch):
    for index, name in enumerate(make_names(NAMES)):
        states = ("garbage", "in the way") if LONG.match(label) and index % 20 else STATES
        for state in states:
            check_option(label, name, state, tmp_path / "work", inputs, monkeypatch)
