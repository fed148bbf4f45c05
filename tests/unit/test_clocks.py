"""Clocks that jump: waits use a monotonic clock, and files are compared for the same time, not for a later one."""

import itertools
import os
import time

import pytest
from test_batch_hold import another_run, kill, no_locks, quick

from sana_core.__main__ import main
from sana_core.runtime import folder_lock as holds
from sana_core.runtime.folder_lock import OWN, hold

__all__ = ["no_locks", "quick"]  # fixtures
YEAR = 365 * 86400.0


@pytest.fixture
def jumping(monkeypatch):
    """A clock that jumps a year forward and back, each time that somebody looks."""
    real, jumps = time.time, itertools.cycle([YEAR, -YEAR, 0.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    monkeypatch.setattr(time, "strftime", lambda text, *when: "1970-01-01 00:00:00")


@pytest.mark.parametrize("age", [-YEAR, YEAR])
def test_a_run_that_lives_is_known_by_its_beats_whatever_its_clock_says(tmp_path, no_locks, jumping, age):
    with another_run(tmp_path, "elsewhere") as (process, pipe):
        for path in (tmp_path / OWN).rglob("*"):
            os.utime(path, (time.monotonic() + age,) * 2)
        with pytest.raises(BlockingIOError, match="in use by another run, which began at 1970"):
            hold(tmp_path).__enter__()
        assert process.is_alive()


@pytest.mark.parametrize("age", [-YEAR, YEAR])
def test_a_dead_run_is_watched_as_long_as_ever(tmp_path, no_locks, jumping, age):
    with another_run(tmp_path, "elsewhere") as (process, _):
        kill(process)
    record = tmp_path / OWN / "holder.json"
    os.utime(record, (record.stat().st_mtime + age,) * 2)
    started = time.monotonic()
    with hold(tmp_path) as held:
        assert holds.STALE_AFTER <= time.monotonic() - started < holds.STALE_AFTER + 5
        time.sleep(3 * holds.HEARTBEAT_INTERVAL)
        held.check()


@pytest.mark.parametrize("years", [-60, -1, 30])
def test_a_batch_goes_on_among_files_of_any_age(tmp_path, checkpoint, monkeypatch, capsys, jumping, years):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red circle")
    size = ["--width", "32", "--height", "32", "--steps", "1"]
    words = ["batch", "prompts.txt", "--checkpoint", str(checkpoint), "--out", "out", "--count", "3", *size]
    assert main(words) == 0
    (tmp_path / "out" / "00000_1.png").unlink()
    when = time.monotonic() + years * YEAR
    for path in (tmp_path / "out").iterdir():
        os.utime(path, (when, when))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.png")}
    capsys.readouterr()
    assert main(words) == 0
    assert "2 of 3 images exist" in capsys.readouterr().out
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.png")}
    assert len(after) == 3 and before.items() <= after.items()
