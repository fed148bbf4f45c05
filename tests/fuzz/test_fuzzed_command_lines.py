"""Broken command lines of all commands: they succeed, or end with one line of ours or of argparse."""

import os
import re
import shutil
import traceback

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from verdicts import check_line, is_ours

from sana_core.__main__ import COMMANDS, main

# Existing and missing files of each example's folder.
PATHS = [
    "model",
    "prompts.txt",
    "latents.safetensors",
    "lora.safetensors",
    "model/vae",
    "model/transformer/config.json",
]
PATHS += ["model/transformer/diffusion_pytorch_model.safetensors", "missing", "missing/file.png", "out", ".", "a.png"]
PATHS += [
    "",
    " ",
    "-",
    "\0",
    "x" * 300,
    "\udc80",
    "\n",
    "*",
    "a b",
    "new.safetensors",
    "b.TIF",
    "out/deep/er",
    "~",
    "%s",
]
NUMBERS = [
    "0",
    "1",
    "2",
    "-1",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1_0",
    "0x10",
    "\u0661",
    "",
    " 1",
    "None",
    "2" * 4000,
]
NUMBERS += ["32", "64", "31", "16384", "99999999999999999999", str(2**64 - 1), "true", "-0", "1e-320"]
WORDS = [
    "a red circle",
    "float32",
    "bfloat16",
    "float16",
    "cpu",
    "cuda",
    "cuda:99",
    "meta",
    "mps",
    "xpu:0",
    "auto",
    "whole",
]
WORDS += [
    "strips",
    "tiles",
    "flow_euler",
    "scm",
    "nvidia",
    "diffusers",
    "1.6B",
    "0.6B",
    "dc-ae-lite-f32c32",
    "--",
    "-h",
]
SIZES = ["--width", "32", "--height", "32"]
GOOD = [
    ["generate", "a red circle", "--checkpoint", "model", "--steps", "1", *SIZES, "--seed", "1", "--guidance", "1"],
    ["generate", "a", "b", "--checkpoint", "model", "--steps", "1", *SIZES, "--sampler", "flow_euler", "--out", "out"],
    ["generate", "a", "--checkpoint", "model", "--steps", "1", *SIZES, "--pag-scale", "1", "--pag-blocks", "1"],
    ["batch", "prompts.txt", "--checkpoint", "model", "--steps", "1", *SIZES, "--count", "2", "--chunk", "1"],
    ["batch", "prompts.txt", "--checkpoint", "model", "--steps", "1", *SIZES, "--devices", "cpu", "--report"],
    ["decode", "latents.safetensors", "--checkpoint", "model", "--out", "out", "--max-gb", "1", "--report"],
    ["decode", "latents.safetensors", "--checkpoint", "model", "--out", "a.png", "--method", "strips", "--overwrite"],
    ["plan", "1.6B", "--width", "1024", "--height", "1024", "--batch", "2", "--dtype", "float32", "--json"],
    ["inspect", "model", "lora.safetensors"],
    ["convert", "model/transformer", "new.safetensors", "--dtype", "float16", "--resolution", "512"],
]
FLAGS = sorted({word for line in GOOD for word in line if word.startswith("--")})
FLAGS += ["--negative-prompt", "--reference", "--out-shared", "--vae", "--device", "--help", "--che", "--wid", "--x"]
# Of the surrogates, a shell can pass only those that encode bytes.
ANY = st.text(
    st.characters(exclude_categories=["Cs"]) | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF), max_size=20
)
VALUES = st.sampled_from(PATHS) | st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | ANY | st.floats().map(repr)
# A cluster's address opens sockets, which takes long. torch.compile starts a compiler.
NOT_HERE = ("--cluster", "--compile")
LARGEST = {"--width": 64, "--height": 64, "--steps": 2, "--count": 3, "--batch": 3}


@st.composite
def command_lines(draw):
    """A good line with up to three words changed, dropped, repeated or added."""
    line = list(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(line)))
        match draw(st.sampled_from(("value", "value", "value", "drop", "repeat", "flag", "add", "joined"))):
            case "value" if at < len(line):
                line[at] = draw(VALUES)
            case "drop":
                del line[at : at + draw(st.integers(1, 2))]
            case "repeat":
                line[at:at] = line[at : at + draw(st.integers(1, 3))]
            case "flag":
                line[at:at] = [draw(st.sampled_from(FLAGS))]
            case "joined":
                line[at:at] = [f"{draw(st.sampled_from(FLAGS))}={draw(VALUES)}"]
            case _:
                line[at:at] = [draw(VALUES)]
    return harmless(line)


