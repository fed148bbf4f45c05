"""`python -m sana_core batch`: the files that it writes, and resuming."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import command
from PIL import Image
from setup import ROOT

import sana_core
from sana_core.__main__ import main
from sana_core.batch.folder import OutputFolder, Writers
from sana_core.batch.plan import (
    FAILURES_AT_START,
    FailedImage,
    ImageSpec,
    Workload,
    batch_images,
    stop_if_all_fail,
)
from sana_core.batch.png import encode_png, write_image
from sana_core.checkpoints.fingerprint import fingerprint
from sana_core.engine import body
from sana_core.runtime import atomic_files as whole_files
from sana_core.runtime.atomic_files import digest_of

# one process draws what another has drawn
pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]


@pytest.fixture
def arguments(tmp_path, checkpoint, monkeypatch):
    """A function that returns the command's arguments: four steps, one picture at a time."""
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def build(*options, prompts="prompts.txt", steps=4):
        words = ["batch", prompts, "--checkpoint", checkpoint, "--out", "out", "--width", 128, "--height", 128]
        return [str(word) for word in (*words, "--steps", steps, "--chunk", 1, "--count", 4, *options)]

    return build


@pytest.fixture
def batch(arguments, capsys):
    """A function that runs the command in this process and returns status, stdout and stderr."""

    def run(*options, **kinds):
        status = main(arguments(*options, **kinds))
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def spawn(arguments):
    """A function that starts the command in a process of its own."""
    return lambda **options: command(*arguments(), **options)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, checkpoint, one_thread):
    """A folder with all eight pictures, which all tests share."""
    base = tmp_path_factory.mktemp("drawn")
    (base / "prompts.txt").write_text("\n".join(PROMPTS))
    options = ["--width", 128, "--height", 128, "--steps", 4, "--chunk", 1, "--count", 4, "--out", base / "out"]
    command = ["batch", base / "prompts.txt", "--checkpoint", checkpoint, *options]
    assert main([str(word) for word in command]) == 0
    return base / "out"


@pytest.fixture
def finished(drawn, tmp_path):
    """A copy of that folder, where the next run writes."""
    return shutil.copytree(drawn, tmp_path / "out")


def files(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.png")}


def test_the_pictures_are_those_of_the_call_and_the_manifest_lists_them(finished, checkpoint):
    expected = sana_core.generate(PROMPTS, checkpoint, count=4, steps=4, width=128, height=128, chunk=1)
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["settings"].items() >= {"steps": 4, **fingerprint(checkpoint)}.items()
    names = [f"{prompt:05d}_{seed}.png" for prompt in range(2) for seed in range(4)]
    assert list(manifest["images"]) == names == sorted(files(finished))
    for name, pixels in zip(names, expected, strict=True):
        levels = torch.from_numpy(np.array(Image.open(finished / name))).permute(2, 0, 1)
        assert (levels - (pixels + 1) * 127.5).abs().max() <= 0.51
        entry = manifest["images"][name]
        assert (entry["prompt"], f"_{entry['seed']}.") == (PROMPTS[int(name[:5])], name[5:-3])


def test_a_run_that_was_killed_makes_exactly_the_missing_ones(finished, batch, spawn, tmp_path):
    undivided = files(finished)
    finished.rename(tmp_path / "whole")
    process = spawn()
    while len(list(finished.glob("*.png"))) < 3:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = files(finished)
    # One unfinished file is of the dead run. The others belong to somebody else.
    (next(finished.glob(".sana-batch/run-*")) / ".0123abcd.part").write_bytes(b"half")
    foreign = {".00001_3.png.0123abcd": b"mine", ".shared.0123abcd": b"mine", "00001_3.png.part": b"mine"}
    for name, data in foreign.items():
        (finished / name).write_bytes(data)
    code, out, err = batch()
    assert code == 0, err
    assert f"{len(before)} of 8 images exist" in out
    assert out.count(".png (") == 8 - len(before)
    after = files(finished)
    assert {name: after[name] for name in before} == before
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in undivided.items()}
    assert {path.name for path in finished.iterdir()} == {*undivided, *foreign, "manifest.json"}
    assert {name: (finished / name).read_bytes() for name in foreign} == foreign


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_double_and_mix_nothing(tmp_path):
    script = [sys.executable, ROOT / "tests" / "soak" / "kill_batch.py", "--kills", "20", "--part", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([*script, "--results", tmp_path / "kills.json"], env=environment, capture_output=True)
    assert process.returncode == 0, process.stderr.decode()
    assert json.loads((tmp_path / "kills.json").read_bytes())["happened"]["kills"] == 20


def test_damaged_and_missing_pictures_are_made_again_without_manifest_too(finished, batch):
    before = files(finished)
    (finished / "00000_1.png").write_bytes(before["00000_1.png"][0][:-100])
    (finished / "00001_2.png").unlink()
    code, out, err = batch()
    assert (code, out.count(".png (")) == (0, 2), err
    (finished / "manifest.json").unlink()
    (finished / "00001_0.png").unlink()
    code, out, err = batch()
    assert (code, out.count(".png (")) == (0, 1), err
    assert {name: data for name, (data, _) in files(finished).items()} == {
        name: data for name, (data, _) in before.items()
    }


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 5}, "has another prompt or other settings (steps 4); choose another folder"),
        ({"prompts": "other.txt"}, "other settings (prompt 'a red circle on a blue background'); choose"),
    ],
)
def test_pictures_of_something_else_are_never_overwritten(finished, batch, tmp_path, options, message):
    (tmp_path / "other.txt").write_text("a green circle on a red background")
    before = files(finished)
    code, out, err = batch(**options)
    assert code == 1 and message in err and len(err.splitlines()) == 1
    assert files(finished) == before


