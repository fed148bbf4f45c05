"""A real Ray cluster, all its machines on this one, with a logical GPU each."""

import os
from contextlib import contextmanager

import pytest
import ray
from host import free_port


@contextmanager
def start_cluster():
    from ray._private.client_mode_hook import _explicitly_disable_client_mode
    from ray.cluster_utils import Cluster

    # A closed connection of Ray Client leaves this mode enabled. A driver in this process would then fail.
    _explicitly_disable_client_mode()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # The seconds in which the head starts the process of a client. On a busy machine, Ray's 30 s are too few.
    os.environ["RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S"] = "300"
    port = free_port()
    head = {"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": port}
    running = Cluster(initialize_head=True, head_node_args=head)
    running.client_address = f"ray://127.0.0.1:{port}"
    yield running
    ray.shutdown()
    running.shutdown()


@pytest.fixture
def cluster():
    with start_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def lasting_cluster():
    with start_cluster() as running:
        yield running
