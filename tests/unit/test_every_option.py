"""Every option of every command, in every mode: it changes the output, the files or the work, or it is refused."""

import argparse
import contextlib
import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import layouts
import pytest
import torch
import vibe_models
import video_models
from adapted import save_adapter
from bounded import bounded
from checkpoints import TINY
from clips import save_clip
from diffusers import AutoencoderKL
from pictures import write_pictures
from safetensors.torch import load_file, save_file
from worker_threads import threads_for_processes

import sana_core
import sana_core.cluster.batch
from sana_core.__main__ import COMMANDS, main
from sana_core.commands import decode, generate
from sana_core.engine import local
from sana_core.model import known_models
from sana_core.split import generate as split

pytestmark = pytest.mark.usefixtures("one_thread")
IMAGE = "--checkpoint TINY --width 64 --height 64 --steps 3"
VIDEO = "--checkpoint VIDEO --width 64 --height 64 --steps 3 --devices cpu --frames 5 --out clip.mp4"
EDIT = "--checkpoint VIBE --edit FIRST --steps 3 --devices cpu"
BEST = "--best 1 --of 2 --scorer CLIP"
# For each command, its modes and their arguments. A mode takes another way through the code, or accepts other options.
MODES = {
    "generate": {
        "one image": f"x {IMAGE} --devices cpu",
        "two images": f"x {IMAGE} --devices cpu --count 2",
        "two prompts": f"x y {IMAGE} --devices cpu",
        "several devices": f"x {IMAGE} --devices cpu cpu --count 2",
        "shared images": f"x {IMAGE} --devices cpu cpu --split",
        "the best images": f"x {IMAGE} --devices cpu {BEST}",
        "the best shared images": f"x {IMAGE} --devices cpu cpu --split {BEST}",
        "a cluster": f"x {IMAGE} --cluster auto",
        "the best images of a cluster": f"x {IMAGE} --cluster auto {BEST}",
        "an edit": f"x {EDIT}",
        "a video": f"x {VIDEO}",
        "a video from an image": f"x {VIDEO} --first FIRST",
    },
    "batch": {
        "one device": f"PROMPTS {IMAGE} --devices cpu",
        "several devices": f"PROMPTS {IMAGE} --devices cpu cpu",
        "the best images": f"PROMPTS {IMAGE} --devices cpu {BEST}",
        "a cluster": f"PROMPTS {IMAGE} --cluster auto",
        "a cluster with shared folders": f"PROMPTS {IMAGE} --cluster auto --out-shared",
        "the best images of a cluster": f"PROMPTS {IMAGE} --cluster auto {BEST}",
    },
    "decode": {
        "automatic": "LATENTS --checkpoint TINY",
        "one file": "LATENT --checkpoint TINY --out image.tif",
        "another VAE": "KL_LATENT --vae KL",
        **{method: f"LATENTS --checkpoint TINY --method {method}" for method in decode.METHODS if method != "auto"},
    },
    "train": {"a run": "SETTINGS", "a plan": "SETTINGS --plan", "a plan for a GPU": "SETTINGS --plan --card 8"},
    "convert": {
        "a component": "TINY_VAE out.safetensors",
        "a whole model": "TINY out.safetensors",
        "a training": "TRAINED out.safetensors",
    },
    "inspect": {"a model": "TINY"},
    "doctor": {"the computer": "--seconds 0", "files": "TINY_VAE --seconds 0"},
    "plan": {
        "a recommendation": "",
        "images": "1.6B --batch 4",
        "an edit": "vibe-1.6B",
        "480p": "video-2B-480p",
        "720p": "video-2B-720p",
    },
}
SAMPLING = {
    "checkpoint": "--checkpoint OTHER",
    "out": "--out elsewhere",
    "seed": "--seed 5",
    "count": "--count 3",
    "best": "--best 2",
    "of": "--of 3",
    "scorer": "--scorer OTHER_CLIP",
    "width": "--width 96",
    "height": "--height 96",
    "steps": "--steps 4",
    "guidance": "--guidance 7",
    "sampler": "--sampler flow_dpmpp_1",
    "negative_prompt": "--negative-prompt circle",
    "pag_scale": "--pag-scale 2",
    "pag_blocks": "--pag-blocks 0",
    "guidance_interval": "--guidance-interval 0.4 0.9",
    "lora": "--lora LORA",
    "reference": "--reference nvidia",
    "dtype": "--dtype bfloat16",
    "compile": "--compile",
    "chunk": "--chunk 2",
    "devices": "--devices cpu cpu cpu",
    "cluster": "--cluster 10.0.0.1:6379",
    "gpus": "--gpus 2",
    "gpus_per_worker": "--gpus-per-worker 0.5",
    "resource": "--resource fast=1",
}
# For each command, its options, and a value that differs from the default and from the modes.
OPTIONS = {
    "generate": SAMPLING
    | {"overwrite": "--overwrite", "split": "--split", "frames": "--frames 9", "first": "--first SECOND"}
    | {"motion_score": "--motion-score 20", "edit": "--edit SECOND", "image_guidance": "--image-guidance 2"},
    "batch": SAMPLING | {"out_shared": "--out-shared", "report": "--report"},
    "decode": {
        "checkpoint": "--checkpoint OTHER",
        "vae": "--vae OTHER",
        "out": "--out elsewhere",
        "overwrite": "--overwrite",
        "method": "--method tiles",
        "max_gb": "--max-gb 0.012",
        "device": "--device cuda:7",
        "dtype": "--dtype bfloat16",
        "report": "--report",
    },
    "train": {
        "wandb": "--wandb",
        "tensorboard": "--tensorboard",
        "plan": "--plan",
        "card": "--card 24",
        "cards": "--cards 2",
    },
    "convert": {"dtype": "--dtype float32", "resolution": "--resolution 2048", "ema": "--ema"},
    "inspect": {},
    "doctor": {"seconds": "--seconds nan", "json": "--json report.json"},
    "plan": {
        "width": "--width 544",
        "height": "--height 544",
        "frames": "--frames 41",
        "batch": "--batch 3",
        "prompts": "--prompts 2",
        "pag": "--pag",
        "image_guidance": "--image-guidance 1",
        "dtype": "--dtype float32",
        "vae": "--vae dc-ae-lite-f32c32",
        "gpu": "--gpu 8",
        "json": "--json",
    },
}
# What an option needs beside it to have an effect, unless the mode refuses that.
BESIDE = {
    "pag_blocks": "--pag-scale 2",
    "chunk": "--count 2",
    "devices": "--count 3",
    "split": "--devices cpu cpu",
}
# Modes that join two others, or that take the way of a mode of another command.
SLOW = (
    "two images",
    "two prompts",
    "the best shared images",
    "the best images of a cluster",
    "several devices",
    "a cluster with shared folders",
    "a video from an image",
    "a plan for a GPU",
    "batch: the best images",
    "batch: a cluster",
)
CASES = [
    pytest.param(name, mode, option, marks=[pytest.mark.slow] if {mode, f"{name}: {mode}"} & {*SLOW} else [])
    for name, modes in MODES.items()
    for mode, words in modes.items()
    for option, value in OPTIONS[name].items()
    # A mode that has this value.
    if value not in words
]
# Parts of an output that change from run to run: free memory, times, and the progress at which an image was written.
TIMES = re.compile(r", \d+ free|\(\d+ of \d+,.*\)|\"seconds\": [\d.]+|\"peak_bytes\": \d+|in [\d.]+ s, [\d.]+ a second")


