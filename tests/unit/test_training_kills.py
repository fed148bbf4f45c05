"""SIGKILL at any moment, also while a state is written: what goes on ends where a run ends that nobody killed."""

import json
import random
import signal
import time

import pytest
from forked import command
from pictures import write_pictures
from safetensors.torch import load_file

from sana_core.training.run_log import read_log

KILLS = 4
SETTINGS = """
model = {model}
out = {out}
cache = {cache}
dtype = "float32"
save_every = 2
keep = 2
[method]
rank = 2
[validation]
every = 5
share = 0.3
[[phase]]
data = {data}
resolution = 128
batch = 1
steps = 40
learning_rate = 1e-3
"""


def start(folder, checkpoint, name):
    values = {"model": checkpoint, "out": folder / name, "cache": folder / "cache", "data": folder / "pictures"}
    file = folder / f"{name}.toml"
    file.write_text(SETTINGS.format(**{key: json.dumps(str(value)) for key, value in values.items()}))
    return command("train", file)


@pytest.mark.slow
def test_killed_and_gone_on(tmp_path, checkpoint):
    write_pictures(tmp_path / "pictures", 6)
    whole = start(tmp_path, checkpoint, "whole")
    _, said = whole.communicate()
    assert whole.returncode == 0, said
    rng, log = random.Random(3), tmp_path / "killed" / "log.jsonl"
    for kill in range(KILLS):
        process = start(tmp_path, checkpoint, "killed")
        wanted = 40 * (kill + 1) // (KILLS + 1)
        while process.poll() is None and (not log.exists() or log.read_text().count("grad_norm") < wanted):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = start(tmp_path, checkpoint, "killed")
    _, said = last.communicate()
    assert last.returncode == 0, said
    states = [
        load_file(tmp_path / name / "steps" / "step-0000040" / "state.safetensors") for name in ("whole", "killed")
    ]
    assert states[0].keys() == states[1].keys()
    assert all((states[0][name] == states[1][name]).all() for name in states[0])
    logs = [read_log(tmp_path / name) for name in ("whole", "killed")]
    for line in [*logs[0], *logs[1]]:
        line.pop("seconds", None)
    assert logs[0] == logs[1]
    loras = [load_file(tmp_path / name / "sana.safetensors") for name in ("whole", "killed")]
    assert all((loras[0][name] == loras[1][name]).all() for name in loras[0].keys() | loras[1].keys())
    assert len(list((tmp_path / "killed" / "steps").iterdir())) <= 3


def test_an_interrupt_saves_and_the_same_command_goes_on(tmp_path, checkpoint):
    write_pictures(tmp_path / "pictures", 6)
    process = start(tmp_path, checkpoint, "out")
    log = tmp_path / "out" / "log.jsonl"
    while process.poll() is None and (not log.exists() or log.read_text().count("grad_norm") < 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in said
    done = log.read_text().count("grad_norm")
    assert (tmp_path / "out" / "steps" / f"step-{done:07d}" / "state.json").exists()
    assert not list((tmp_path / "out" / ".sana-batch").glob("run-*"))
