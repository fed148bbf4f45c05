"""ComfyUI shows every file in its output folder, so files of runs and batches must not identify the machine."""

import getpass
import io
import json
import os
import platform
import re
import socket
import sys
from contextlib import suppress

import pytest
from data_sets import PICTURE, save
from setup import ROOT

from sana_core.__main__ import main
from sana_core.checkpoints import fingerprint
from sana_core.checkpoints.fingerprint import digest_json
from sana_core.runtime import folder_lock
from sana_core.runtime.atomic_files import digest_of
from sana_core.runtime.folder_lock import OWN, hold

CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
HOST, USER = "host-of-nobody", "user-of-nobody"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine and a user whose names no file contains by chance."""
    for module, name in ((platform, "node"), (socket, "gethostname"), (folder_lock, "node")):
        monkeypatch.setattr(module, name, lambda: HOST)
    monkeypatch.setenv("LOGNAME", USER)
    assert platform.node() == socket.gethostname() == HOST and getpass.getuser() == USER


class Watching(io.StringIO):
    """A stream that reads all files of a folder whenever a run writes a line to it."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.contents, self.tokens = folder, set(), set()

    def write(self, text):
        self.look()
        return super().write(text)

    def look(self):
        self.tokens |= {run.name.partition("-")[2] for run in (self.folder / OWN).glob("run-*")}
        # The thread that saves a state may rename its folder meanwhile.
        with suppress(FileNotFoundError):
            for path in self.folder.rglob("*"):
                if path.is_file():
                    self.contents.add((path.relative_to(self.folder).as_posix(), path.read_bytes()))


def check_private(watching, folder, *more):
    """Fail for a file that contains a path of this machine, its name, its user, this process or the run's token."""
    watching.look()
    assert watching.tokens and {name for name, _ in watching.contents} >= {f"{OWN}/holder.json"}
    private = [str(folder), str(ROOT), str(CHECKPOINT), HOST, USER, *watching.tokens, *more]
    process = re.compile(rb"(?<![\d.])%d(?![\d.])" % os.getpid())
    for name, content in watching.contents:
        leaked = [word for word in private if word in name.replace(f"run-{word}", "") or word.encode() in content]
        assert not leaked, (name, leaked)
        if name.endswith((".json", ".jsonl")):
            assert not process.search(content), name


def write_run(folder, method):
    """Write the settings of a run in `folder`, of a data set beside it."""
    for number in range(4):
        save(folder / "private pictures" / f"portrait{number}.png", PICTURE.rotate(90 * number))
        if method == "controlnet":
            save(folder / "private pictures" / f"portrait{number}-control.png", PICTURE, caption=None)
    control = f"control = ['{folder}/private pictures/portrait0-control.png']" if method == "controlnet" else ""
    trigger, blocks = "trigger = 'sks'" * (method == "lora"), "blocks = 1" * (method == "controlnet")
    (folder / "run.toml").write_text(
        f"model = '{CHECKPOINT}'\nout = 'out'\ndtype = 'float32'\n{trigger}\n"
        f"[method]\nkind = '{method}'\n{blocks}\n"
        f"[validation]\nevery = 1\nshare = 0.3\nprompts = ['a red circle of mine']\nsteps = 1\n{control}\n"
        "[[phase]]\ndata = 'private pictures'\nresolution = 64\nsteps = 2\n"
    )
    return folder / "run.toml"


@pytest.mark.parametrize("method", ["lora", "controlnet", "full"])
def test_no_file_of_a_training_tells_where_it_ran(tmp_path, monkeypatch, method):
    # As for released models, whose digests a run stores in its folder.
    monkeypatch.setattr(fingerprint, "LARGE", 0)
    settings = write_run(tmp_path, method)
    stream = Watching(tmp_path / "out")
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["train", str(settings)]) == 0, stream.getvalue()
    names = {name for name, _ in stream.contents}
    assert {
        "cache/digests.json",
        "cache/sizes.json",
        "run.json",
        "log.jsonl",
        "validations.png",
        "pictures/step-0000002-00.png",
    } <= names
    check_private(stream, tmp_path, "private pictures", "a red circle", "portrait")
    # A guessed path has no digest that is in a file or its name.
    models = {name for name in names if name.startswith("cache/models/")}
    guessed = {str(file): digest_json(str(file)) for file in CHECKPOINT.rglob("*.safetensors")}
    assert len(models) == len(guessed) and not {f"cache/models/{digest}.json" for digest in guessed.values()} & models
    images = json.loads((tmp_path / "out" / "cache" / "digests.json").read_bytes())
    words = [str(path) for path in (tmp_path / "private pictures").glob("*.png")]
    words += [json.dumps([path, 0, None]) for path in words]
    assert len(images) >= 4 and not {digest_of(word.encode()) for word in words} & images.keys()


@pytest.mark.parametrize("choice", [[], ["--best", "1", "--of", "2", "--scorer"]], ids=["all", "best"])
def test_no_file_of_a_batch_tells_where_it_ran(tmp_path, monkeypatch, choice):
    (tmp_path / "prompts.txt").write_text("a red circle")
    if choice:
        choice = [*choice, str(ROOT / "demo" / "sana-posters-scorer")]
    stream = Watching(tmp_path / "out")
    monkeypatch.setattr(sys, "stdout", stream)
    size = ["--width", "64", "--height", "64", "--steps", "1"]
    words = ["batch", str(tmp_path / "prompts.txt"), "--checkpoint", str(CHECKPOINT), "--out", str(tmp_path / "out")]
    assert main([*words, *size, *choice]) == 0
    names = {name for name, _ in stream.contents}
    assert "manifest.json" in names and any(name.endswith(".png") for name in names)
    check_private(stream, tmp_path)


def test_the_record_of_a_run_has_only_what_others_compare(tmp_path):
    with hold(tmp_path) as held:
        record = folder_lock.read_record(held.record)
        assert record.run not in held.run.name and len(record.run) == len(record.machine) == 64
        assert record.machine == folder_lock.machine_digest(record.run)
        assert set(record._fields) == {"run", "machine", "since", "beat"}
