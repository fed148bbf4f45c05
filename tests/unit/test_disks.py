"""Real disks that are full or read-only: small ones in memory, mounted where only the test's own process sees them."""

import contextlib
import ctypes
import io
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from forked import Forked
from setup import ROOT

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
PAGE = 4096
# Flags of linux/sched.h and sys/mount.h.
CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000


def unshare():
    """Become the root of a world of one's own, with its own mounts, as the command does. Raises OSError."""
    user, group, libc = os.getuid(), os.getgid(), ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)


@pytest.fixture
def apart(tmp_path):
    """A function that calls another in a process that may mount, in an empty folder.

    Skips where this machine lets nobody mount, as some distributions and all but Linux do.
    """

    def try_it():
        unshare()
        mount("tried", "size=4k")

    def call(function):
        def work():
            unshare()
            function()

        if Forked(try_it, tmp_path).poll(0):
            pytest.skip("no mounts of one's own here")
        (tmp_path / "tried").rmdir()
        process = Forked(work, tmp_path)
        said = process.communicate()
        assert process.returncode == 0, said[0][-500:] + said[1][-2000:]

    return call


def mount(path, options):
    Path(path).mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)


def command(*words):
    """Run the command. Returns its status and its stderr."""
    from sana_core.__main__ import main

    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        status = main([str(word) for word in words])
    return status, said.getvalue()


