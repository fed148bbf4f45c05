"""Paths without a file, and other things in place of a file. See docs/developer/robustness.md."""

import os
import socket

import pytest
from hostile import TENSORS, refused

import sana_core
from sana_core import CheckpointError, MissingFileError, ReadError, SanaError
from sana_core.checkpoints.generation import shift_of

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 3209\n"
PLACES = [
    "transformer/diffusion_pytorch_model.safetensors",
    "transformer/config.json",
    "vae/config.json",
    "text_encoder/model.safetensors",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
]


def use_all(path):
    info = sana_core.inspect_checkpoint(path)
    shift_of(info)
    for _, load in TENSORS.values():
        load(path)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_what_is_not_a_file_is_not_opened(copy, place, kind, monkeypatch):
    file = copy / place
    file.unlink()
    monkeypatch.chdir(file.parent)  # a socket's path may only be short
    with socket.socket(socket.AF_UNIX) as end:
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "device":
            file.symlink_to("/dev/zero")
        elif kind == "socket":
            end.bind(file.name)
        else:
            file.mkdir()
        pattern = f"^{place}: got a folder, pipe or device, expected a regular file; put the file there instead$"
        refused(copy, pattern, load=use_all)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_pipe_as_the_model_is_not_opened(tmp_path, suffix):
    os.mkfifo(tmp_path / f"sana{suffix}")
    refused(tmp_path / f"sana{suffix}", "got a folder, pipe or device, expected a regular file")


@pytest.mark.parametrize("place", PLACES[:2])
def test_links_to_nowhere_and_to_themselves_are_named(copy, place):
    file = copy / place
    for target, kind in (("nowhere", MissingFileError), (file.name, ReadError)):
        file.unlink()
        file.symlink_to(target)
        if file.name == "config.json":
            refused(copy, "no config.json in model/transformer", MissingFileError)
            refused(file.with_name("diffusion_pytorch_model.safetensors"), f"^{place}: ", kind)
        else:
            refused(copy, f"^{place}: ", kind)


def test_links_to_files_elsewhere_load(copy, tmp_path):
    for part, (name, load) in TENSORS.items():
        (copy / name).rename(tmp_path / f"{part}.blob")
        (copy / name).symlink_to(tmp_path / f"{part}.blob")
        load(copy)


@pytest.mark.parametrize("place", [*PLACES, "sana.pth", "sana.sft"])
def test_a_git_lfs_pointer_says_git_lfs_pull(copy, place):
    (copy / place).write_bytes(POINTER)
    path = copy if (copy / place).parent != copy else copy / place
    pattern = f"{place}: got a git-lfs pointer instead of the model; run git lfs pull in its folder, "
    refused(path, pattern, load=use_all)


@pytest.mark.parametrize("content", [b"<!DOCTYPE html><html>", b"\n <html lang='en'>", b"<?xml version='1.0'?>"])
@pytest.mark.parametrize("name", ["sana.safetensors", "sana.pth"])
def test_a_web_page_says_so(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refused(
        tmp_path / name, f"/{name}: got a web page, not the file; download it again by its download link, logged in"
    )


def test_every_error_here_is_of_the_family():
    assert issubclass(CheckpointError, SanaError) and issubclass(CheckpointError, ValueError)
