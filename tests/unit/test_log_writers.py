"""What --tensorboard writes and --wandb sends: the lines of the log, and nothing about the machine."""

import errno
import json
import os
import re
import struct
import subprocess
import sys

import pytest
from data_sets import PICTURE, save
from setup import ROOT

from sana_core.__main__ import main
from sana_core.training.states import read_log

CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
SCALARS = {"loss", "learning_rate", "grad_norm", "validation_loss"}


@pytest.fixture
def settings(tmp_path):
    for number in range(3):
        save(tmp_path / "data" / f"{number}.png", PICTURE.rotate(90 * number))
    file = tmp_path / "run.toml"
    file.write_text(
        f"model = '{CHECKPOINT}'\nout = 'out'\ndtype = 'float32'\nmethod.rank = 2\n"
        "[validation]\nevery = 1\nshare = 0.3\n[[phase]]\ndata = 'data'\nresolution = 64\nsteps = 2\n"
    )
    return file


def private_words(folder):
    """What the files of a log must not contain: paths and the interpreter."""
    return [str(folder), str(ROOT), sys.prefix, sys.executable]


def logged(folder):
    """{(step, name): value} of the scalars in the log of the run in `folder`."""
    lines = read_log(folder)
    return {(line["step"], name): line[name] for line in lines for name in SCALARS & line.keys()}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_written(settings, monkeypatch, capsys, name):
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", str(settings), f"--{name}"]) == 1
    assert capsys.readouterr().err.startswith(f"{name}: cannot be imported (")
    assert not (settings.parent / "out").exists()


def test_tensorboard_reads_the_scalars_of_the_log(settings):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    out = settings.parent / "out"
    assert main(["train", str(settings), "--tensorboard"]) == 0
    (file,) = (out / "tensorboard").iterdir()
    assert re.fullmatch(r"events\.out\.tfevents\.\d{19}", file.name)
    scalars = {}
    for event in loader.LegacyEventFileLoader(str(file)).Load():
        scalars |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    assert scalars.keys() == logged(out).keys() and len(scalars) == 9
    assert all(value == pytest.approx(scalars[key], rel=1e-6) for key, value in logged(out).items())
    assert not [word for word in private_words(settings.parent) if word.encode() in file.read_bytes()]


def test_a_file_in_the_place_of_tensorboards_folder_is_named_and_the_training_continues(settings, caplog):
    pytest.importorskip("tensorboard")
    out = settings.parent / "out"
    out.mkdir()
    (out / "tensorboard").write_text("mine")
    assert main(["train", str(settings), "--tensorboard"]) == 0
    (line,) = [record.getMessage() for record in caplog.records if "tensorboard" in record.getMessage()]
    assert line.startswith("tensorboard: it receives no more lines (FileExistsError: File exists: ")
    assert (out / "tensorboard").read_text() == "mine" and len(read_log(out)) > 2


def test_a_disk_that_is_full_for_tensorboard_alone_costs_one_line(settings, caplog, monkeypatch):
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    written = []

    def write(self, data):
        written.append(data)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer.RecordWriter, "write", write)
    assert main(["train", str(settings), "--tensorboard"]) == 0
    assert len([record for record in caplog.records if "tensorboard" in record.getMessage()]) == 1
    assert len(written) == 2 and len(read_log(settings.parent / "out")) > 2


def test_a_refused_start_leaves_no_events_in_the_folder_of_another_run(settings, capsys):
    pytest.importorskip("tensorboard")
    assert main(["train", str(settings)]) == 0
    text = settings.read_text()
    settings.write_text(text.replace("rank = 2", "rank = 3"))
    assert main(["train", str(settings), "--tensorboard"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("rank: ")
    assert not (settings.parent / "out" / "tensorboard").exists()


def train_with_wandb(settings, **variables):
    """Run the command in a process of its own, because wandb completes its file when the process ends."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home = {name: str(settings.parent / "home") for name in ("HOME", "USERPROFILE")}
    paths = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "sana_core", "train", str(settings), "--wandb"],
        cwd=settings.parent,
        env=environment | home | {"PYTHONPATH": paths, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def records_of(data):
    """Yield the records of a .wandb file: LevelDB's log format behind seven bytes."""
    position, record = 7, b""
    while position + 7 <= len(data):
        rest_of_block = 32768 - position % 32768
        if rest_of_block < 7:
            position += rest_of_block
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        # types of a whole record and of the last part of one
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb_gets_the_lines_of_the_log_and_nothing_of_the_machine(settings):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    process = train_with_wandb(settings, WANDB_MODE="offline")
    assert process.returncode == 0, process.stderr
    out = settings.parent / "out"
    assert not (out / "wandb").exists()
    (file,) = settings.parent.glob("wandb/offline-run-*/*.wandb")
    sent = [wandb_internal_pb2.Record.FromString(data) for data in records_of(file.read_bytes())]
    kinds = {record.WhichOneof("record_type") for record in sent}
    assert {"run", "history"} <= kinds and not kinds & {"environment", "stats", "output", "output_raw", "files"}
    assert not [word for word in private_words(settings.parent) if any(word in str(record) for record in sent)]
    (run,) = (record.run for record in sent if record.HasField("run"))
    assert (run.project, run.display_name, run.host) == ("sana", "sana", "")
    histories = [record.history for record in sent if record.HasField("history")]
    items = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in history.item}
        for history in histories
    ]
    scalars = {(item["step"], name): item[name] for item in items for name in SCALARS & item.keys()}
    assert scalars.items() <= logged(out).items()
    assert {step for step, name in scalars if name == "loss"} == {1, 2}
    allowed = {"step", "phase", "epoch", "images", "seconds", "steps", "first", "_step", "_runtime", "_timestamp"}
    assert set().union(*items) <= SCALARS | allowed
    # the local files that are sent beside the records
    assert not [path for path in file.parent.glob("files/*") if path.is_file()]


def test_wandb_without_a_login_is_one_line_and_the_training_continues(settings):
    pytest.importorskip("wandb")
    process = train_with_wandb(settings)
    assert process.returncode == 0 and "Traceback" not in process.stderr, process.stderr
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("wandb: it receives no more lines (")]
    assert line.endswith("run wandb login, or set WANDB_MODE=offline")
    assert len(read_log(settings.parent / "out")) > 2


class BrokenRun:
    """A run of wandb whose process has ended."""

    def log(self, values, step):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def finish(self, exit_code):
        assert exit_code == 0
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


@pytest.mark.parametrize("at", ["init", "log"])
def test_a_failure_of_wandb_does_not_end_the_training(settings, monkeypatch, caplog, at):
    wandb = pytest.importorskip("wandb")
    calls = []

    def init(**options):
        calls.append(options)
        if at == "init":
            raise wandb.errors.CommError("Run initialization has timed out after 90.0 sec.")
        return BrokenRun()

    monkeypatch.setattr(wandb, "init", init)
    assert main(["train", str(settings), "--wandb"]) == 0
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("wandb: ")]
    assert len(calls) == 1 and len(lines) == (1 if at == "init" else 2), lines
    assert len(read_log(settings.parent / "out")) > 2
