"""A heartbeat ends the process of a rank that waits for a dead rank, and no other process."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch
from launched import free_port, start_ranks
from pictures import write_pictures
from trained import write_settings

from sana_core.errors import TrainingError
from sana_core.training import ranks, states, trainer
from sana_core.training.ranks import BEAT, BEATS, FAILED, GRACE, LOST, NAMES, SAVE_PATIENCE, SAVING, Heartbeat, joined
from sana_core.training.settings import read_settings

END = 2 * SAVE_PATIENCE


class Exit(Exception):
    """What os._exit does in these tests."""


class Clock:
    """Time of a heartbeat of rank 1, which passes while its thread waits. Rank 0 beats except in `silence`.

    The thread itself is stopped from the start of `still` until its end. Rank 0 completes a state in `saving`.
    """

    def __init__(self, silence, still=(END, END), saving=(END, END)):
        self.now, self.silence, self.still, self.saving = 0.0, silence, still, saving
        self.store = torch.distributed.HashStore()
        self.store.set(f"{NAMES}/0", "rank 0")

    def wait(self, seconds):
        self.now += seconds
        if self.still[0] <= self.now < self.still[1]:
            self.now = self.still[1]
        if not self.silence[0] <= self.now < self.silence[1]:
            is_saving = self.saving[0] <= self.now < self.saving[1]
            self.store.set(f"{BEATS}/0", str(self.now) + SAVING.decode() * is_saving)
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


@pytest.mark.parametrize(("saved", "ends"), [(100.0, 100.0), (END, SAVE_PATIENCE)], ids=["saved", "limit"])
def test_a_rank_waits_with_a_limit_while_the_first_completes_a_state(monkeypatch, saved, ends):
    clock = Clock((END, END), saving=(0.0, saved))
    clock.store.set(FAILED, "rank 2: out of memory")
    assert ends <= ended_at(monkeypatch, clock) <= ends + 2 * BEAT


def test_a_first_rank_that_dies_while_it_completes_a_state_is_not_waited_for(monkeypatch):
    ended = ended_at(monkeypatch, Clock((40.0, END), saving=(0.0, END)))
    assert LOST + GRACE <= ended - 40.0 <= LOST + GRACE + 3 * BEAT


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not fork")
def test_the_state_that_is_being_completed_survives_the_loss_of_another_rank(tmp_path, checkpoint, monkeypatch):
    for name, seconds in (("BEAT", 0.2), ("LOST", 1.0), ("GRACE", 0.5)):
        monkeypatch.setattr(ranks, name, seconds)
    write_pictures(tmp_path / "pictures", 4)
    phase = {"steps": 4, "batch": 2}
    settings = read_settings(write_settings(tmp_path, checkpoint, "out", {"save_every": 2}, phase))
    digest_file, take_step = states.digest_file, trainer.Trainer.take_step

    def digest_slowly(file):
        # The heartbeat would end this process after 1.5 s.
        time.sleep(2)
        return digest_file(file)

    def stop_in_step_3(run):
        if run.progress.step == 2 and run.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return take_step(run)

    monkeypatch.setattr(states, "digest_file", digest_slowly)
    monkeypatch.setattr(trainer.Trainer, "take_step", stop_in_step_3)
    processes, _ = start_ranks(2, lambda both: trainer.train(settings, ranks=both))
    processes[0].join(100)
    ended = processes[0].exitcode is not None
    for process in processes:
        process.kill()
    assert ended and [step for step, _ in states.find_states(tmp_path / "out")] == [2]


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
