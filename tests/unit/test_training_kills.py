"""SIGKILL at any moment, also while a state is written: what goes on ends where a run ends that nobody killed."""

import random
import signal
import time

import pytest
from forked import command
from pictures import write_pictures
from trained import lines_of, same, write_settings

KILLS = 4
OWN = {"save_every": 2, "validation.every": 5, "validation.share": 0.3}


def start(folder, checkpoint, name):
    return command("train", write_settings(folder, checkpoint, name, OWN, {"steps": 40}))


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
    for file in ("steps/step-0000040/state.safetensors", "sana.safetensors"):
        assert same(tmp_path / "whole" / file, tmp_path / "killed" / file)
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "killed")
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
