"""One run at a time holds a folder, whatever became of the last one."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from uuid import uuid4

import filelock
import pytest

from sana_core.errors import OutputError
from sana_core.runtime import folder_lock as module
from sana_core.runtime.folder_lock import OWN, check_run, hold

HEARTBEAT_INTERVAL, STALE_AFTER = 0.1, 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in (
        ("HEARTBEAT_INTERVAL", HEARTBEAT_INTERVAL),
        ("STALE_AFTER", STALE_AFTER),
        ("POLL_INTERVAL", 0.05),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def no_locks(monkeypatch, tmp_path_factory):
    """As on a network folder that carries no locks from one machine to another."""
    locks, real = tmp_path_factory.mktemp("locks"), filelock.FileLock
    monkeypatch.setattr(
        filelock, "FileLock", lambda file, *options, **more: real(locks / uuid4().hex, *options, **more)
    )


def keep(folder, host, pipe):
    module.node = lambda: host
    with hold(folder) as held:
        pipe.send(held.run.name)
        while True:
            time.sleep(0.02)
            try:
                held.check()
            except BlockingIOError as error:
                pipe.send(str(error))
                return


@contextmanager
def another_run(folder, host="here"):
    """A context with a process that holds `folder`, and the pipe from it."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=keep, args=(folder, host, theirs))
    process.start()
    try:
        assert ours.poll(30)
        yield process, ours
    finally:
        process.kill()
        process.join()


def kill(process):
    process.kill()
    process.join()


def test_it_leaves_nothing_behind_and_removes_what_dead_runs_left(tmp_path):
    out = tmp_path / "out"
    with another_run(out) as (process, pipe):
        run = out / OWN / pipe.recv()
        kill(process)
    (run / ".0123.part").write_bytes(b"half")
    foreign = out / OWN / "run-ffff" / "mine.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    (out / ".00000_0.png.0123abcd").write_text("mine")
    with hold(out) as held:
        assert not run.exists()
        (held.run / ".4567.part").write_bytes(b"half")
    assert {path.name for path in out.rglob("*") if path.is_file()} == {"mine.txt", ".00000_0.png.0123abcd"}
    with hold(tmp_path / "new"):
        pass
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_a_run_that_lives_is_named_and_nothing_of_it_is_touched(tmp_path, host):
    with another_run(tmp_path, host) as (process, pipe):
        run = tmp_path / OWN / pipe.recv()
        (run / ".0123.part").write_bytes(b"half")
        with pytest.raises(BlockingIOError, match=r"another run, which began at 2.*; wait for its end"):
            hold(tmp_path).__enter__()
        assert (run / ".0123.part").read_bytes() == b"half" and process.is_alive()


def test_the_same_process_holds_it_once(tmp_path):
    with hold(tmp_path), pytest.raises(BlockingIOError, match="is in use by another run, which began at 2"):
        hold(tmp_path).__enter__()
    with hold(tmp_path):
        pass


def test_a_dead_run_of_this_machine_keeps_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "node", lambda: "here")
    with another_run(tmp_path) as (process, _):
        kill(process)
        started = time.monotonic()
        with hold(tmp_path):
            assert time.monotonic() - started < STALE_AFTER / 2


@pytest.mark.parametrize("locks", [True, False])
def test_a_dead_run_of_another_machine_is_watched_first(tmp_path, request, caplog, locks):
    if not locks:
        request.getfixturevalue("no_locks")
    with another_run(tmp_path, "elsewhere") as (process, _):
        kill(process)
        started = time.monotonic()
        with hold(tmp_path):
            assert time.monotonic() - started > STALE_AFTER
    assert "may be in use by a run that began at 2" in caplog.text


def test_without_locks_the_record_tells_who_lives(tmp_path, no_locks):
    with another_run(tmp_path, "elsewhere") as (process, _):
        with pytest.raises(BlockingIOError, match="in use by another run, which began at 2"):
            hold(tmp_path).__enter__()
        time.sleep(3 * HEARTBEAT_INTERVAL)
        assert process.is_alive()


def test_a_run_that_was_thought_dead_ends_when_it_wakes(tmp_path, no_locks):
    with another_run(tmp_path, "elsewhere") as (process, pipe):
        run = pipe.recv()
        os.kill(process.pid, signal.SIGSTOP)
        with hold(tmp_path) as held:
            with pytest.raises(OSError, match="is not the driver's folder"):
                check_run(tmp_path, run)
            os.kill(process.pid, signal.SIGCONT)
            assert pipe.poll(30) and "another run has taken" in pipe.recv()
            process.join(30)
            check_run(tmp_path, held.run.name)
            time.sleep(3 * HEARTBEAT_INTERVAL)
            held.check()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, number):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    message = f"^out: {tmp_path} cannot be locked \\({os.strerror(number)}\\); choose a folder on another disk$"
    with pytest.raises(OutputError, match=message), hold(tmp_path):
        pass


@pytest.mark.parametrize("locks", [True, False])
def test_of_many_that_come_at_once_one_gets_it(tmp_path, request, locks):
    if not locks:
        request.getfixturevalue("no_locks")
    fork = multiprocessing.get_context("fork")
    for _ in range(3):
        barrier, holding, results = fork.Barrier(6), fork.Event(), fork.SimpleQueue()

        def compete(barrier=barrier, holding=holding, results=results):
            module.node = (lambda: "here") if locks else (lambda: str(os.getpid()))
            barrier.wait()
            try:
                with hold(tmp_path):
                    results.put(True)
                    holding.wait()
            except BlockingIOError:
                results.put(False)

        processes = [fork.Process(target=compete) for _ in range(6)]
        for process in processes:
            process.start()
        got = [results.get() for _ in processes]
        holding.set()
        for process in processes:
            process.join()
        assert sorted(got) == [False] * 5 + [True]
        assert not list(tmp_path.iterdir())


RECORD = {"run": "a", "machine": "b", "since": "2026-01-02 03:04:05", "beat": 1}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        json.dumps({**RECORD, "since": "\x1b]0;title\x07 2026-01-02 03:04:05"}),
        json.dumps({**RECORD, "since": 5}),
        json.dumps({**RECORD, "beat": "1"}),
        json.dumps(RECORD) + " " * 10_000,
    ],
)
def test_a_record_that_is_damaged_is_named(tmp_path, content):
    (tmp_path / OWN).mkdir()
    (tmp_path / OWN / "holder.json").write_text(content)
    with pytest.raises(OSError, match="holder.json: damaged; remove .sana-batch if no run is using the folder"):
        hold(tmp_path).__enter__()
