"""No option of a command is accepted in a mode in which it changes nothing."""

import argparse
from contextlib import suppress

import pytest

from sana_core.__main__ import COMMANDS, main


def options(command):
    """The names of the options of a command."""
    parser = argparse.ArgumentParser()
    COMMANDS[command].configure(parser)
    return {action.dest for action in parser._actions if action.option_strings} - {"help"}


def said(capsys, *words):
    """The output and the error of a command."""
    with suppress(SystemExit):
        main([str(word) for word in words])
    out = capsys.readouterr()
    return out.out, out.err.strip().splitlines()[-1] if out.err.strip() else ""


PLAN = {
    "width": 512,
    "height": 512,
    "frames": 41,
    "batch": 3,
    "prompts": 2,
    "pag": None,
    "dtype": "float32",
    "vae": "dc-ae-lite-f32c32",
    "gpu": 8,
    "json": None,
}
MODES = {
    "images": ["1.6B", "--batch", 4],
    "480p": ["video-2B-480p"],
    "720p": ["video-2B-720p"],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", PLAN)
def test_each_option_of_plan_changes_the_figures_or_is_refused(capsys, mode, option):
    assert options("plan") == PLAN.keys()
    words = ["plan", *MODES[mode]]
    plain = said(capsys, *words)
    assert plain[0], plain
    value = [] if PLAN[option] is None else [PLAN[option]]
    size = {"width": 544, "height": 544}.get(option)
    value = value if size is None or mode == "images" else [size]
    got = said(capsys, *words, f"--{option}", *value)
    refused = got[1].startswith(f"{option}: ")
    assert (refused and not got[0]) or got[0] not in ("", plain[0]), got


# how `generate --frames` takes each option: it is read, or the run refuses it by name
READ = {"out", "overwrite", "checkpoint", "seed", "frames", "first", "width", "height", "steps", "guidance", "sampler"}
READ |= {"negative_prompt", "motion_score", "reference", "dtype", "devices"}
REFUSED = {
    "split": [],
    "count": ["2"],
    "best": ["1"],
    "of": ["2"],
    "scorer": ["folder"],
    "pag_scale": ["2"],
    "pag_blocks": ["1"],
    "guidance_interval": ["0.1", "0.9"],
    "lora": ["a.safetensors"],
    "compile": [],
    "chunk": ["2"],
    "cluster": ["auto"],
    "gpus": ["1"],
    "gpus_per_worker": ["0.5"],
    "resource": ["a=1"],
    "edit": ["photo.png"],
    "image_guidance": ["2"],
}


@pytest.mark.parametrize("option", REFUSED)
def test_a_video_refuses_each_option_that_it_does_not_read(capsys, tmp_path, option):
    assert options("generate") == READ | REFUSED.keys()
    words = ["generate", "a wave", "--checkpoint", tmp_path, "--out", tmp_path / "clip.mp4", "--frames", 9]
    _, error = said(capsys, *words, f"--{option.replace('_', '-')}", *REFUSED[option])
    assert error.startswith(f"{option}: it is for images, expected one video of one prompt"), error


@pytest.mark.parametrize("words", [["b"], ["--devices", "cpu", "cpu"]])
def test_a_video_refuses_a_second_prompt_and_a_second_device(capsys, tmp_path, words):
    _, error = said(capsys, "generate", "a", *words, "--checkpoint", tmp_path, "--out", "clip.mp4", "--frames", 9)
    assert "it is for images, expected one video of one prompt" in error


@pytest.mark.parametrize(
    "command, words, message",
    [
        ("decode", ["--method", "whole", "--max-gb", "1"], "max-gb: got it with method whole"),
        ("decode", ["--method", "tiles", "--max-gb", "1"], "max-gb: got it with method tiles"),
        ("train", ["--plan", "--wandb"], "wandb: got it with plan"),
        ("train", ["--card", "8", "--tensorboard"], "tensorboard: got it with plan"),
        ("train", ["--cards", "2"], "cards: it is for a plan"),
        ("generate", ["--gpus", "2"], "gpus: it is only for a cluster"),
        ("generate", ["--resource", "a"], "resource: it is only for a cluster"),
        ("generate", ["--best", "1"], "best: got only a part of best, of and scorer"),
        ("generate", ["--pag-blocks", "1"], "pag_blocks: got blocks without a pag_scale"),
        ("generate", ["--split", "--devices", "cpu", "cpu", "--chunk", "2"], "chunk: got 2 with split"),
        ("generate", ["--split", "--devices", "cpu", "cpu", "--compile"], "compiled: got true with split"),
        ("batch", ["--out-shared"], "out-shared: it is for machines of a cluster"),
        ("batch", ["--pag-blocks", "1"], "pag_blocks: got blocks without a pag_scale"),
    ],
)
def test_options_of_another_mode_are_refused(capsys, checkpoint, tmp_path, command, words, message):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle")
    first = {"decode": "latents.safetensors", "train": "run.toml", "generate": "a red circle", "batch": prompts}
    out = [] if command == "train" else ["--checkpoint", checkpoint, "--out", tmp_path / "out"]
    _, error = said(capsys, command, first[command], *out, *words)
    assert error.startswith(message), error