def options(command):
    """The names of the options of a command."""
    parser = argparse.ArgumentParser()
    COMMANDS[command].configure(parser)
    return {action.dest for action in parser._actions if action.option_strings} - {"help"}


def test_every_option_of_every_command_is_in_the_table():
    assert OPTIONS.keys() == MODES.keys() == COMMANDS.keys()
    for name in COMMANDS:
        assert options(name) == OPTIONS[name].keys(), name


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The files of the arguments, by their words."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "prompts.txt").write_text("a red circle\na blue square\na green cross")
    latents = torch.randn(2, 32, 3, 2, generator=torch.Generator().manual_seed(0))
    save_file({"latents": latents}, folder / "latents.safetensors")
    save_file({"latents": latents[:1]}, folder / "latent.safetensors")
    save_file({"latents": latents.new_ones(1, 4, 48, 48)}, folder / "kl.safetensors")
    blocks = {"up_block_types": ("UpDecoderBlock2D",) * 3, "down_block_types": ("DownEncoderBlock2D",) * 3}
    AutoencoderKL(latent_channels=4, block_out_channels=(32, 32, 32), **blocks).save_pretrained(folder / "kl")
    write_pictures(folder / "images", 2)
    for seed in range(2):
        save_clip(folder / f"clip{seed}", seed)
    save_adapter(TINY, folder / "lora.safetensors", much=0.1)
    other = shutil.copytree(TINY, folder / "other")
    for file in (*other.glob("transformer/*.safetensors"), *other.glob("vae/*.safetensors")):
        save_file({name: 0.9 * tensor for name, tensor in load_file(file).items()}, file)
    settings = {"model": str(TINY), "out": "out", "cache": str(folder / "cache"), "dtype": "float32", "device": "cpu"}
    settings |= {"method.rank": 2}
    phase = {"data": str(folder / "images"), "resolution": 32, "steps": 1, "learning_rate": 1e-3}
    tables = [*settings.items(), ("", ""), *phase.items()]
    lines = [f"{key} = {json.dumps(value)}" if key else "[[phase]]" for key, value in tables]
    (folder / "run.toml").write_text("\n".join(lines))
    vibe_models.save_vibe(folder / "vibe")
    first, second = sorted((folder / "images").glob("*.png"))
    return {
        "TINY": TINY,
        "TINY_VAE": TINY / "vae",
        "OTHER": other,
        "VIDEO": video_models.save_folder("480p", folder / "video"),
        "VIBE": folder / "vibe",
        "CLIP": folder / "clip0",
        "OTHER_CLIP": folder / "clip1",
        "LORA": folder / "lora.safetensors",
        "PROMPTS": folder / "prompts.txt",
        "LATENTS": folder / "latents.safetensors",
        "LATENT": folder / "latent.safetensors",
        "KL": folder / "kl",
        "KL_LATENT": folder / "kl.safetensors",
        "FIRST": first,
        "SECOND": second,
        "SETTINGS": folder / "run.toml",
        "TRAINED": trained_file(folder / "trained_1024px.pth"),
    }