def harmless(line):
    """The line without paths that leave the folder, pictures that take long, and flags that reach elsewhere."""
    # No path here is absolute or leads to a parent, and no system passes a word with \0 to a program.
    line = [re.sub(r"(^|=)[/\\]+", r"\1", re.sub(r"\.{2,}", ".", word.replace("\0", ""))) for word in line]
    saved = []
    for word in line:
        flag, _, value = word.partition("=")
        if len(flag) > 3 and any(name.startswith(flag) for name in NOT_HERE):
            continue
        saved.append(word)
    for at, word in enumerate(saved):
        flag, joined, value = word.partition("=")
        most = [most for name, most in LARGEST.items() if len(flag) > 2 and name.startswith(flag)]
        if joined and most:
            saved[at] = f"{flag}={smaller(value, most[0])}"
        elif most and at + 1 < len(saved):
            saved[at + 1] = smaller(saved[at + 1], most[0])
    return saved


def smaller(word, most):
    """The number of a word, where it is one that would be taken and takes long."""
    try:
        return str(most) if most < int(word) <= 100_000 else word
    except ValueError:
        return word


@pytest.fixture(scope="module")
def source(small, tmp_path_factory):
    """What is in the folder of each example."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(small, source / "model")
    (source / "prompts.txt").write_text("a red circle\na blue square\n")
    save_file({"latents": torch.ones(1, 32, 1, 2)}, source / "latents.safetensors")
    save_file({"x.lora_A.weight": torch.ones(1, 2), "x.lora_B.weight": torch.ones(2, 1)}, source / "lora.safetensors")
    (source / "notes.txt").write_text("of somebody else")
    return source


@pytest.fixture(scope="module")
def raised():
    """What the commands raise, before the command line makes a line of it."""
    raised = []
    with pytest.MonkeyPatch.context() as patch:
        for command in COMMANDS.values():

            def run(arguments, run=command.run):
                try:
                    run(arguments)
                except Exception as error:
                    raised.append(error)
                    raise

            patch.setattr(command, "run", run)
        yield raised


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# The error line of a missing file contains its name.
@example(["decode", "\n", "--checkpoint", "model"])
@example(["inspect", "\x1b[2J"])
# a device that torch does not know
@example(["decode", "latents.safetensors", "--checkpoint", "model", "--device=model"])
@example(["batch", "prompts.txt", "--checkpoint", "model", "--devices", "2" * 2000])
# a name that no disk takes
@example(["decode", "2" * 2000, "--checkpoint", "model"])
# a value that argparse drops
@example(["generate", "--negative-prompt=--", "a red circle", "--checkpoint", "model"])
@given(line=command_lines())
def test_command_lines(survives, source, raised, tmp_path_factory, monkeypatch, capfd, line):
    outside = tmp_path_factory.getbasetemp() / "lines"
    shutil.rmtree(outside, ignore_errors=True)
    folder = outside / "folder"
    # links, which a file that is replaced leaves as they are, and one that is written into does not
    shutil.copytree(source, folder, copy_function=os.link)
    monkeypatch.chdir(folder)
    raised.clear()
    capfd.readouterr()

    def run():
        try:
            return main(line)
        except SystemExit as ended:
            return ended.code

    status = survives(run)
    out, err = capfd.readouterr()
    assert status in (0, 1, 2), status
    assert "Traceback" not in err
    assert [path.name for path in outside.iterdir()] == ["folder"]
    assert (folder / "notes.txt").read_text() == "of somebody else"
    if status == 1:
        (error,) = raised
        said = err.rpartition("\r")[2]
        assert said.strip() and said.count("\n") == 1 and said.endswith("\n"), err
        if is_ours(error):
            check_line(said.strip())
        else:
            # An error with an errno keeps the system's own message.
            named = isinstance(error, OSError) and error.errno
            assert named, "".join(traceback.format_exception(error))


@pytest.fixture(scope="module", autouse=True)
def as_it_was(source):
    """No command has written into a file that was there."""
    before = contents(source)
    yield
    assert contents(source) == before


@pytest.mark.parametrize("line", GOOD, ids=lambda line: "-".join(line[:2]))
def test_the_lines_are_good(source, tmp_path, monkeypatch, capsys, line):
    shutil.copytree(source, tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder")
    assert main(line) == 0, capsys.readouterr().err
