"""A real server with this pack, for all tests of this folder."""

import json
import os

import pytest
from checkpoints import link_tiny
from host import base_directory, start_server
from setup import ROOT


@pytest.fixture(scope="session")
def audit_log(tmp_path_factory):
    """What audited/sitecustomize.py writes down of the server."""
    return tmp_path_factory.mktemp("audit") / "log"


@pytest.fixture(scope="session")
def server(tmp_path_factory, audit_log, worker_id):
    # each of xdist's workers has its own server, and a server its own log and base directory
    name = f"test-server-{worker_id}"
    output = tmp_path_factory.mktemp("output")
    environment = {
        "PYTHONPATH": str(ROOT / "tests" / "server" / "audited"),
        "AUDIT_LOG": str(audit_log),
        "AUDIT_ROOT": str(ROOT),
        "AUDIT_WRITABLE": os.pathsep.join([str(output), str(base_directory(name))]),
    }
    link_tiny(base_directory(name))
    with start_server(name, output, environment=environment) as running:
        yield running


@pytest.fixture
def demo():
    """The shipped demo graph in API format."""
    return json.loads((ROOT / "tests" / "graphs" / "tiny.json").read_text())
