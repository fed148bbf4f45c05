"""The log lines and errors of processes with the variables of a launcher, which may be left over from another job."""

import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from forked import Forked
from launched import free_port

from sana_core.errors import InputError, SanaError
from sana_core.training import ranks
from sana_core.training.ranks import joined

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start(meeting=3, **variables):
    """Start a process with a launcher's `variables`, which waits `meeting` seconds for others."""

    def work():
        for name in LAUNCHER:
            os.environ.pop(name, None)
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.update({name: str(value) for name, value in variables.items()})
        ranks.MEETING = timedelta(seconds=meeting)
        try:
            with ranks.joined("cpu") as rank:
                sys.stdout.write(f"rank {rank.rank} of {rank.size}")
        except SanaError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return 1

    return Forked(work)


def ended(process, limit=60):
    """Return exit status, output, our lines of stderr and the seconds of a process."""
    began = time.monotonic()
    killer = threading.Timer(limit, process.send_signal, [signal.SIGKILL])
    killer.start()
    out, err = process.communicate()
    killer.cancel()
    # torch also writes warnings about its sockets.
    lines = [line for line in err.splitlines() if re.match(r"\d\d:\d\d:\d\d |\w+Error: ", line)]
    return process.returncode, out, lines, time.monotonic() - began


@contextmanager
def other_program():
    """The port of a program that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept():
            try:
                while True:
                    connections.append(server.accept()[0])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        for connection in connections:
            connection.close()
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_variables_left_over_from_another_job_are_named_at_once_and_end_in_one_line(rank):
    port = free_port()
    status, _, lines, seconds = ended(start(RANK=rank, WORLD_SIZE=2, MASTER_PORT=port))
    assert status == 1 and seconds < 40, lines
    waiting, error = lines
    name = f"rank {rank} of 2 at 127.0.0.1:{port}"
    assert waiting[9:] == f"waiting for the other processes of this run, as {name}; to train in one process, unset RANK"
    assert error == f"TrainingError: training: rank {rank} has not met the 1 others in 3 s; start them all"


def test_a_port_of_another_program_is_named():
    with other_program() as port:
        status, _, lines, seconds = ended(start(RANK=0, WORLD_SIZE=2, MASTER_PORT=port))
        assert status == 1 and seconds < 30
        assert (
            lines[-1].startswith("InputError: MASTER_PORT: another program on this machine uses it")
            and str(port) in lines[-1]
        )
        status, _, lines, seconds = ended(start(RANK=1, WORLD_SIZE=2, MASTER_PORT=port))
        assert status == 1 and seconds < 40
        assert lines[-1].startswith("TrainingError: training: rank 1 has not met the 1 others")


@pytest.mark.parametrize(
    "variables",
    [{"RANK": "x"}, {"WORLD_SIZE": "two"}, {"WORLD_SIZE": 2**33}, {"MASTER_PORT": 70000}, {"MASTER_PORT": "x"}],
)
def test_variables_that_are_no_numbers_are_refused(variables):
    status, _, lines, _ = ended(start(**{"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": 29500, **variables}))
    assert status == 1 and len(lines) == 1 and lines[0].startswith("InputError: launcher: got rank ")
    assert str(next(iter(variables.values()))) in lines[-1]


@pytest.mark.parametrize("missing", LAUNCHER)
def test_a_process_without_one_of_the_variables_is_alone(missing):
    variables = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, missing: ""}
    assert ended(start(**variables))[:3] == (0, "rank 0 of 1", [])


def test_processes_wait_for_one_that_comes_late():
    port = free_port()
    early = [start(60, RANK=rank, WORLD_SIZE=3, MASTER_PORT=port) for rank in (0, 1)]
    waiting = next(line for line in early[0].stderr if "waiting for" in line)
    results = [ended(process) for process in [start(60, RANK=2, WORLD_SIZE=3, MASTER_PORT=port), *early]]
    assert [(status, out) for status, out, *_ in results] == [(0, f"rank {rank} of 3") for rank in (2, 0, 1)]
    assert waiting[9:].startswith("waiting for the other processes of this run, as rank 0 of 3")


def test_settings_of_accelerate_launch_that_have_no_effect_are_named():
    launcher = {"RANK": 0, "WORLD_SIZE": 1}
    unused = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": 4}
    plain = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "False"}
    status, _, (line,), _ = ended(start(**launcher, **unused, ACCELERATE_USE_FSDP="true", MASTER_PORT=free_port()))
    assert status == 0 and "settings of accelerate launch are not used" in line
    for words in (
        "mixed_precision fp16 (here: dtype)",
        "gradient_accumulation_steps 4 (here: accumulate)",
        "use_fsdp true",
    ):
        assert words in line
    assert ended(start(**launcher, **plain, MASTER_PORT=free_port()))[:3] == (0, "rank 0 of 1", [])
    # accelerate launch starts a single process without RANK
    status, _, (line,), _ = ended(start(**unused))
    assert status == 0 and "mixed_precision fp16" in line


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("mps", "gloo")])
def test_gpus_that_torch_cannot_connect_are_named(kind, backend, monkeypatch):
    """torch for Windows has no NCCL, and gloo sends no tensors of Apple's GPU."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr("sana_core.training.ranks.choose_device", lambda name: torch.device(kind, 0))
    expected = rf"^launcher: got processes on {kind}, .* \(it has no {backend} for {kind}\), .* set device to cpu$"
    with pytest.raises(InputError, match=expected), joined(kind):
        pass


def test_ctrl_c_ends_a_process_that_waits():
    process = start(300, RANK=0, WORLD_SIZE=2, MASTER_PORT=free_port())
    for line in process.stderr:
        if "waiting for" in line:
            break
    process.send_signal(signal.SIGINT)
    status, *_, seconds = ended(process, 30)
    assert status != 0 and seconds < 10