def trained_file(file):
    """The .pth of a training, with weights and their moving average."""
    tensors = layouts.nvidia(layouts.transformer())
    average = {name: tensor + 0.5 for name, tensor in tensors.items()}
    torch.save({"state_dict": tensors, "state_dict_ema": average}, file)
    return file


class Outcome(NamedTuple):
    """What a command did."""

    status: int
    out: tuple[str, ...]
    error: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    work: tuple[str, ...]


@pytest.fixture
def work(monkeypatch):
    """What the real functions are called with, which no image shows: devices, chunks, compiled code, a cluster."""
    calls = []
    local_workers, run = local.local_workers, local.Run
    write_video = generate.write_video
    load_on, decode_split = split.load_on, split.decode_split

    def workers(devices, checkpoint):
        calls.append(f"workers on {devices}")
        return local_workers(devices, checkpoint)

    def chunks(job, parts, *options, **named):
        by_device = "" if job["fixed_chunk"] else " at most, if the device has the memory"
        calls.append(f"chunks of {[len(part) for part in parts]}{by_device}")
        return run(job, parts, *options, **named)

    def load(devices, *options):
        calls.append(f"shared by {len(devices)}")
        return load_on(devices, *options)

    def decode_shared(*options):
        calls.append("an image that is shared")
        return decode_split(*options)

    def decoding(decode_file):
        def decode_and_note(*options):
            report = decode_file(*options)
            calls.append(str({name: value for name, value in report.items() if name not in ("seconds", "peak_bytes")}))
            return report

        return decode_and_note

    def write(path, frames, *options):
        # The encoder's threads decide some bits of the file.
        calls.append(f"frames {hashlib.sha256(frames.contiguous().numpy().tobytes()).hexdigest()}")
        return write_video(path, frames, *options)

    def generate_on_cluster(request, where, described, report, shared, on_status):
        # tests/cluster has real clusters. Here this process generates the images of the cluster.
        workload, checkpoint, settings, _ = request
        calls.append(f"{where}, chunk {workload.chunk}, {checkpoint.path}, {settings}, shared {shared is not None}")
        return local.generate_local(request._replace(devices=[torch.device("cpu")]), report=report)

    def compiled(function, **named):
        calls.append("compiled")
        return function

    monkeypatch.setattr(local, "local_workers", workers)
    monkeypatch.setattr(local, "Run", chunks)
    monkeypatch.setattr(split, "load_on", load)
    monkeypatch.setattr(split, "decode_split", decode_shared)
    for name in ("decode_to_file", "decode_normed_to_file"):
        monkeypatch.setattr(decode, name, decoding(getattr(decode, name)))
    monkeypatch.setattr(generate, "write_video", write)
    monkeypatch.setattr(sana_core.cluster.batch, "generate_on_cluster", generate_on_cluster)
    monkeypatch.setattr(torch, "compile", compiled)
    # VIBE edits small images at 512 pixels a side.
    monkeypatch.setattr(known_models, "EDIT_AREAS", ((10**6, 128),))
    # test_engine.py has the processes.
    with threads_for_processes():
        yield calls