@pytest.mark.parametrize("content", ["picture", b"", b"\x89PNG\r\n\x1a\n and no more", b"notes"])
def test_a_file_of_another_program_is_never_overwritten(batch, tmp_path, content):
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "00000_1.png"
    if content == "picture":
        Image.new("RGB", (8, 8)).save(file)
    else:
        file.write_bytes(content)
    before = file.read_bytes()
    code, _, err = batch()
    assert code == 1 and "00000_1.png is not of this batch; choose another folder, or remove it" in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["00000_1.png"] and file.read_bytes() == before


def put(kind, path):
    """Put a folder with a file in it, a pipe, or a link into the place of `path`."""
    if kind == "folder":
        path.mkdir()
        (path / "mine.txt").write_text("mine")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"link to nowhere": "nowhere", "link to a folder": "..", "link to a file": "../mine.txt"}[kind])


KINDS = ["folder", "pipe", "link to nowhere", "link to a folder"]


# A new manifest replaces a link to nowhere, so that pair is not here.
@pytest.mark.parametrize(
    "name, kind",
    [
        *(("00000_1.png", kind) for kind in KINDS),
        *(("manifest.json", kind) for kind in KINDS if kind != "link to nowhere"),
    ],
)
def test_folders_pipes_and_links_at_the_names_of_batch_files_are_refused_and_stay(batch, tmp_path, name, kind):
    (tmp_path / "out").mkdir()
    put(kind, tmp_path / "out" / name)
    before = sorted((path, path.lstat().st_mode) for path in (tmp_path / "out").rglob("*"))
    code, _, err = batch()
    assert code == 1 and f"out: out/{name} is not of " in err and len(err.splitlines()) == 1, err
    assert sorted((path, path.lstat().st_mode) for path in (tmp_path / "out").rglob("*")) == before


@pytest.mark.parametrize("kind", [*KINDS, "link to a file"])
@pytest.mark.parametrize("name", ["", "lock", "holder.json"])
def test_links_and_pipes_in_place_of_the_lock_are_refused_and_stay(batch, tmp_path, kind, name):
    (tmp_path / "mine.txt").write_text("mine")
    # names that a run removes at its end
    for mine in ("lock", "holder.json", "run-0/mark", "run-0/.0.part"):
        (tmp_path / mine).parent.mkdir(exist_ok=True)
        (tmp_path / mine).write_text("mine")
    path = tmp_path / "out" / ".sana-batch" / name
    path.parent.mkdir(parents=True)
    if kind == "folder" and not name:
        kind = "link to a file"
    put(kind, path)
    before = sorted((path, path.lstat().st_mode) for path in tmp_path.rglob("*"))
    code, _, err = batch()
    assert code == 1 and re.match(r"out: out/.sana-batch\S* is not a (folder|file) \(", err), err
    assert len(err.splitlines()) == 1
    assert sorted((path, path.lstat().st_mode) for path in tmp_path.rglob("*")) == before


