"""What every benchmark writes beside its figures: when, where, with which versions; and what a test prints."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]


def description() -> dict:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores {platform.machine()}, {platform.system()}",
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")}
        | {"python": platform.python_version()},
    }


def printed_by(test: str) -> str:
    """Run the tests of that file, which all have to pass, and return what they print."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-s", test]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
