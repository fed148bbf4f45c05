"""`python -m sana_core`, as an operator runs it."""

import builtins
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import layouts
import numpy as np
import pytest
import torch
from forked import command as fork
from PIL import Image
from safetensors.torch import load_file, save_file
from setup import ROOT

from sana_core import decode_latents, generate, inspect_checkpoint, load_autoencoder, load_transformer
from sana_core.__main__ import COMMANDS, main
from sana_core.runtime.image_files import regroup

CHECKPOINT = str(ROOT / "tests" / "models" / "sana-tiny")


class Done(NamedTuple):
    """The exit status of a command and its output."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """A function that runs a command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
        return Done(code, *capsys.readouterr())

    return run


def run_alone(*arguments, **options):
    """Run the command as a shell does, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    words = [sys.executable, "-m", "sana_core", *map(str, arguments)]
    # a shell that has put the tests into the background ignores Ctrl+C for them
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_it_runs_outside_the_projects_folder(tmp_path, checkpoint):
    process = run_alone("inspect", checkpoint, cwd=tmp_path)
    _, err = process.communicate()
    assert process.returncode == 0 and err == b"", err


def test_generate_says_once_what_of_a_long_prompt_was_cut(command, checkpoint, caplog):
    size = ["--width", "64", "--height", "64", "--steps", "1", "--count", "2"]
    finished = command("generate", "red " * 10_000, "", "--checkpoint", checkpoint, *size)
    assert finished.returncode == 0 and len(finished.stdout.splitlines()) == 4
    said = [record.getMessage() for record in caplog.records if "tokens" in record.getMessage()]
    begins = repr(("red " * 10)[:40])
    assert said == [f"text: 9701 of 10001 tokens were cut: SANA reads 300 (the prompt that begins {begins})"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(command, name):
    completed = command(name, "--help")
    assert completed.returncode == 0
    assert f"example:\n  python -m sana_core {name}" in completed.stdout


def test_generate_writes_the_picture_that_the_call_returns(command, checkpoint, tmp_path):
    prompt = "a red circle on a blue background"
    size = ["--width", 128, "--height", 96]
    completed = command(
        "generate", prompt, "--checkpoint", checkpoint, "--seed", 5, "--steps", 3, *size, "--out", "out"
    )
    assert completed.returncode == 0, completed.stderr
    path = tmp_path / completed.stdout.strip()
    expected = generate([prompt], checkpoint, seed=5, steps=3, width=128, height=96)[0]
    pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)
    assert (pixels - (expected + 1) * 127.5).abs().max() <= 0.51


def test_generate_overwrites_only_what_it_may(command, checkpoint, tmp_path):
    options = ["--checkpoint", checkpoint, "--seed", 2**64 - 1, "--count", 2, "--steps", 1]
    options += ["--width", 32, "--height", 32, "--out", "out"]
    file = tmp_path / "out" / "00000_0.png"
    file.parent.mkdir()
    file.write_bytes(b"mine")
    completed = command("generate", "a red circle", *options)
    assert completed.returncode == 1 and completed.stdout == "" and file.read_bytes() == b"mine"
    assert completed.stderr == "out: out/00000_0.png exists; choose another folder, or allow it with --overwrite\n"
    completed = command("generate", "a red circle", *options, "--overwrite")
    assert completed.stdout == "out/00000_18446744073709551615.png\nout/00000_0.png\n", completed.stderr
    assert Image.open(file).size == (32, 32) and len(list(file.parent.iterdir())) == 2


TINY = ["--steps", 1, "--width", 32, "--height", 32, "--out", "out"]


@pytest.mark.slow
def test_a_console_of_few_characters_stops_nothing(checkpoint, tmp_path):
    (tmp_path / "prompts.txt").write_text("\u7ea2\u8272 \U0001f534\na red circle", encoding="utf-8")
    options = ["prompts.txt", "--checkpoint", checkpoint, *TINY[:-1], "out \u7ea2"]
    for _ in range(2):
        process = run_alone("batch", *options, cwd=tmp_path, env={"PYTHONIOENCODING": "cp1252"})
        out, err = process.communicate()
        assert process.returncode == 0, err
    assert out == b"2 of 2 images exist\n"
    assert len(list((tmp_path / "out \u7ea2").glob("*.png"))) == 2


@pytest.mark.slow
def test_a_reader_that_goes_ends_the_batch_quietly_and_the_next_goes_on(checkpoint, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red circle")
    options = ["prompts.txt", "--checkpoint", checkpoint, *TINY, "--count", 300]
    process = run_alone("batch", *options, cwd=tmp_path)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 128 + 13 and process.stderr.read() == b""
    listed = json.loads((tmp_path / "out" / "manifest.json").read_bytes())["images"]
    assert 1 < len(listed) < 300 and len(list((tmp_path / "out").iterdir())) == len(listed) + 1
    closed = ["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, "-m", "sana_core", "batch", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    completed = subprocess.run([str(word) for word in closed], cwd=tmp_path, env=environment, capture_output=True)
    assert completed.returncode == 0 and completed.stderr == b"", completed.stderr
    assert len(list((tmp_path / "out").glob("*.png"))) == 300


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_batch_tidily(checkpoint, tmp_path, number, status):
    (tmp_path / "prompts.txt").write_text("a red circle")
    process = fork("batch", "prompts.txt", "--checkpoint", checkpoint, *TINY, "--count", 1000, cwd=tmp_path)
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == status, err
    assert err == ("\nstopped; all files that were listed are complete\n" if number == signal.SIGINT else "")
    listed = json.loads((tmp_path / "out" / "manifest.json").read_bytes())["images"]
    assert 3 <= len(listed) < 1000 and len(list((tmp_path / "out").iterdir())) == len(listed) + 1


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_a_decode_leaves_no_part_of_a_file(checkpoint, tmp_path, number, status):
    save_file({"latents": torch.randn(1, 32, 64, 64)}, tmp_path / "large.safetensors")
    options = ["--checkpoint", checkpoint, "--out", "out", "--method", "strips", "--max-gb", 0.3]
    process = fork("decode", "large.safetensors", *options, cwd=tmp_path)
    while not list(tmp_path.glob("out/.*.part")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == status and "Traceback" not in err, err
    assert not list((tmp_path / "out").iterdir())


def test_inspect_says_what_each_thing_is(command, checkpoint, tmp_path):
    flux = layouts.save({"double_blocks.0.img_attn.qkv.weight": torch.zeros(2)}, tmp_path / "flux.safetensors")
    completed = command("inspect", checkpoint, flux)
    assert completed.stderr == ""
    message = "128 px (config), diffusers layout, reference diffusers, bfloat16"
    assert completed.stdout.splitlines() == [
        f"{checkpoint}: a SANA pipeline (custom-160x5), {message}, 0.008 GB",
        f"  a SANA transformer (custom-160x5), {message}, 0.005 GB",
        "  a DC-AE (dc-ae-f32c32), diffusers layout, bfloat16, 0.003 GB",
        "  a Gemma 2 text encoder (gemma-2-custom-64), transformers layout, bfloat16, 0.000 GB",
        "  prompts: read in lower case, and marks like --ar 16:9 are read as text, as in diffusers",
        f"{flux}: tensors named double_blocks.0.img_attn.qkv.weight, float32, 0.000 GB",
    ]


def test_a_converted_folder_is_one_file_that_draws_the_same(command, checkpoint, tmp_path):
    completed = command("convert", checkpoint, "all.safetensors")
    assert completed.returncode == 0, completed.stderr
    prompt = ["a red circle on a blue background"]
    pictures = [
        generate(prompt, path, steps=3, width=128, height=128) for path in (checkpoint, tmp_path / "all.safetensors")
    ]
    assert torch.equal(*pictures)
    again = command("convert", checkpoint, "all.safetensors")
    assert again.returncode == 1 and "all.safetensors exists; choose another name" in again.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["all.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_convert_gives_diffusers_names_from_nvidias(command, tmp_path, dtype):
    model = layouts.transformer()
    torch.save({"state_dict": layouts.nvidia(model)}, tmp_path / "sana.pth")
    completed = command("convert", "sana.pth", "sana.safetensors", "--dtype", dtype, "--resolution", 2048)
    assert completed.stdout.splitlines() == [
        "sana.safetensors: a SANA transformer (custom-1152x1), 35 tensors",
        # Without the folder of the test.
        "/sana.pth: not read: y_embedder.y_embedding",
    ], completed.stderr
    info = inspect_checkpoint(tmp_path / "sana.safetensors")
    assert (info.layout, info.resolution, info.dtype) == ("diffusers", 2048, getattr(torch, dtype))
    converted = load_transformer(tmp_path / "sana.safetensors").state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(converted[key], value.to(getattr(torch, dtype)).float())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["sana.pth", "out.pth"], "target: got out.pth, expected a name that ends with .safetensors or .sft"),
        (
            ["sana.pth", "out.safetensors", "--resolution", 999],
            "resolution: got 999, expected one of 512, 1024, 2048, 4096",
        ),
        (
            [ROOT / "tests/models/sana-tiny/vae", "out.safetensors", "--resolution", 2048],
            "resolution: got 2048 for a DC-AE (dc-ae-f32c32), expected a transformer or a ControlNet; leave it out",
        ),
        (["gone", "out.safetensors"], "gone: no such file or folder, expected a model; check its spelling"),
        (["other.safetensors", "out.safetensors"], "other.safetensors: got tensors named a, expected a SANA model"),
    ],
)
def test_convert_refuses_and_leaves_nothing_behind(command, tmp_path, arguments, message):
    layouts.save({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    completed = command("convert", *arguments)
    assert completed.returncode == 1 and message in completed.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["other.safetensors"]


def test_decode_writes_row_by_row_what_the_call_returns(command, checkpoint, tmp_path):
    latents = torch.randn(2, 32, 5, 4, generator=torch.Generator().manual_seed(0))
    save_file({"latents": latents}, tmp_path / "two.safetensors")
    completed = command("decode", "two.safetensors", "--checkpoint", checkpoint, "--out", "out", "--report")
    assert completed.returncode == 0, completed.stderr
    expected = decode_latents(load_autoencoder(checkpoint), latents).clamp(-1, 1)
    lines = completed.stdout.splitlines()
    for picture, path in zip(expected, lines[::2], strict=True):
        image = Image.open(tmp_path / path)
        image.verify()
        pixels = torch.from_numpy(np.array(Image.open(tmp_path / path))).permute(2, 0, 1)
        assert (pixels - (picture + 1) * 127.5).abs().max() <= 0.52
    assert json.loads(lines[1])["method"] == "strips"
    assert "160 of 160 rows" in completed.stderr
    assert not list(tmp_path.glob("out/*.part"))


@pytest.mark.parametrize("name", ["one.tif", "one.TIFF", "one.png"])
def test_decode_writes_one_file_of_the_kind_that_its_name_says(command, checkpoint, tmp_path, name):
    latents = torch.randn(1, 32, 5, 4, generator=torch.Generator().manual_seed(0))
    save_file({"latents": latents}, tmp_path / "one.safetensors")
    completed = command("decode", "one.safetensors", "--checkpoint", checkpoint, "--out", name)
    assert completed.returncode == 0, completed.stderr
    with Image.open(tmp_path / name) as image:
        assert image.format == ("PNG" if name.endswith("png") else "TIFF") and image.size == (128, 160)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    expected = decode_latents(load_autoencoder(checkpoint), latents).clamp(-1, 1)
    assert (pixels - (expected[0] + 1) * 127.5).abs().max() <= 0.52


def test_rows_of_any_number_are_regrouped_into_strips():
    rows = np.arange(150 * 6, dtype=np.uint8).reshape(150, 2, 3)
    for cuts in ([], [1], [64], [63, 65], [10, 128], [128], [149], list(range(1, 150))):
        strips = list(regroup(iter(np.split(rows, cuts)), 64))
        assert [len(strip) for strip in strips] == [64, 64, 22]
        assert np.array_equal(np.concatenate(strips), rows)


def test_a_decode_that_fails_leaves_no_file(command, checkpoint, tmp_path):
    latents = torch.zeros(1, 32, 5, 4)
    latents[0, 0, 0, 0] = float("nan")
    save_file({"latents": latents}, tmp_path / "one.safetensors")
    completed = command("decode", "one.safetensors", "--checkpoint", checkpoint, "--out", "out")
    assert completed.returncode == 1 and "1 of 640 values are NaN" in completed.stderr
    assert not list((tmp_path / "out").iterdir())


def test_decode_overwrites_only_what_it_may(command, checkpoint, tmp_path):
    save_file({"latents": torch.zeros(1, 32, 2, 2)}, tmp_path / "one.safetensors")
    for name in ("one.png", "one.png.part"):
        (tmp_path / name).write_bytes(b"mine")
    options = ["one.safetensors", "--checkpoint", checkpoint, "--out", "one.png"]
    completed = command("decode", *options)
    assert completed.returncode == 1 and "out: one.png exists; choose another folder, or allow it" in completed.stderr
    assert (tmp_path / "one.png").read_bytes() == b"mine"
    assert command("decode", *options, "--overwrite").returncode == 0
    assert Image.open(tmp_path / "one.png").size == (64, 64)
    assert (tmp_path / "one.png.part").read_bytes() == b"mine"


def test_decode_names_a_file_without_latents(command, checkpoint, tmp_path):
    save_file({"other": torch.zeros(1)}, tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    messages = {"none": "contains other, expected a tensor 'latents'", "text": "is not a safetensors file"}
    for name, message in messages.items():
        process = command("decode", f"{name}.safetensors", "--checkpoint", checkpoint)
        assert process.returncode == 1 and message in process.stderr.splitlines()[-1]


@pytest.mark.parametrize("shape, dtype", [((0, 32, 2, 2), torch.float32), ((1, 32, 2, 2), torch.complex64)])
def test_decode_refuses_latents_without_numbers_of_an_image(command, checkpoint, tmp_path, shape, dtype):
    save_file({"latents": torch.zeros(shape, dtype=dtype)}, tmp_path / "latents.safetensors")
    process = command("decode", "latents.safetensors", "--checkpoint", checkpoint)
    assert process.returncode == 1 and len(process.stderr.splitlines()) == 1, process.stderr
    assert f"{list(shape)}, expected " in process.stderr and process.stderr.startswith("latents: ")


def test_convert_applies_the_scales_of_quantised_weights(command, tmp_path):
    tensors, layer = dict(layouts.transformer().state_dict()), "transformer_blocks.0.attn1.to_q"
    scale = tensors[f"{layer}.weight"].abs().max().float() / 448
    quantised = (tensors[f"{layer}.weight"].float() / scale).to(torch.float8_e4m3fn)
    tensors |= {f"{layer}.weight": quantised, f"{layer}.weight_scale": scale}
    layouts.save(tensors, tmp_path / "fp8.safetensors")
    completed = command("convert", "fp8.safetensors", "out.safetensors")
    assert completed.returncode == 0, completed.stderr
    written = load_file(tmp_path / "out.safetensors")
    assert torch.equal(written[f"{layer}.weight"], (quantised.float() * scale).bfloat16())
    assert f"{layer}.weight_scale" not in written
    save_file({**tensors, f"{layer}.weight": tensors[f"{layer}.weight"].to(torch.int8)}, tmp_path / "int8.safetensors")
    completed = command("convert", "int8.safetensors", "none.safetensors")
    assert (
        completed.returncode == 1 and "does not say in which format its int8 and weight_scale are" in completed.stderr
    )
    assert not (tmp_path / "none.safetensors").exists()


OURS = re.compile(r"(digest of the model|encoding images and captions|step \d+|the best is of step|image \d+)\b.*|")
SETTINGS = """model = "{model}"
out = "run"
[[phase]]
data = "{data}"
resolution = 64
batch = 2
steps = 2
[validation]
every = 2
share = 0.1
prompts = ["a red circle"]
[optimizer]
name = "{optimizer}"
"""


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["plan"], marks=pytest.mark.slow),
        ["plan", "1.6B", "--gpu", "8"],
        [
            "generate",
            "a red circle",
            "--checkpoint",
            CHECKPOINT,
            "--width",
            "128",
            "--height",
            "128",
            "--out",
            "images",
        ],
        *(pytest.param(["train", f"{name}.toml"], marks=pytest.mark.slow) for name in ("adamw", "adamw8bit")),
    ],
    ids=" ".join,
)
def test_the_console_has_no_line_of_a_library(tmp_path, arguments):
    for optimizer in ("adamw", "adamw8bit"):
        settings = SETTINGS.format(model=CHECKPOINT, data=ROOT / "recipes" / "cyanotypes", optimizer=optimizer)
        (tmp_path / f"{optimizer}.toml").write_text(settings)
    process = run_alone(*arguments, cwd=tmp_path)
    _, written = process.communicate()
    assert process.returncode == 0, written
    # Progress is written over the line before it.
    assert not [line for line in re.split(r"[\r\n]+", written.decode()) if not OURS.fullmatch(line.strip())]


@pytest.mark.slow
def test_without_docstrings_there_is_help_and_a_reason(tmp_path, checkpoint):
    """What -OO leaves of transformers cannot be imported."""
    python = [sys.executable, "-OO", "-m", "sana_core"]
    for arguments, code, expected in (
        (["--help"], 0, "generate"),
        (
            ["generate", "x", "--checkpoint", checkpoint, "--width", 128, "--height", 128, "--out", tmp_path],
            1,
            "use -O\n",
        ),
    ):
        process = subprocess.run([*python, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
        assert process.returncode == code and expected in process.stdout + process.stderr
        assert process.stderr.count("\n") == code


@pytest.fixture
def closed(monkeypatch):
    """A function of a file's name: from then on it may not be opened. Root, who runs some tests, may open all."""

    def close(name):
        opened = open

        def refuse(file, *arguments, **options):
            if str(file).endswith(name):
                raise PermissionError(errno.EACCES, "Permission denied", str(file))
            return opened(file, *arguments, **options)

        # Path's own is another function in Python 3.10
        for owner in (builtins, io, Path):
            monkeypatch.setattr(owner, "open", refuse)

    return close


