"""A wrong path of any kind, for every path option of every command, ends at once with one line that names it."""

import argparse
import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import torch
import video_models
from bounded import bounded
from checkpoints import TINY
from clips import save_clip
from pictures import write_pictures
from safetensors.torch import save_file
from wrong_paths import KINDS, make_wrong, permissions_count

from sana_core.__main__ import COMMANDS, main
from sana_core.commands.options import lora_of, path_of
from sana_core.training.settings import Place, TrainingSettings

IMAGE = "--checkpoint TINY --width 32 --height 32 --steps 1 --devices cpu"
VIDEO = "--frames 5 --checkpoint VIDEO --width 64 --height 64 --steps 1 --devices cpu"
BEST = "--best 1 --of 2 --scorer PATH"
MODEL_NAMES = (".safetensors", ".pth", "")


class Row(NamedTuple):
    """A path that a command takes. In `words`, PATH is the wrong path. The other options are right."""

    words: str
    suffixes: tuple[str, ...] = ("",)
    # Kinds of paths that this option accepts.
    right: tuple[str, ...] = ()


# A missing folder is created, and a folder may have any name.
NEW = ("missing", "in a missing folder", "with a line break", "not in UTF-8")
FILE = ("missing", "with a line break", "not in UTF-8")
FOLDERS = (*NEW, "a folder", "a folder with files")
# With --overwrite a file or a link is replaced.
REPLACED = (*NEW, "a text", "empty", "a loop", "a link to nowhere", "unreadable")
TEXT = ("a text", "a folder's name as a file's")
ROWS = {
    "generate checkpoint": Row("generate x --checkpoint PATH --out out", MODEL_NAMES),
    "generate checkpoint, video": Row("generate x --frames 5 --checkpoint PATH --out clip.mp4", MODEL_NAMES),
    "generate checkpoint, cluster": Row("generate x --cluster 127.0.0.1:9 --checkpoint PATH --out out", MODEL_NAMES),
    "generate out": Row(f"generate x {IMAGE} --out PATH", right=FOLDERS),
    "generate out, overwrite": Row(f"generate x {IMAGE} --overwrite --out PATH", right=FOLDERS),
    "generate out, video": Row(f"generate x {VIDEO} --out PATH", (".mp4",), NEW),
    "generate out, no video": Row(f"generate x {VIDEO} --out PATH", (".webm", "")),
    "generate out, overwritten video": Row(f"generate x {VIDEO} --overwrite --out PATH", (".mp4",), REPLACED),
    "generate lora": Row(f"generate x {IMAGE} --lora PATH", MODEL_NAMES),
    "generate lora, strength": Row(f"generate x {IMAGE} --lora PATH=0.5", MODEL_NAMES),
    "generate scorer": Row(f"generate x {IMAGE} {BEST}"),
    "generate first": Row(f"generate x {VIDEO} --out clip.mp4 --first PATH", (".png", "")),
    "batch prompts": Row(f"batch PATH {IMAGE}", (".txt", ""), TEXT),
    "batch checkpoint": Row("batch PROMPTS --checkpoint PATH", MODEL_NAMES),
    "batch out": Row(f"batch PROMPTS {IMAGE} --out PATH", right=FOLDERS),
    "batch lora": Row(f"batch PROMPTS {IMAGE} --lora PATH", MODEL_NAMES),
    "batch scorer": Row(f"batch PROMPTS {IMAGE} {BEST}"),
    "decode latents": Row("decode PATH --checkpoint TINY", (".safetensors", ".latent", "")),
    "decode checkpoint": Row("decode LATENTS --checkpoint PATH", MODEL_NAMES),
    "decode out": Row("decode LATENTS --checkpoint TINY --out PATH", right=FOLDERS),
    "decode out, file": Row("decode LATENTS --checkpoint TINY --out PATH", (".png", ".tif"), NEW),
    "decode out, overwritten": Row("decode LATENTS --checkpoint TINY --overwrite --out PATH", (".png",), REPLACED),
    "convert source": Row("convert PATH out.safetensors", MODEL_NAMES),
    "convert target": Row("convert VAE PATH", (".safetensors", ".sft"), FILE),
    "convert target, no name": Row("convert VAE PATH"),
    "inspect paths": Row("inspect PATH", (*MODEL_NAMES, ".json")),
    "doctor json": Row("doctor --seconds 0 --json PATH", (".json",), FILE),
    "train settings": Row("train PATH", (".toml", "")),
    "train settings, plan": Row("train PATH --plan", (".toml", "")),
}
# Paths in a training's settings. An empty path means the default, if there is one.
UNSET = ("nothing",)
PLACES = {
    "model": Row("train SETTINGS", MODEL_NAMES),
    "out": Row("train SETTINGS", right=FOLDERS),
    "text_encoder": Row("train SETTINGS", MODEL_NAMES, UNSET),
    "autoencoder": Row("train SETTINGS", MODEL_NAMES, UNSET),
    "cache": Row("train SETTINGS", right=(*FOLDERS, *UNSET)),
    "method.start": Row("train SETTINGS", MODEL_NAMES, UNSET),
    "validation.control": Row("train SETTINGS", (".png",)),
    "phase.data": Row("train SETTINGS"),
    "phase.regularisation": Row("train SETTINGS"),
}
# A plan reads only the models.
READ_BY_PLAN = ("model", "text_encoder", "autoencoder", "method.start")
# Lines that a command writes while it works, and lines of the log beside an error.
PROGRESS = re.compile(
    r"\s*|checking .*|counting .*|.*\d+ of \d+.*|step \d.*|dataset: left out .*|.* left out.*|.*is not an image.*"
)