def test_files_behind_a_link_among_the_runs_stay(batch, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("mark", ".0.part"):
        (mine / name).write_text("mine")
    for name in ("run-0", "gone-1"):
        (tmp_path / "out" / ".sana-batch").mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / ".sana-batch" / name).symlink_to(mine)
    assert batch()[0] == 0
    assert {path.name: path.read_text() for path in mine.iterdir()} == {"mark": "mine", ".0.part": "mine"}


@pytest.mark.parametrize(
    "content, manifest",
    [(b"", "kept"), (bytes(1000), "of the start"), ("first half", "of the start"), ("first half", "removed")],
)
def test_what_a_power_cut_leaves_of_a_picture_is_drawn_again(finished, batch, content, manifest):
    before, file, listed = files(finished), finished / "00000_1.png", finished / "manifest.json"
    document = json.loads(listed.read_bytes())
    if manifest == "of the start":
        document["images"] = {}
        listed.write_text(json.dumps(document))
    elif manifest == "removed":
        listed.unlink()
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] if content == "first half" else content)
    code, out, err = batch()
    if manifest == "removed":
        # Without the manifest, the owner of the image is unknown.
        assert code == 1 and "00000_1.png is not of this batch" in err
    else:
        assert (code, out.count(".png (")) == (0, 1), err
        assert {name: data for name, (data, _) in files(finished).items()} == {
            n: data for n, (data, _) in before.items()
        }


def test_a_picture_that_its_owner_has_edited_stays(finished, batch):
    Image.open(finished / "00000_1.png").convert("L").save(finished / "00000_1.png")
    edited = files(finished)
    code, _, err = batch()
    assert code == 1 and "00000_1.png is not of this batch; choose another folder, or remove it" in err
    assert files(finished) == edited


MANIFESTS = [b"", b"{", b"[]", b"{}", b'{"version": 3, "settings": {}, "images": {}}', b"[" * 100_000, b"\xff"]
MANIFESTS += [b'{"settings": {"width": 1, "height": 1, "steps": 1, "sampler": ""}, "images": {"a.png": 3}}']