@pytest.fixture
def run(inputs, work, tmp_path, monkeypatch):
    """A function that runs a command in a new folder, or in one where the same command has run."""

    def run(folder, command, words):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        work.clear()
        out, error = io.StringIO(), io.StringIO()
        with bounded(60, 6 * 10**9), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                status = main([command, *(str(inputs.get(word, word)) for word in words.split())])
            except SystemExit as ended:
                status = ended.code
        lines = [line.strip() for line in re.split(r"[\r\n]", error.getvalue())]
        errors = [
            line
            for line in lines
            if line and not re.match(r"checking |estimating |\d+ of \d+ |text: |images: |step ", line)
        ]
        paths = sorted(path for path in Path().rglob("*") if path.is_file())
        # Files with times in them, and videos, count by their names.
        files = [(str(path), "" if path.suffix in (".jsonl", ".mp4", "") else digest(path)) for path in paths]
        return Outcome(
            status,
            tuple(sorted(TIMES.sub("", out.getvalue()).splitlines())),
            tuple(errors),
            tuple(files),
            tuple(sorted(work)),
        )

    return run


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


BASES: dict[tuple[str, str], Outcome] = {}


def base(run, command, words):
    """The outcome without the option. Twice, because an outcome that changes by itself would show nothing."""
    if (command, words) not in BASES:
        first, second = run("base", command, words), run("base again", command, words)
        assert first == second
        BASES[command, words] = first
    return BASES[command, words]


@pytest.mark.parametrize("command, mode, option", CASES)
def test_an_option_changes_something_or_is_refused(run, command, mode, option):
    words, value = MODES[command][mode], OPTIONS[command][option]
    plain = base(run, command, words)
    assert plain.status == 0, plain
    if option in BESIDE and BESIDE[option] not in words:
        beside = base(run, command, f"{words} {BESIDE[option]}")
        if beside.status == 0:
            words, plain = f"{words} {BESIDE[option]}", beside
    folder = "with it"
    if option == "overwrite":
        # It matters where the images exist.
        run(folder, command, words)
        plain = run(folder, command, words)
        assert plain.status == 1
    got = run(folder, command, f"{words} {value}")
    assert got != plain, got
    assert got.status == 0 or got.status == 2 or len(got.error) == 1, got


def said(capsys, *words):
    """The output and the error of a command."""
    with contextlib.suppress(SystemExit):
        main([str(word) for word in words])
    out = capsys.readouterr()
    return out.out, out.err.strip().splitlines()[-1] if out.err.strip() else ""


@pytest.mark.parametrize("words", [["b"], ["--devices", "cpu", "cpu"]])
def test_a_video_refuses_a_second_prompt_and_a_second_device(capsys, tmp_path, words):
    _, error = said(capsys, "generate", "a", *words, "--checkpoint", tmp_path, "--out", "clip.mp4", "--frames", 9)
    assert "it is for images, expected one video of one prompt" in error
