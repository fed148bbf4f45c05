"""A real Ray cluster, all its machines on this one, with a logical GPU each."""

import os
from contextlib import contextmanager

import pytest
import ray


@contextmanager
def start_cluster():
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
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
