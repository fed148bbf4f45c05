"""Ctrl+C where Python ignores what it raises."""

import signal

import pytest

from sana_core.commands import train
from sana_core.runtime.cancellation import noting_interrupts


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
