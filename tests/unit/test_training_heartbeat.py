"""A heartbeat ends the process of a rank that waits for a dead rank, and no other process."""

import multiprocessing
import os
import sys
import threading
import time

import pytest
import torch
from launched import free_port

from sana_core.errors import TrainingError
from sana_core.training import ranks
from sana_core.training.ranks import BEAT, BEATS, FAILED, GRACE, LOST, NAMES, Heartbeat, joined

END = 200.0


class Exit(Exception):
    """What os._exit does in these tests."""


class Clock:
    """Time of a heartbeat of rank 1, which passes while its thread waits. Rank 0 beats except in `silence`.

    The thread itself is stopped from the start of `still` until its end.
    """

    def __init__(self, silence, still=(END, END)):
        self.now, self.silence, self.still = 0.0, silence, still
        self.store = torch.distributed.HashStore()
        self.store.set(f"{NAMES}/0", "rank 0")

    def wait(self, seconds):
        self.now += seconds
        if self.still[0] <= self.now < self.still[1]:
            self.now = self.still[1]
        if not self.silence[0] <= self.now < self.silence[1]:
            self.store.set(f"{BEATS}/0", str(self.now))
        return self.now > END


def ended_at(monkeypatch, clock):
    """Return the time at which the heartbeat ends the process, None if it does not."""

    def leave(status):
        raise Exit

    monkeypatch.setattr(ranks.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(ranks, "_exit", leave)
    heartbeat = Heartbeat(clock.store, 1, 2, "rank 1")
    heartbeat.ended = clock
    try:
        heartbeat.run()
    except Exit:
        return clock.now
    return None


def test_a_rank_that_stays_silent_ends_the_process(monkeypatch, capsys):
    ended = ended_at(monkeypatch, Clock((40.0, END)))
    assert LOST + GRACE <= ended - 40.0 <= LOST + GRACE + 3 * BEAT
    assert capsys.readouterr().err == "\ntraining: lost rank 0; the same command resumes\n"


def test_a_rank_that_beats_again_in_time_does_not_end_the_process(monkeypatch):
    assert ended_at(monkeypatch, Clock((40.0, 40.0 + LOST + GRACE / 2))) is None


def test_silence_does_not_count_while_the_thread_itself_stands_still(monkeypatch):
    """Both ranks save for LOST seconds. Rank 0 needs GRACE seconds more."""
    still = (40.0, 40.0 + LOST)
    assert ended_at(monkeypatch, Clock((40.0, still[1] + GRACE + 2 * BEAT), still)) is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not fork")
def test_a_closed_stderr_does_not_keep_the_process_alive():
    def wait_for_the_dead():
        ranks.BEAT = ranks.GRACE = 0.01
        reader, writer = os.pipe()
        os.close(reader)
        # A write into a pipe that nobody reads raises BrokenPipeError.
        sys.stderr = os.fdopen(writer, "w")
        store = torch.distributed.HashStore()
        store.set(FAILED, "rank 1: out of memory")
        Heartbeat(store, 0, 2, "rank 0").start()
        time.sleep(10)
        os._exit(3)

    process = multiprocessing.get_context("fork").Process(target=wait_for_the_dead)
    process.start()
    process.join(60)
    assert process.exitcode == 1


def heartbeats():
    return [thread for thread in threading.enumerate() if thread.name == "sana training heartbeat"]


@pytest.fixture
def alone(monkeypatch):
    """Variables of a launcher that starts one rank."""
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ranks, "BEAT", 0.01)


def test_a_process_group_that_is_not_destroyed_leaves_the_error_of_the_run(alone, monkeypatch, caplog):
    destroy = torch.distributed.destroy_process_group

    def destroy_and_fail():
        destroy()
        raise RuntimeError("NCCL error: unhandled cuda error")

    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroy_and_fail)
    with pytest.raises(torch.OutOfMemoryError, match="step 3"), joined("cpu"):
        assert heartbeats()
        raise torch.OutOfMemoryError("step 3")
    assert not heartbeats()
    assert "was not closed (RuntimeError: NCCL error: unhandled cuda error)" in caplog.text


@pytest.mark.parametrize("call", ["clone", "set"])
def test_a_store_that_is_lost_before_the_first_beat_is_named_in_one_line(alone, monkeypatch, call):
    class Lost(torch.distributed.PrefixStore):
        pass

    def lose(*arguments):
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    setattr(Lost, call, lose)
    monkeypatch.setattr(torch.distributed, "PrefixStore", Lost)
    if call == "set":
        # The clone of a PrefixStore has the class of torch.
        Lost.clone = lambda store: store
    Lost.check = lose
    expected = "lost the machine that the run was started on; the same command resumes"
    with pytest.raises(TrainingError, match=expected), joined("cpu"):
        pytest.fail("the run began")
    assert not heartbeats()