RIGHTS, PERMISSIONS = "see its rights, its links and its disk\n", "check its permissions\n"


@pytest.mark.parametrize(
    "words, name, remedy",
    [
        (["inspect"], "a.safetensors", RIGHTS),
        (["inspect"], "a.pth", RIGHTS),
        (["decode", "--checkpoint", CHECKPOINT], "x.safetensors", PERMISSIONS),
        (["batch", "--checkpoint", CHECKPOINT], "x.txt", PERMISSIONS),
        (["train"], "x.txt", PERMISSIONS),
    ],
)
def test_a_file_that_may_not_be_read_is_not_called_missing(command, closed, tmp_path, words, name, remedy):
    (tmp_path / name).write_bytes(b"anything")
    closed(name)
    completed = command(*words, tmp_path / name)
    assert completed.returncode == 1
    assert completed.stderr.endswith(f"/{name} cannot be read (Permission denied); {remedy}") or (
        completed.stderr.endswith(f"/{name}: cannot be read (Permission denied); {remedy}")
    )


def test_decode_takes_the_vae_alone_and_its_file(command, checkpoint, tmp_path):
    """What its help promises: a file or a folder, of the VAE or with it."""
    save_file({"latents": torch.zeros(1, 32, 2, 2)}, tmp_path / "latents.safetensors")
    vae = checkpoint / "vae"
    for number, path in enumerate((checkpoint, vae, next(vae.glob("*.safetensors")))):
        finished = command("decode", "latents.safetensors", "--checkpoint", path, "--out", f"out{number}")
        assert finished.returncode == 0, finished.stderr
