"""A real server with this pack, for all tests of this folder."""

import json

import pytest
from host import start_server
from setup import ROOT


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with start_server("test-server", tmp_path_factory.mktemp("output")) as running:
        yield running


@pytest.fixture
def demo():
    """The shipped demo graph in API format."""
    return json.loads((ROOT / "tests" / "graphs" / "demo.json").read_text())