def batch(out):
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    size = ["--width", 32, "--height", 32, "--steps", 1]
    return command("batch", "prompts.txt", "--checkpoint", CHECKPOINT, "--out", out, "--count", 1, "--chunk", 1, *size)


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def leave_pages(folder, count):
    """Fill the disk with one file, and leave `count` pages free."""
    with (folder / "ballast").open("wb", buffering=0) as stream:
        with contextlib.suppress(OSError):
            while stream.write(bytes(PAGE)) == PAGE:
                pass
        stream.truncate(max(0, stream.tell() // PAGE - count) * PAGE)


def leave_files(folder, count):
    """Fill the disk with names, and leave room for `count` files."""
    (folder / "ballast").mkdir()
    created = []
    with contextlib.suppress(OSError):
        while True:
            created.append(folder / "ballast" / f"{len(created)}")
            created[-1].touch()
    for path in created[-1 - count : -1]:
        path.unlink()


def draw_on_disks_of_all_sizes():
    batch("whole")
    complete = {name: data for name, data in content("whole").items() if name.endswith(".png")}
    assert len(complete) == 2
    mount("out", "size=400k,nr_inodes=60")
    out, drawn = Path("out"), set()
    for fill, room in [*((leave_pages, pages) for pages in range(8)), *((leave_files, files) for files in range(9))]:
        fill(out, room)
        status, said = batch("out")
        remaining = {name: data for name, data in content(out).items() if not name.startswith("ballast")}
        pictures = {name: data for name, data in remaining.items() if name.endswith(".png")}
        assert pictures.items() <= complete.items(), (room, "a picture that is not whole")
        assert remaining.keys() <= {*complete, "manifest.json"}, (room, remaining.keys())
        assert status == (len(pictures) < len(complete)) or "No space left" in said, (room, said)
        if status:
            assert len(said.splitlines()) == 1 and "No space left on device" in said and "out" in said, (room, said)
        drawn.add((fill, len(pictures)))
        shutil.rmtree(out / "ballast") if fill is leave_files else (out / "ballast").unlink()
        assert batch("out") == (0, ""), room
        assert content(out).items() >= complete.items()
        for path in out.iterdir():
            path.unlink()
    # The disks range from one without any room to one with room for everything.
    assert drawn == {(fill, count) for fill in (leave_pages, leave_files) for count in range(3)}, drawn


def test_a_batch_on_a_full_disk_keeps_what_is_whole_and_goes_on_later(apart):
    apart(draw_on_disks_of_all_sizes)


FULL = re.compile(
    r"(out|target): out/[^. ]+\.(png|tif|mp4|safetensors) cannot be written \(No space left on device\); "
    r"check its folder, permissions and disk$"
)


def write_latents():
    import torch
    from safetensors.torch import save_file

    save_file({"latents": torch.zeros(1, 32, 4, 4)}, "latents.safetensors")


COMMANDS = {
    "generate": ["generate", PROMPTS[0], "--checkpoint", CHECKPOINT, "--out", "out", "--width", 128, "--height", 128],
    "decode": ["decode", "latents.safetensors", "--checkpoint", CHECKPOINT, "--out", "out"],
    "decode into a TIFF": ["decode", "latents.safetensors", "--checkpoint", CHECKPOINT, "--out", "out/picture.tif"],
    "convert": ["convert", CHECKPOINT / "transformer", "out/converted.safetensors"],
}
COMMANDS["generate"] += ["--steps", 1, "--seed", 7]


def write_on_a_full_disk():
    write_latents()
    mount("out", "size=400k")
    leave_pages(Path("out"), 0)
    for name, words in COMMANDS.items():
        status, said = command(*words)
        # A decode shows its progress first, on a line of its own.
        *progress, line = said.splitlines()
        assert status == 1 and FULL.match(line), (name, said)
        assert all(re.fullmatch(r"|[0-9]+ of [0-9]+ rows", text) for text in progress), (name, said)
        assert [path.name for path in Path("out").iterdir()] == ["ballast"], name


def write_videos_on_disks_of_all_sizes():
    import torch

    from sana_core.errors import OutputError
    from sana_core.video.generate import write_video

    mount("out", "size=800k")
    video = torch.rand(3, 17, 128, 192) * 2 - 1
    written = []
    for pages in (0, 1, 10, 40, 190):
        leave_pages(Path("out"), pages)
        try:
            write_video(Path("out/clip.mp4"), video)
            written.append(pages)
        except OutputError as error:
            assert FULL.match(str(error)), error
        assert {path.name for path in Path("out").iterdir()} == {"ballast", *(["clip.mp4"] if written else [])}
        (Path("out") / "ballast").unlink()
    assert written == [190]


def test_a_video_on_a_full_disk_is_one_line(apart):
    apart(write_videos_on_disks_of_all_sizes)


def test_no_command_leaves_half_a_file_on_a_full_disk(apart):
    apart(write_on_a_full_disk)


def write_on_a_read_only_disk():
    write_latents()
    mount("out", "size=4m")
    assert batch("out")[0] == 0
    before = content("out")
    subprocess.run(["mount", "-o", "remount,ro", "out"], check=True)
    for name, words in COMMANDS.items():
        status, said = command(*words)
        assert status == 1 and "Read-only file system" in said and "out" in said, (name, said)
        assert len(said.splitlines()) == 1, (name, said)
    status, said = batch("out")
    assert status == 1 and "expected a folder that you can write to (Read-only file system)" in said, said
    assert content("out") == before


def test_a_read_only_disk_is_named_before_anything_is_drawn(apart):
    apart(write_on_a_read_only_disk)


def cache_on_disks_of_all_sizes():
    import test_training_cache
    import torch

    from sana_core import OutputError
    from sana_core.training.cache import DIGESTS, read_entry

    torch.set_num_threads(1)
    models = test_training_cache.Models()
    data, created = test_training_cache.make_data(Path("data")), set()
    mount("cache", "size=600k")
    cache = Path("cache")
    # room for no embeddings of 75 KB; for some of the small entries; for all
    for pages in (0, 10, 22, 25, 60):
        leave_pages(cache, pages)
        models.calls.clear()
        try:
            test_training_cache.build(cache, data, models)
        except OutputError as error:
            assert str(error).startswith("cache: cannot write ") and "(No space left on device)" in str(error)
        else:
            assert pages == 60
        (cache / "ballast").unlink()
        remaining = content("cache").keys() - {DIGESTS}
        assert all(len(read_entry(cache / name)) in (1, 2) for name in remaining)
        created.add(len(remaining))
        test_training_cache.build(cache, data, models)
        # the one that found no room is encoded again, the others are not
        assert len(models.calls) == 8 + (pages < 60) and len(content("cache")) == 9
        for path in [path for path in cache.rglob("*") if path.is_file()]:
            path.unlink()
    assert 0 in created and 8 in created and len(created) == 4, created


def test_a_cache_on_a_full_disk_keeps_what_is_whole_and_goes_on_later(apart):
    apart(cache_on_disks_of_all_sizes)


OWN = {"name": "x", "save_every": 2, "keep": 1}
OWN |= {f"validation.{key}": value for key, value in {"every": 2, "width": 32, "height": 32, "steps": 1}.items()}
OWN["validation.prompts"] = "a red circle"


def train():
    status, said = command("train", "out.toml")
    # Progress and the error are on separate lines.
    return status, said.replace("\r", "\n").rstrip().splitlines()[-1:] if status else []


def train_on_disks_of_all_sizes():
    from PIL import Image
    from trained import write_settings

    Path("pictures").mkdir()
    for colour in ("red", "blue"):
        Image.new("RGB", (32, 32), colour).save(f"pictures/{colour}.png")
        Path(f"pictures/{colour}.txt").write_text(colour)
    write_settings(Path(), CHECKPOINT, "out", OWN, {"resolution": 32, "steps": 4})
    Path("out").mkdir()
    assert train() == (0, [])
    complete = {name: data for name, data in content("out").items() if name != "log.jsonl"}
    shutil.rmtree("out")
    mount("out", "size=4m,nr_inodes=60")
    out, ended = Path("out"), Counter()
    # a run takes about 300 pages and 15 names
    sizes = [*((leave_pages, pages) for pages in (0, 1, 2, 3, 5, 20, 60, 100, 140, 180, 220, 260, 300))]
    for fill, room in [*sizes, *((leave_files, files) for files in (0, 2, 3, 4, 6, 8, 10))]:
        fill(out, room)
        status, said = train()
        if status:
            assert len(said) == 1 and "No space left on device" in said[0] and "out" in said[0], (room, said)
        ended[status] += 1
        shutil.rmtree(out / "ballast") if fill is leave_files else (out / "ballast").unlink()
        remaining = {name for name in content(out) if name.startswith(".") or ".part" in name}
        assert not remaining, (room, remaining)
        assert train() == (0, []), room
        again = content(out)
        assert again.pop("log.jsonl") and again == complete, (room, again.keys() ^ complete.keys())
        for path in out.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert ended[1] >= 12, ended
    assert train() == (0, [])
    before = content(out)
    subprocess.run(["mount", "-o", "remount,ro", "out"], check=True)
    status, said = train()
    assert status == 1 and "expected a folder that you can write to (Read-only file system)" in said[0], said
    assert content(out) == before


@pytest.mark.slow
def test_a_run_on_disks_of_20_sizes_loses_nothing_and_goes_on_later(apart):
    apart(train_on_disks_of_all_sizes)
