"""A cluster's address behind which nobody answers: the wait can be cancelled, and ends with a named error."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest
import ray

from sana_core.cluster.connection import call_in_thread, connect_client, connected
from sana_core.errors import ClusterError, VersionError
from sana_core.runtime import limits
from sana_core.runtime.cancellation import no_poll


class Cancelled(BaseException):
    """As ComfyUI's, which is no Exception."""


def connect(address, poll=no_poll):
    with connected(address, poll):
        pass


@pytest.fixture
def silent_port():
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize("way, address", [(connect, "127.0.0.1:"), (connect_client, "ray://127.0.0.1:")])
def test_the_wait_for_a_cluster_that_says_nothing_ends_with_cancel(silent_port, way, address):
    asked = []

    def poll():
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > 1:
            raise Cancelled

    connect_started = time.monotonic()
    with pytest.raises(Cancelled):
        way(f"{address}{silent_port}", poll)
    assert time.monotonic() - asked[0] < 3
    gaps = [later - earlier for earlier, later in zip(asked, asked[1:], strict=False)]
    assert len(asked) >= 3 and max(gaps) < 1.5, (connect_started, asked)


@pytest.mark.parametrize("way", [connect, connect_client])
def test_a_ray_that_ignores_tokens_is_refused(monkeypatch, way):
    monkeypatch.setattr(ray, "__version__", "2.53.0")
    with pytest.raises(VersionError, match="^cluster: got Ray 2.53.0, expected 2.54 or newer, .*; install one version"):
        way("ray://127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.parametrize("way, address", [(connect, "127.0.0.1:1"), (connect_client, "ray://127.0.0.1:1")])
def test_the_error_names_the_address_after_some_seconds(way, address):
    started = time.monotonic()
    with pytest.raises(ClusterError, match=f"^cluster: nobody answers at {address} .*; start Ray there, correct the"):
        way(address)
    assert time.monotonic() - started < 45


def test_a_connection_that_comes_too_late_is_ended():
    answered, undone = threading.Event(), []
    with pytest.raises(TimeoutError, match="no answer for 1 s"):
        call_in_thread(lambda: answered.wait(10), undone.append, no_poll, 1.0)
    answered.set()
    deadline = time.monotonic() + 10
    while undone != [True]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_time_in_which_the_process_was_stopped_is_no_silence(monkeypatch):
    """The thread that talks to the cluster was stopped as well, and may run later than the one that waits for it."""
    now, looks, continued = [0.0], [], threading.Event()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def poll():
        now[0] += 300.0 if len(looks) == 1 else 0.5
        looks.append(now[0])
        if len(looks) == 4:
            continued.set()

    assert call_in_thread(lambda: continued.wait(20), lambda result: None, poll, 40.0)


def test_silence_is_still_found(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def poll():
        now[0] += 20.0

    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer for 4 s"):
        call_in_thread(lambda: never.wait(20), lambda result: None, poll, 4.0)
    never.set()
