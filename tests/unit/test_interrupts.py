"""Ctrl+C in code whose exceptions Python ignores."""

import os
import signal
import sys
import threading

import pytest
import torch

from sana_core.commands import train
from sana_core.runtime.cancellation import noting_interrupts
from sana_core.training.ranks import ALONE
from sana_core.training.settings import Phase, TrainingSettings


class Deleted:
    """The signal comes while this is deleted, where no error leaves."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_swallowed_interrupt_is_raised_by_the_next_poll():
    before = signal.getsignal(signal.SIGINT)
    with noting_interrupts() as poll:
        poll()
        Deleted()
        with pytest.raises(KeyboardInterrupt):
            poll()
    assert signal.getsignal(signal.SIGINT) is before


def test_others_are_raised_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), noting_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def sigint():
    """Set what Ctrl+C does, which is nothing where the tests run in the background."""
    before = signal.getsignal(signal.SIGINT)

    def use(handler):
        signal.signal(signal.SIGINT, handler)
        return handler

    yield use
    signal.signal(signal.SIGINT, before)


def test_what_a_launcher_passes_on_is_no_second_wish_to_stop_a_training(monkeypatch, sigint):
    now, before = [100.0], sigint(signal.default_int_handler)
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    with train.stopping() as poll:
        poll()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            poll()
        now[0] += train.ONE_PRESS + 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_training_in_the_background_does_not_hear_of_ctrl_c(sigint):
    sigint(signal.SIG_IGN)
    with train.stopping() as poll:
        signal.raise_signal(signal.SIGINT)
        poll()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_second_press_that_a_launcher_passes_on_does_not_interrupt_the_saving(monkeypatch, sigint):
    now = [100.0]
    sigint(signal.default_int_handler)
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    with train.stopping():
        signal.raise_signal(signal.SIGINT)
        now[0] += train.ONE_PRESS + 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        now[0] += train.ONE_PRESS + 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("message", ["CUDA error: an illegal memory access was encountered", "out of memory"])
def test_an_error_of_the_saving_is_not_taken_for_the_end_of_the_run(sigint, message):
    sigint(signal.default_int_handler)
    kind = torch.OutOfMemoryError if message == "out of memory" else RuntimeError
    with pytest.raises(kind, match=message), train.stopping():
        signal.raise_signal(signal.SIGINT)
        raise kind(message)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
        torch.distributed.DistBackendError("NCCL error"),
    ],
    ids=["gloo", "nccl"],
)
def test_a_connection_that_a_launcher_ends_after_ctrl_c_is_the_end_of_the_run(sigint, error):
    sigint(signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), train.stopping():
        signal.raise_signal(signal.SIGINT)
        raise error
    with pytest.raises(type(error)), train.stopping():
        raise error


def test_a_training_in_another_thread_leaves_the_signals_alone():
    before, polls = signal.getsignal(signal.SIGINT), []

    def work():
        with train.stopping() as poll:
            poll()
            polls.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert polls == [before]


def test_the_handlers_are_set_back_if_an_interrupt_comes_while_they_are_set(monkeypatch, sigint):
    before, set_handler = sigint(signal.default_int_handler), signal.signal
    of_sigterm = signal.getsignal(signal.SIGTERM)

    def set_and_interrupt(number, handler):
        old = set_handler(number, handler)
        if number == signal.SIGTERM and handler is not of_sigterm:
            raise KeyboardInterrupt
        return old

    monkeypatch.setattr(signal, "signal", set_and_interrupt)
    with pytest.raises(KeyboardInterrupt), train.stopping():
        pytest.fail("the run began")
    assert signal.getsignal(signal.SIGINT) is before and signal.getsignal(signal.SIGTERM) is of_sigterm


def test_a_handler_of_c_code_stays(monkeypatch):
    """Python shows a handler as None if a program set it before it started Python."""
    handler_of = signal.getsignal
    before = handler_of(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else handler_of(number))
    with train.stopping():
        assert handler_of(signal.SIGTERM) is before
    assert handler_of(signal.SIGTERM) is before


def closed_file():
    with open(os.devnull, "w") as file:
        return file


class Busy:
    """A stderr in the middle of a write, which a signal interrupts."""

    def write(self, text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")


@pytest.mark.parametrize("stderr", [closed_file, Busy])
def test_a_stderr_that_takes_no_text_does_not_end_the_step(monkeypatch, sigint, stderr):
    sigint(signal.default_int_handler)
    monkeypatch.setattr(sys, "stderr", stderr())
    with train.stopping() as poll:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            poll()


def test_a_closed_stderr_does_not_end_a_training(monkeypatch, capsys, tmp_path):
    def learn(settings, report, progress, poll, ranks):
        progress("encoding", 1, 2)
        return tmp_path / "sana.safetensors"

    monkeypatch.setattr("sana_core.training.trainer.train", learn)
    monkeypatch.setattr(sys, "stderr", closed_file())
    settings = TrainingSettings("model", str(tmp_path), (Phase(("data",), 128),), device="cpu")
    train.run_training(settings, ALONE, tensorboard=False, wandb=False)
    assert capsys.readouterr().out == f"{tmp_path / 'sana.safetensors'}\n"
