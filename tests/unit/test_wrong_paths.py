"""A wrong path of any kind, for every path option of every command, ends at once with one line that names it."""

import argparse
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from path_options import PLACES, READ_BY_PLAN, ROWS, make_inputs, run, write_settings
from wrong_paths import KINDS, make_wrong

from sana_core.__main__ import COMMANDS
from sana_core.commands.options import lora_of, path_of
from sana_core.training.settings import Place, TrainingSettings


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
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def check(words, is_right):
    """Run a command with a wrong path."""
    status, out, lines = run(words)
    # argparse prints the usage before the error.
    error = "\n".join(lines[-1:] if status == 2 else lines)
    assert not re.search(r"\[Errno|Traceback|TimeoutError|\[WinError", out + error), (words, error)
    assert (status == 0) == is_right, (words, status, error)
    assert error.count("\n") == 0 and bool(error) == (not is_right), (words, error)
    return error


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
        error = check(words, kind in row.right)
        assert not error or kind != "missing" or f"wrong{suffix}" in error, error


@pytest.mark.parametrize("name, suffix", with_suffixes(PLACES))
def test_a_wrong_path_in_a_trainings_settings_is_one_line(name, suffix, inputs, tmp_path, monkeypatch):
    row = PLACES[name]
    for kind, folder, entered in wrong_paths(suffix, tmp_path, monkeypatch):
        settings = write_settings(folder, name, entered, inputs)
        is_right = kind in row.right
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
