"""A heartbeat ends the process of a rank that waits for a dead rank, and no other process."""

import multiprocessing
import os
import sys
import time

import pytest
import torch

from sana_core.training import ranks
from sana_core.training.ranks import BEAT, BEATS, FAILED, GRACE, LOST, NAMES, Heartbeat

END = 200.0


class Exit(Exception):
    """What os._exit does in these tests."""


class Clock:
    """Time of a heartbeat of rank 1, which passes while its thread waits. Rank 0 beats except in `silence`.

    The thread itself stands still from the start of `still` until its end.
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