def with_suffixes(rows):
    """The parameters of a test: the name of a row, and each of its suffixes. Only the first suffix is quick."""
    return [
        pytest.param(name, suffix, marks=[pytest.mark.slow] if number else [], id=f"{name}{suffix}")
        for name, row in rows.items()
        for number, suffix in enumerate(row.suffixes)
    ]


def paths_of(command):
    """The names of the arguments of a command that are paths."""
    parser = argparse.ArgumentParser()
    COMMANDS[command].configure(parser)
    return {action.dest for action in parser._actions if action.type in (path_of, lora_of)}


def places(kind, before=""):
    """The names of the settings of a training that are paths."""
    for field in fields(kind):
        hint = get_type_hints(kind, include_extras=True)[field.name]
        inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
        if inner == Place:
            yield before + field.name
        elif is_dataclass(get_args(inner)[0] if get_origin(inner) is Annotated else inner):
            yield from places(inner, f"{field.name}.")


def test_every_path_of_every_command_has_a_row():
    expected = {f"{name} {argument}" for name in COMMANDS for argument in paths_of(name)}
    assert {name.partition(",")[0] for name in ROWS} | {"doctor paths"} == expected
    assert PLACES.keys() == set(places(TrainingSettings))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Valid paths for the placeholders in ROWS."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "prompts.txt").write_text("a red circle")
    save_file({"latents": torch.zeros(1, 32, 2, 2)}, folder / "latents.safetensors")
    write_pictures(folder / "images", 2, controls=True)
    save_clip(folder / "clip")
    paths = {"PROMPTS": folder / "prompts.txt", "LATENTS": folder / "latents.safetensors", "TINY": TINY}
    paths |= {"VIDEO": video_models.save_folder("480p", folder / "video"), "VAE": TINY / "vae"}
    return {**paths, "images": folder / "images", "latent cache": folder / "cache"}


def write_settings(folder, name, entered, inputs):
    """The settings of a training of one step in which the path `name` is `entered`."""
    kind = "controlnet" if name == "validation.control" else "lora"
    control = sorted(inputs["images"].glob("*-control.png"))[0]
    values = {"model": TINY, "out": "out", "cache": inputs["latent cache"], "dtype": "float32", "device": "cpu"}
    values |= {"method.kind": kind, "method.blocks": 2} if kind == "controlnet" else {"method.rank": 2}
    values |= {"validation.every": 1, "validation.steps": 1, "validation.width": 32, "validation.height": 32}
    values |= {"validation.prompts": ["a red circle"]}
    values |= {"validation.control": control} if kind == "controlnet" else {}
    phase = {"data": inputs["images"], "resolution": 32, "steps": 1, "learning_rate": 1e-3}
    table, _, key = name.rpartition(".")
    if table == "phase":
        phase[key] = entered
    else:
        values[name] = entered
    lines = [f"{key} = {json.dumps(value, default=str)}" for key, value in values.items()]
    lines += ["[[phase]]", *(f"{key} = {json.dumps(value, default=str)}" for key, value in phase.items())]
    (folder / "settings.toml").write_text("\n".join(lines))
    return folder / "settings.toml"


def run(words):
    """Run a command in a bounded time and memory. Returns its status, its output and the lines that are no progress."""
    out, err = io.StringIO(), io.StringIO()
    with bounded(20, 4 * 10**9), permissions_count(), redirect_stdout(out), redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as ended:
            status = ended.code
    lines = [line for line in re.split(r"[\r\n]", err.getvalue()) if not PROGRESS.fullmatch(line)]
    return status, out.getvalue(), lines


def check(words, is_right):
    """Run a command with a wrong path."""
    status, out, lines = run(words)
    # argparse prints the usage before the error.
    error = "\n".join(lines[-1:] if status == 2 else lines)
    assert not re.search(r"\[Errno|Traceback|TimeoutError|\[WinError", out + error), (words, error)
    assert (status == 0) == is_right, (words, status, error)
    assert error.count("\n") == 0 and bool(error) == (not is_right), (words, error)


def wrong_paths(suffix, tmp_path, monkeypatch):
    """Yield each kind of wrong path, its folder, which is the current folder, and the path as it is entered."""
    for number, kind in enumerate(KINDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        yield kind, folder, make_wrong(kind, folder, suffix)


@pytest.mark.parametrize("name, suffix", with_suffixes(ROWS))
def test_a_wrong_path_is_one_line(name, suffix, inputs, tmp_path, monkeypatch):
    row = ROWS[name]
    for kind, _, entered in wrong_paths(suffix, tmp_path, monkeypatch):
        words = [str(inputs.get(word, word)).replace("PATH", entered) for word in row.words.split()]
        check(words, kind in row.right)


@pytest.mark.parametrize("name, suffix", with_suffixes(PLACES))
def test_a_wrong_path_in_a_trainings_settings_is_one_line(name, suffix, inputs, tmp_path, monkeypatch):
    row = PLACES[name]
    for kind, folder, entered in wrong_paths(suffix, tmp_path, monkeypatch):
        settings = write_settings(folder, name, entered, inputs)
        # TOML cannot contain lone surrogates, and a line break in a path is a backslash in double quotes.
        is_right = kind in row.right and kind not in ("with a line break", "not in UTF-8")
        check(["train", settings], is_right)
        if name in READ_BY_PLAN:
            check(["train", settings, "--plan"], is_right)


def test_the_doctor_has_a_line_for_each_wrong_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for number, kind in enumerate(kind for kind in KINDS if kind != "nothing"):
        folder = Path(f"folder{number}")
        folder.mkdir()
        names.append(folder / make_wrong(kind, folder, ".safetensors"))
    status, out, lines = run(["doctor", *names, "--seconds", 0])
    assert status == 1 and not lines, lines
    assert not re.search(r"\[Errno|Traceback|TimeoutError", out) and out.count("no such file") > 3
