"""SIGKILL at any moment, also while a state is written: the resumed run ends like an uninterrupted one."""

import os
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
    uninterrupted = start(tmp_path, checkpoint, "whole")
    _, said = uninterrupted.communicate()
    assert uninterrupted.returncode == 0, said
    rng, log = random.Random(3), tmp_path / "killed" / "log.jsonl"
    for kill in range(KILLS):
        process = start(tmp_path, checkpoint, "killed")
        target_step = 40 * (kill + 1) // (KILLS + 1)
        while process.poll() is None and (not log.exists() or log.read_text().count("grad_norm") < target_step):
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


def test_a_kill_before_the_unfinished_state_json_is_removed_leaves_nothing(tmp_path, checkpoint):
    """A state that kept an additional file would never be removed as an older state."""
    write_pictures(tmp_path / "pictures", 6)
    file = write_settings(tmp_path, checkpoint, "out", {"save_every": 2, "keep": 1}, {"steps": 4})

    def die_at_state_json():
        from sana_core.runtime import atomic_files

        move = atomic_files.move

        def move_and_die(part, path, replace):
            move(part, path, replace)
            if path.name == "state.json":
                os.kill(os.getpid(), signal.SIGKILL)

        atomic_files.move = move_and_die

    process = command("train", file, before=die_at_state_json)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and len(list(tmp_path.rglob("state.json"))) == 1
    process = command("train", file)
    _, said = process.communicate()
    assert process.returncode == 0 and "step 3 of 4" in said and "step 2 of 4" not in said, said
    assert [folder.name for folder in (tmp_path / "out" / "steps").iterdir()] == ["step-0000004"]
    assert not list(tmp_path.rglob("*.part"))


def test_an_interrupt_saves_and_the_same_command_goes_on(tmp_path, checkpoint):
    write_pictures(tmp_path / "pictures", 6)
    process = start(tmp_path, checkpoint, "out")
    log = tmp_path / "out" / "log.jsonl"
    while process.poll() is None and (not log.exists() or log.read_text().count("grad_norm") < 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in said
    text = log.read_text().count("grad_norm")
    assert (tmp_path / "out" / "steps" / f"step-{text:07d}" / "state.json").exists()
    assert not list((tmp_path / "out" / ".sana-batch").glob("run-*"))


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
STREAMED = {"stream": True, "save_every": 100}


def saved_at(out, log):
    steps = log.read_text().count("grad_norm")
    return [folder.name for folder in (out / "steps").iterdir()] == [f"step-{steps:07d}"]


def wait_for_steps(process, log, steps):
    while process.poll() is None and (not log.exists() or log.read_text().count("grad_norm") < steps):
        time.sleep(0.01)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_while_a_streamed_run_encodes_saves_the_finished_steps(tmp_path, checkpoint, number):
    write_pictures(tmp_path / "pictures", 6)
    file = write_settings(tmp_path, checkpoint, "out", STREAMED, {"steps": 40})
    out, encoding = tmp_path / "out", tmp_path / "encoding"

    def encode_for_ever():
        from sana_core.training import cache

        if number != signal.SIGINT:
            # Tests that run under nohup inherit an ignored SIGHUP.
            signal.signal(number, signal.SIG_DFL)
        real, calls = cache.encode_images, []

        def encode_images(*values, poll):
            calls.append(1)
            while len(calls) == 4:
                encoding.touch()
                poll()
                time.sleep(0.01)
            return real(*values, poll=poll)

        cache.encode_images = encode_images

    process = command("train", file, before=encode_for_ever)
    while process.poll() is None and not encoding.exists():
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 128 + number and "Traceback" not in said, said
    assert saved_at(out, out / "log.jsonl") and (out / "steps" / "step-0000003").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_nohup_keeps_a_run_from_hearing_that_its_terminal_is_closed(tmp_path, checkpoint):
    write_pictures(tmp_path / "pictures", 6)
    file = write_settings(tmp_path, checkpoint, "out", {}, {"steps": 6})
    process = command("train", file, before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for_steps(process, tmp_path / "out" / "log.jsonl", 2)
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate()
    assert process.returncode == 0 and "stops" not in said, said


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no terminals of this kind")
@pytest.mark.parametrize("ignored", [False, True], ids=["closed", "disowned"])
def test_a_run_in_a_terminal_that_is_closed_loses_no_step(tmp_path, checkpoint, ignored):
    """The kernel sends SIGHUP when a terminal goes away, after which nothing can be written to it."""
    import pty

    write_pictures(tmp_path / "pictures", 6)
    # A run with more steps cannot end before its terminal is closed.
    file = write_settings(tmp_path, checkpoint, "out", {"save_every": 1000}, {"steps": 30 if ignored else 300})
    main, terminal = pty.openpty()
    log = tmp_path / "out" / "log.jsonl"

    def use_terminal():
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        os.close(main)
        for number in range(3):
            os.dup2(terminal, number)
        os.close(terminal)
        # Tests that run under nohup inherit an ignored SIGHUP.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    process = command("train", file, before=use_terminal)
    os.close(terminal)
    wait_for_steps(process, log, 3)
    os.close(main)
    process.communicate()
    # 1: the run has ended, but the name of its result cannot be written.
    assert process.returncode == (1 if ignored else 128 + signal.SIGHUP)
    assert saved_at(tmp_path / "out", log)
    assert (log.read_text().count("grad_norm") == 30) == ignored


def test_a_second_signal_of_another_kind_does_not_interrupt_saving(monkeypatch):
    from sana_core.commands import train

    if not hasattr(signal, "SIGUSR1"):
        pytest.skip("Windows has no SIGUSR1")
    now, handlers = [100.0], {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with train.stopping() as poll:
            signal.raise_signal(signal.SIGUSR1)
            now[0] += train.ONE_PRESS + 1
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(SystemExit) as ended:
                poll()
            assert ended.value.code == 128 + signal.SIGUSR1
            with pytest.raises(SystemExit):
                signal.raise_signal(signal.SIGUSR1)
            now[0] += train.ONE_PRESS + 1
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGUSR1) is handlers[signal.SIGUSR1]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
