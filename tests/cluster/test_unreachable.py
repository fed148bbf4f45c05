"""A cluster's address behind which nobody answers: the wait can be cancelled, and ends with a named error."""

import socket
import time

import pytest

from sana_core.batch.cluster import connect
from sana_core.errors import ClusterError


class Cancelled(BaseException):
    """As ComfyUI's, which is no Exception."""


@pytest.fixture
def silent_port():
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_the_wait_for_a_cluster_that_says_nothing_ends_with_cancel(silent_port):
    asked = []

    def poll():
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > 1:
            raise Cancelled

    connect_started = time.monotonic()
    with pytest.raises(Cancelled):
        connect(f"127.0.0.1:{silent_port}", poll)
    assert time.monotonic() - asked[0] < 3
    gaps = [later - earlier for earlier, later in zip(asked, asked[1:], strict=False)]
    assert len(asked) >= 3 and max(gaps) < 1.5, (connect_started, asked)


def test_the_error_names_the_address():
    with pytest.raises(ClusterError, match="^cluster: nobody answers at 127.0.0.1:1 .*; start Ray there, or correct"):
        connect("127.0.0.1:1")
