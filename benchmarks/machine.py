"""What every benchmark writes beside its figures: when, where, with which versions; what a process or test prints."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import ROOT


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


def write(benchmark: str, figures: dict[str, Any]) -> None:
    """Write `figures` of the file `benchmark` to the .json beside it, behind the description, and print them."""
    text = json.dumps({**description(), **figures}, indent=2) + "\n"
    Path(benchmark).with_suffix(".json").write_text(text)
    sys.stdout.write(text)


def last_line(*command: str, **environment: str) -> Any:
    """Return what the JSON in the last line says that Python prints for `command`."""
    own = {**os.environ, **environment}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
