"""SIGKILL of one rank of a run: the others end and name the dead rank. A resumed run ends like an uninterrupted one."""

import random
import signal
import subprocess
import sys
import time
from platform import node

import psutil
import pytest
from launched import start_ranks
from pictures import write_pictures
from safetensors.torch import load_file
from setup import ROOT
from trained import difference, lines_of, same, write_settings

pytestmark = pytest.mark.slow
KILLS, STEPS = 2, 24


def start(folder, checkpoint, name, ranks, kind, launcher=None):
    options, phase = {"save_every": 3, "parallel.kind": kind}, {"accumulate": 4, "steps": STEPS}
    file = write_settings(folder, checkpoint, name, options, phase)
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={KILLS}"]
    command = [sys.executable, "-m", *(launcher or torchrun), "-m", "sana_core", "train", str(file)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def workers(process):
    try:
        result = psutil.Process(process.pid).children(recursive=True)
        return [child for child in result if "sana_core" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def steps_done(log):
    return log.read_text().count("grad_norm") if log.exists() else 0


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_launcher_goes_on_by_itself_after_a_kill_of_one_rank(tmp_path, checkpoint, kind):
    write_pictures(tmp_path / "pictures", 6)
    uninterrupted = start(tmp_path, checkpoint, "whole", 4, kind)
    said = [uninterrupted.communicate()[1]]
    killed = start(tmp_path, checkpoint, "killed", 4, kind)
    rng, log = random.Random(3), tmp_path / "killed" / "log.jsonl"
    for kill in range(KILLS):
        target_step = STEPS * (kill + 1) // (KILLS + 1)
        while killed.poll() is None and not (len(workers(killed)) == 4 and steps_done(log) >= target_step):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.2)
        victims = workers(killed)
        assert victims, killed.communicate()[1][-3000:]
        rng.choice(victims).kill()
        while killed.poll() is None and {victim.pid for victim in victims} & {victim.pid for victim in workers(killed)}:
            time.sleep(0.01)
    said.append(killed.communicate()[1])
    assert [uninterrupted.returncode, killed.returncode] == [0, 0], said[1][-3000:]
    assert same(*(tmp_path / name / "sana.safetensors" for name in ("whole", "killed")))
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "killed")


def test_a_run_that_was_killed_goes_on_with_fewer_ranks(tmp_path, checkpoint):
    write_pictures(tmp_path / "pictures", 6)
    uninterrupted = start(tmp_path, checkpoint, "whole", 4, "fsdp")
    uninterrupted.communicate()
    killed, log = start(tmp_path, checkpoint, "killed", 4, "fsdp"), tmp_path / "killed" / "log.jsonl"
    while killed.poll() is None and steps_done(log) < STEPS // 2:
        time.sleep(0.01)
    for process in [psutil.Process(killed.pid), *workers(killed)]:
        process.kill()
    killed.communicate()
    fewer = start(tmp_path, checkpoint, "killed", 2, "fsdp")
    _, said = fewer.communicate()
    assert [uninterrupted.returncode, fewer.returncode] == [0, 0], said[-3000:]
    one, other = (load_file(tmp_path / name / "sana.safetensors") for name in ("whole", "killed"))
    assert difference(one, other) < 1e-5


def test_the_launcher_of_accelerate_starts_the_run_that_torchrun_does(tmp_path, checkpoint):
    write_pictures(tmp_path / "pictures", 6)
    one = start(
        tmp_path, checkpoint, "one", 2, "fsdp", ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    )
    said = one.communicate()[1]
    other = start(tmp_path, checkpoint, "other", 2, "fsdp")
    other.communicate()
    assert [one.returncode, other.returncode] == [0, 0], said[-3000:]
    assert "FSDP over gloo: 2 processes" in said
    assert same(*(tmp_path / name / "sana.safetensors" for name in ("one", "other")))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_launcher_that_watches_the_others_end_within_a_minute_and_name_the_dead(how, capfd):
    def work(ranks):
        while True:
            ranks.total(1.0)

    processes, results = start_ranks(2, work)
    time.sleep(8)
    psutil.Process(processes[1].pid).send_signal(how)
    began = time.monotonic()
    processes[0].join(60)
    assert time.monotonic() - began < 60 and processes[0].exitcode is not None
    processes[1].kill()
    said = capfd.readouterr().err
    if not results.empty():
        kind, said, _ = results.get()[1]
        assert kind == "TrainingError"
    assert f"lost rank 1 on {node()}, process {processes[1].pid}" in said
    assert "the same command resumes" in said
