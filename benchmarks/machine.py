"""Helpers of all benchmarks: the description of the machine, the output of processes and tests, and the file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import ROOT


def random_transformer(width: int, layers: int) -> Any:
    """Return diffusers' transformer with a released width and random weights, in float32 on the CPU."""
    import torch

    from sana_core.model.known_models import Architecture, build_transformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_transformer(Architecture(width, layers)).requires_grad_(False)


def description() -> dict:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores {platform.machine()}, {platform.system()}",
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")}
        | {"python": platform.python_version()},
    }


def host_speed() -> dict[str, Any]:
    """Return the name of the processor and the milliseconds of 10^6 additions in Python, for figures of the host."""
    started, total = time.perf_counter(), 0
    for number in range(10**6):
        total += number
    milliseconds = 1000 * (time.perf_counter() - started)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "million_additions_ms": round(milliseconds, 1)}


def thread_seconds(ways: dict[str, Callable[[], Any]], rounds: int, repeats: int = 1) -> dict[str, list[float]]:
    """Return the processor time of this thread in a call of each way, by round.

    The ways are in turn from both ends, so that a slow change of the machine's load falls on all of them.
    """
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            began = time.thread_time()
            for _ in range(repeats):
                ways[way]()
            seconds[way].append((time.thread_time() - began) / repeats)
    return seconds


def printed_by(test: str) -> str:
    """Run the tests of a file and return their output. All of them must pass."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-s", test]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def write(benchmark: str, figures: dict[str, Any], only_print: bool = False) -> None:
    """Write the description and `figures` to the .json beside the file `benchmark`, and print them."""
    text = json.dumps({**description(), **figures}, indent=2) + "\n"
    if not only_print:
        Path(benchmark).with_suffix(".json").write_text(text)
    sys.stdout.write(text)


def last_line(*command: str, **environment: str) -> Any:
    """Run Python with the arguments `command`, and parse the last line of its output as JSON."""
    options: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True, "check": True}
    process = subprocess.run([sys.executable, *command], env={**os.environ, **environment}, **options)
    return json.loads(process.stdout.splitlines()[-1])
