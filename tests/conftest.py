"""Paths. The project comes last on sys.path: its `nodes` must not stand before ComfyUI's nodes.py."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT)]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The bundled checkpoint: real classes, really trained."""
    return ROOT / "demo" / "sana-tiny"
