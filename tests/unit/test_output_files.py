"""Output files of the commands: complete or absent, named in errors, and without leftovers of killed processes."""

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from checkpoints import TINY
from forked import Forked, command
from safetensors.torch import save_file

from sana_core.errors import ExistingFileError, OutputError
from sana_core.runtime import atomic_files
from sana_core.runtime.atomic_files import check_free, output_file
from sana_core.video.generate import write_video

PARTS = ".sana-*.part"
DEADLINE = 60  # seconds


def wait_for_part(process, folder):
    """Wait until `process` writes a hidden file into `folder`."""
    end = time.monotonic() + DEADLINE
    while not list(folder.glob(PARTS)):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.001)


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.poll(0)
    assert process.returncode == -signal.SIGKILL


def start_writing(folder):
    """Start a process that writes a file in `folder` and never ends."""

    def work():
        with output_file(folder / "slow.png") as part:
            part.write_bytes(b"half")
            time.sleep(DEADLINE)

    process = Forked(work, folder)
    wait_for_part(process, folder)
    return process


def test_a_killed_decode_leaves_nothing_after_the_next_one(tmp_path):
    save_file({"latents": torch.zeros(1, 32, 24, 24)}, tmp_path / "latents.safetensors")
    words = ["decode", "latents.safetensors", "--checkpoint", TINY, "--out", "image.png"]
    process = command(*words, cwd=tmp_path)
    wait_for_part(process, tmp_path)
    kill(process)
    assert len(list(tmp_path.glob(PARTS))) == 1
    process = command(*words, cwd=tmp_path)
    process.communicate()
    assert process.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"latents.safetensors", "image.png"}


def test_the_hidden_file_of_a_living_process_stays(tmp_path):
    living = start_writing(tmp_path)
    (part,) = tmp_path.glob(PARTS)
    with output_file(tmp_path / "other.png") as other:
        other.write_bytes(b"whole")
    assert part.read_bytes() == b"half"
    kill(living)
    with output_file(tmp_path / "another.png") as other:
        other.write_bytes(b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"other.png", "another.png"}


def test_only_this_machines_stale_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_files, "node", lambda: "elsewhere")
    kill(start_writing(tmp_path))
    monkeypatch.undo()
    prefix = atomic_files.part_prefix()
    (tmp_path / f"{prefix}{'1' * 32}.lock").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / f"{prefix}{'2' * 32}.lock").symlink_to("mine.txt")
    os.mkfifo(tmp_path / f"{prefix}{'3' * 32}.lock")
    (tmp_path / f"{prefix}{'4' * 32}.part").write_text("without a lock file")
    for suffix in ("lock", "part"):
        (tmp_path / f"{prefix}holiday.{suffix}").write_text("A user chose this name.")
    before = sorted(tmp_path.iterdir())
    assert len(before) == 9
    with output_file(tmp_path / "new.png") as part:
        part.write_bytes(b"whole")
    assert sorted({*tmp_path.iterdir()} - {tmp_path / "new.png"}) == before
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_the_file_that_is_written_is_not_locked(tmp_path):
    """On SMB disks, nobody can write a locked file through another descriptor."""
    with output_file(tmp_path / "image.png") as part, part.open("r+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert [path.name for path in tmp_path.iterdir()] == ["image.png"]


def test_many_writers_in_one_folder_lose_nothing(tmp_path):
    def work():
        for number in range(40):
            with output_file(tmp_path / f"{os.getpid()}-{number}") as part:
                part.write_bytes(b"whole")

    processes = [Forked(work) for _ in range(4)]
    for process in processes:
        assert process.communicate() == ("", "") and process.returncode == 0
    assert len(list(tmp_path.iterdir())) == 160


def test_the_error_names_the_file_of_the_user(tmp_path):
    path = tmp_path / "gone" / "image.png"
    pattern = f"^out: {path} cannot be written \\(No such file or directory\\); check its folder, permissions and disk$"
    with pytest.raises(OutputError, match=pattern), output_file(path):
        pass
    (tmp_path / "folder.png").mkdir()
    pattern = "folder.png cannot be written \\(Is a directory\\); "
    with pytest.raises(OutputError, match=pattern), output_file(tmp_path / "folder.png", replace=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize("kind", ["file", "folder", "link that leads nowhere"])
def test_a_name_that_is_taken_while_writing_stays_on_a_disk_without_hard_links(tmp_path, monkeypatch, kind):
    def refuse(path, part):
        # exFAT answers this before it looks at the name.
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    path = tmp_path / "image.png"
    with pytest.raises(ExistingFileError, match="image.png exists"), output_file(path) as part:
        part.write_text("ours")
        if kind == "file":
            path.write_text("theirs")
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("gone.png")
    assert [file.name for file in tmp_path.iterdir()] == ["image.png"]
    if kind == "file":
        assert path.read_text() == "theirs"
    else:
        assert path.is_symlink() or path.is_dir()
    path.rmdir() if kind == "folder" else path.unlink()
    with output_file(path) as part:
        part.write_text("ours")
    assert path.read_text() == "ours"


def test_names_that_cannot_be_used_are_refused_before_the_work(tmp_path):
    (tmp_path / "link.mp4").symlink_to("gone.mp4")
    with pytest.raises(
        ExistingFileError, match="link.mp4 exists; choose another folder, or allow it with --overwrite$"
    ):
        check_free([tmp_path / "link.mp4"])
    check_free([tmp_path / "link.mp4", tmp_path / "link.mp4" / "inside.mp4"], replace=True)
    for replace in (False, True):
        with pytest.raises(OutputError, match=r"^out: .*aaa cannot be a file \(File name too long\); choose another"):
            check_free([Path("a" * 300 + ".mp4")], replace)


# Each name begins with a protocol of FFmpeg.
@pytest.mark.parametrize("folder", ["http:", "data:x", "concat:", "file:", "pipe:", "crypto:", "http:/localhost"])
def test_a_video_in_a_folder_with_the_name_of_a_protocol(tmp_path, monkeypatch, folder):
    import av

    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(parents=True)
    video = torch.rand(3, 9, 32, 48) * 2 - 1
    write_video(Path(folder) / "clip.mp4", video)
    write_video(Path(f"{folder.partition('/')[0]}clip.mp4"), video)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["clip.mp4"]
    with (Path(folder) / "clip.mp4").open("rb") as file, av.open(file) as clip:
        assert sum(1 for _ in clip.decode(video=0)) == 9


def test_a_video_does_not_replace_a_file_and_needs_its_folder(tmp_path):
    video = torch.zeros(3, 1, 32, 32)
    with pytest.raises(
        OutputError, match="clip.mp4 cannot be written \\(No such file or directory\\); check its folder"
    ):
        write_video(tmp_path / "gone" / "clip.mp4", video)
    (tmp_path / "clip.mp4").write_bytes(b"precious")
    with pytest.raises(ExistingFileError, match="clip.mp4 exists; choose another name, or remove it$"):
        write_video(tmp_path / "clip.mp4", video)
    assert (tmp_path / "clip.mp4").read_bytes() == b"precious"
    write_video(tmp_path / "clip.mp4", video, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]
