"""The head of the cluster dies while ComfyUI uses it: one node has an error, and the server keeps running."""

import os
import signal
import time

import pytest
from host import GraphError, run_graph, start_server
from machines import add_node
from queues import batch_graph, configure

NAME = "test-cluster-head"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with start_server(NAME, tmp_path_factory.mktemp("output")) as running:
        yield running


@pytest.fixture
def head(cluster):
    """A cluster that the server's operator has configured; its head's processes."""
    configure(NAME, cluster.client_address)
    add_node(cluster)
    kinds = cluster.head_node.all_processes
    return [kinds[kind][0].process.pid for kind in ("gcs_server", "raylet")]


def graph(devices, seed, **inputs):
    return batch_graph(devices, **{"seed": seed, "steps": 2, "count": 2, **inputs})


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment", ["starting", "drawing", "between two runs"])
def test_a_dead_head_is_an_error_on_the_node_within_a_minute_and_the_server_goes_on(server, head, moment):
    killed = None

    def kill():
        for pid in head:
            os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    if moment == "between two runs":
        list(run_graph(server, graph("cluster", 1)))
        killed = kill()
    # enough to be at it when the head dies, whenever that is
    long = graph("cluster", 2) if killed else graph("cluster", 2, count=200, steps=40)
    with pytest.raises(GraphError, match="cluster: (lost the head|nobody answers) at ray://127.0.0.1:"):
        for event in run_graph(server, long):
            kind = event["type"] if isinstance(event, dict) else "preview"
            begun = kind == "progress" or moment == "starting" and kind == "executing" and event["data"]["node"] == "5"
            if begun and killed is None:
                killed = kill()
    seconds = time.monotonic() - killed
    assert seconds < 60
    events = list(run_graph(server, graph("default", 3)))
    assert events[-1]["type"] == "execution_success"
    assert os.path.exists(f"/proc/{server.pid}")