@pytest.mark.parametrize("content", MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_manifest_of_another_program_is_refused_by_name(batch, tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_bytes(content)
    code, _, err = batch()
    assert code == 1 and "manifest.json is not of a batch; choose another folder, or move it away" in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]
    assert (tmp_path / "out" / "manifest.json").read_bytes() == content


def test_files_that_others_write_meanwhile_stay(batch, tmp_path, monkeypatch):
    out, real = tmp_path / "out", OutputFolder.write

    def write(folder, image, png):
        (out / "00000_2.png").write_bytes(b"mine")
        return real(folder, image, png)

    monkeypatch.setattr(OutputFolder, "write", write)
    code, _, err = batch()
    assert code == 1 and "out/00000_2.png exists" in err
    (out / "00000_2.png").unlink()

    def overwrite(folder, image, png):
        (out / "manifest.json").write_bytes(b"mine")
        return real(folder, image, png)

    monkeypatch.setattr(OutputFolder, "write", overwrite)
    code, _, err = batch()
    assert code == 1 and "somebody else has written out/manifest.json" in err
    assert (out / "manifest.json").read_bytes() == b"mine"


def test_a_disk_that_changes_inodes_and_rounds_times_does_not_stop_the_run(finished, batch, monkeypatch):
    """exFAT and FUSE do this."""
    (finished / "00001_3.png").unlink()
    real = OutputFolder.write

    def write(folder, image, png):
        manifest, copy = finished / "manifest.json", finished / "manifest.copy"
        shutil.copyfile(manifest, copy)
        copy.replace(manifest)
        os.utime(manifest, (1, 1))
        return real(folder, image, png)

    monkeypatch.setattr(OutputFolder, "write", write)
    code, out, err = batch()
    assert (code, err, out.count(".png (")) == (0, "", 1)


def test_resuming_shows_progress_and_can_be_cancelled(finished, batch, monkeypatch):
    (finished / "00001_3.png").unlink()
    # The clock advances by 2 s at each call.
    seconds = iter(range(0, 10**6, 2))
    monkeypatch.setattr("sana_core.commands.batch.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    code, _, err = batch()
    assert code == 0 and "\rreading the images that are there: 5 of 8" in err

    before, calls = files(finished), []

    def cancel(count):
        calls.append(count)
        raise KeyboardInterrupt

    folder = OutputFolder(
        SimpleNamespace(folder=finished, check=lambda: None, run=finished), PROMPTS, read_settings(finished)
    )
    with pytest.raises(KeyboardInterrupt):
        folder.find_done([ImageSpec(0, 0, 0)], cancel)
    assert calls == [0] and files(finished) == before


@pytest.fixture
def nan_images(monkeypatch):
    """A function that makes the images of these seeds NaN, and returns the seeds that were sampled."""

    def make(seeds):
        real, sampled = body.sample, []

        def sample(models, settings, chunk, *arguments, **options):
            latents = real(models, settings, chunk, *arguments, **options)
            sampled.extend(image.seed for image in chunk)
            for row, image in enumerate(chunk):
                if image.seed in seeds:
                    latents[row] = float("nan")
            return latents

        monkeypatch.setattr(body, "sample", sample)
        return sampled

    return make


@pytest.mark.parametrize("chunk", [1, 4])
def test_an_image_with_nan_is_reported_and_does_not_block_the_run_or_a_resume(batch, tmp_path, nan_images, chunk):
    nan_images({1})
    code, out, err = batch("--chunk", chunk)
    assert code == 3 and out.count(".png (") == 6
    lines = err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["failed", "failed", "images"]
    assert f"00001_1.png (prompt {PROMPTS[1]!r}, seed 1): samples: 512 of 512 values are NaN" in err
    assert lines[2].startswith("images: 2 failed, number 1, 5, counted from 0; number 1 failed because of samples: ")
    assert lines[2].endswith("the same command tries them again")
    before = files(tmp_path / "out")
    assert len(before) == 6 and len(json.loads((tmp_path / "out" / "manifest.json").read_bytes())["images"]) == 6
    sampled = nan_images({3})
    # The next run tries the two images again, and only them.
    code, out, err = batch("--chunk", chunk)
    assert (code, out.count(".png (")) == (3, 0) and sorted(sampled) == [1, 1]


def test_failed_images_are_generated_by_a_later_run(batch, tmp_path, nan_images, monkeypatch):
    nan_images({1})
    assert batch()[0] == 3
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, out, err = batch()
    assert (code, err, out.count(".png (")) == (0, "", 2)


def test_a_batch_whose_images_all_fail_ends_early(batch, nan_images):
    sampled = nan_images(range(1000))
    code, out, err = batch("--count", 100, "--out", "one", "--width", 32, "--height", 32, steps=1)
    # The first prompt alone may be at fault. A worker generates two more meanwhile.
    assert (code, out) == (1, "") and 101 <= len(sampled) <= 104
    assert err.count("failed: ") == 101
    said = err.splitlines()[-1]
    assert said.startswith("images: all of the first 101 failed, the last because of samples: ")
    assert said.endswith("; choose dtype bfloat16 or float32, or another checkpoint")


def test_a_run_with_finished_images_does_not_end_early():
    images = batch_images(2, FAILURES_AT_START, 0)
    failing = [(image, FailedImage("NaN")) for image in images]
    resumed = Workload(PROMPTS, images, done=frozenset({0}))
    assert len(list(stop_if_all_fail(iter(failing), resumed))) == len(images)
    fresh = Workload(PROMPTS, images)
    assert len(list(stop_if_all_fail(iter([(images[0], b"png"), *failing[1:]]), fresh))) == len(images)
    one = Workload(PROMPTS, images[:FAILURES_AT_START])
    with pytest.raises(sana_core.InputError, match="all of the first 32 failed"):
        list(stop_if_all_fail(iter(failing), one))


def test_writers_bound_the_images_in_memory_and_raise_the_first_error():
    written, release = [], threading.Event()

    def write(number):
        release.wait(20)
        if number == 5:
            raise OSError(28, "No space left on device")
        written.append(number)

    polls = []

    def poll():
        polls.append(1)
        if len(polls) == 3:
            release.set()

    with pytest.raises(OSError, match="No space"), Writers(write, 2) as writers:
        for number in range(4):
            writers.put(number, poll)
        # Two are being written and two wait, so nothing more is accepted.
        assert not polls and not written
        writers.put(4, poll)
        assert len(polls) >= 3 and written
        writers.put(5, poll)
        writers.finish(poll)
    assert sorted(written) == [0, 1, 2, 3, 4]


def test_a_full_disk_ends_the_run_with_the_number_of_complete_images(finished, batch, monkeypatch):
    """Other threads may be writing an image then."""
    for file in list(finished.glob("0000?_[123].png")):
        file.unlink()
    real, count, lock = OutputFolder.write, iter(range(100)), threading.Lock()

    def write(folder, image, png):
        with lock:
            if next(count) == 2:
                raise OSError(28, "No space left on device")
        time.sleep(0.05)
        return real(folder, image, png)

    monkeypatch.setattr(OutputFolder, "write", write)
    code, out, err = batch()
    written = len(files(finished))
    assert code == 1 and f"cannot write into out (No space left on device); {written} of 8 images exist" in err
    assert out.count(".png (") == written - 2 and len(err.splitlines()) == 1
    assert len(json.loads((finished / "manifest.json").read_bytes())["images"]) == written


def test_a_file_with_seeds_is_resumed(tmp_path, batch, checkpoint):
    rows = [{"prompt": PROMPTS[0], "seed": 7}, {"prompt": PROMPTS[1]}, {"prompt": "a red\ncircle", "seed": 3}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"prompts": "p.jsonl", "steps": 1}
    code, _, err = batch("--count", 2, "--seed", 5, **options)
    assert code == 0, err
    out = tmp_path / "out"
    names = ["00000_7", "00000_8", "00001_5", "00001_6", "00002_3", "00002_4"]
    written = files(out)
    assert sorted(written) == [f"{name}.png" for name in names]
    listed = json.loads((out / "manifest.json").read_text())["images"]
    assert [entry["prompt"] for entry in listed.values()] == [rows[number // 2]["prompt"] for number in range(6)]
    expected = sana_core.generate(PROMPTS[:1], checkpoint, seed=8, steps=1, width=128, height=128)[0]
    pixels = torch.from_numpy(np.array(Image.open(out / "00000_8.png"))).permute(2, 0, 1)
    assert (pixels - (expected + 1) * 127.5).abs().max() <= 0.51
    # A power failure leaves an empty image that the manifest does not list.
    document = json.loads((out / "manifest.json").read_text())
    del document["images"]["00002_4.png"]
    (out / "manifest.json").write_text(json.dumps(document))
    (out / "00002_4.png").write_bytes(b"")
    code, said, err = batch("--count", 2, "--seed", 5, **options)
    assert code == 0 and said.startswith("5 of 6 images exist\n"), err
    assert {name: data for name, (data, _) in files(out).items()} == {name: data for name, (data, _) in written.items()}


def read_settings(folder):
    return json.loads((folder / "manifest.json").read_bytes())["settings"]


def test_a_folder_of_an_earlier_version_says_so(finished, batch):
    document = json.loads((finished / "manifest.json").read_bytes())
    document["settings"]["version"] -= 1
    (finished / "manifest.json").write_text(json.dumps(document))
    before = files(finished)
    code, _, err = batch()
    assert code == 1 and "(made by another version of sana_core, which described them otherwise); choose" in err
    assert files(finished) == before


@pytest.mark.parametrize("other", [{}, {"steps": 5, "prompts": "other.txt"}])
def test_a_second_run_on_the_folder_is_refused_and_the_first_loses_nothing(spawn, batch, finished, tmp_path, other):
    undivided = files(finished)
    finished.rename(tmp_path / "whole")
    (tmp_path / "other.txt").write_text("a green circle on a red background")
    first = spawn()
    while not list(finished.glob("*.png")):
        assert first.poll() is None
        time.sleep(0.002)
    first.send_signal(signal.SIGSTOP)
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    code, _, err = batch(**other)
    assert code == 1 and "out is in use by another run, which began at 2" in err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    first.send_signal(signal.SIGCONT)
    _, err = first.communicate()
    assert first.returncode == 0, err
    assert {name: data for name, (data, _) in files(finished).items()} == {
        n: data for n, (data, _) in undivided.items()
    }


def test_pictures_are_on_the_disk_before_their_names_and_the_manifest_after_both(batch, tmp_path, monkeypatch):
    calls, real_fsync, real_link, real_replace = [], whole_files.fsync, Path.hardlink_to, Path.replace

    def fsync(descriptor):
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def link(path, part):
        calls.append(("name", str(part.resolve()), path.name))
        real_link(path, part)

    def replace(part, path):
        calls.append(("name", str(part.resolve()), path.name))
        return real_replace(part, path)

    monkeypatch.setattr(whole_files, "fsync", fsync)
    monkeypatch.setattr(Path, "hardlink_to", link)
    monkeypatch.setattr(Path, "replace", replace)
    code, _, err = batch()
    assert code == 0, err
    named = [index for index, entry in enumerate(calls) if entry[0] == "name"]
    assert [calls[index][2] for index in named].count("manifest.json") >= 2 and len(named) >= 10
    assert all(("fsync", calls[index][1]) in calls[:index] for index in named)
    last = max(index for index in named if calls[index][2] == "manifest.json")
    pictures = [index for index in named if calls[index][2].endswith(".png")]
    assert ("fsync", str(tmp_path / "out")) in calls[max(pictures) : last] and calls[last + 1][1] == str(
        tmp_path / "out"
    )


def test_a_disk_without_hard_links_does_too(batch, tmp_path, monkeypatch):
    def refuse(path, part):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    code, _, err = batch()
    assert code == 0 and len(files(tmp_path / "out")) == 8, err


DESCRIBED = {"prompt": "a red circle", "seed": 1, "settings": {"steps": 2}}


@pytest.mark.parametrize("change", [{}, {"prompt": "a blue square"}, {"seed": 2}, {"settings": {"steps": 3}}], ids=str)
def test_a_second_machine_keeps_the_same_image_and_refuses_any_other(tmp_path, change):
    path = tmp_path / "00000_1.png"
    first = encode_png(torch.zeros(3, 8, 8), **DESCRIBED)
    assert write_image(path, first, tmp_path) == digest_of(first)
    # GPUs of another type generate slightly different pixels.
    second = encode_png(torch.full((3, 8, 8), 0.01), **DESCRIBED | change)
    assert second != first
    if change:
        with pytest.raises(FileExistsError):
            write_image(path, second, tmp_path)
    else:
        assert write_image(path, second, tmp_path) == digest_of(first)
    assert path.read_bytes() == first and [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_folder_of_a_checkpoint_that_has_changed_is_refused(finished, batch, checkpoint, tmp_path):
    changed_checkpoint, before = shutil.copytree(checkpoint, tmp_path / "own"), files(finished)
    code, out, err = batch("--checkpoint", changed_checkpoint)
    assert code == 0 and "8 of 8 images exist" in out, err
    config = changed_checkpoint / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace('"flow_shift": 3.0', '"flow_shift": 4.0'))
    code, _, err = batch("--checkpoint", changed_checkpoint)
    assert code == 1 and "has another prompt or other settings (shift 3.0)" in err, err
    assert files(finished) == before


def test_a_picture_that_an_earlier_run_left_half_is_drawn_again(batch, tmp_path):
    """Two runs of other seeds, and a power cut that the list of pictures has not survived."""
    for seed in (0, 10):
        assert batch("--count", 1, "--seed", seed, steps=1)[0] == 0
    out = tmp_path / "out"
    picture, manifest = out / "00000_0.png", next(out.glob("*.json"))
    complete, listed = picture.read_bytes(), json.loads(manifest.read_text())
    picture.write_bytes(complete[: len(complete) // 2])
    manifest.write_text(json.dumps({**listed, "images": {}}))
    assert batch("--count", 1, "--seed", 0, steps=1)[0] == 0
    assert picture.read_bytes() == complete


@pytest.mark.parametrize("ending, expected", [(RuntimeError("all GPUs failed"), 4), (KeyboardInterrupt(), 2)])
def test_an_error_of_the_batch_drops_no_finished_image(ending, expected):
    written, release = [], threading.Event()

    def write(number):
        release.wait(20)
        written.append(number)

    with pytest.raises(type(ending)), Writers(write, 2) as writers:
        for number in range(4):
            writers.put(number, lambda: None)
        threading.Timer(0.2, release.set).start()
        raise ending
    assert len(written) == expected


@pytest.mark.parametrize(
    "error, said",
    [
        (
            torch.OutOfMemoryError("CUDA out of memory.\nMore"),
            "memory ran out (OutOfMemoryError: CUDA out of memory.); ",
        ),
        (
            RuntimeError("CUDA error: no\nMore"),
            "the device has failed (RuntimeError: CUDA error: no); check the log of its driver",
        ),
    ],
)
def test_the_failure_of_all_devices_is_one_line(batch, monkeypatch, error, said):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(body, "sample", fail)
    code, _, err = batch()
    assert code == 1 and err.splitlines()[-1].startswith(f"devices: {said}") and "Traceback" not in err
